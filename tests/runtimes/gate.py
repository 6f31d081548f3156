"""A gate that is killed hard: a program that starts an engine with a record, and then dies as `kill -9` makes it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio, json, os, signal, sys
from pathlib import Path
from gpu_turnstile.runtimes import records
from gpu_turnstile.runtimes.process import ProcessRuntime
told = json.loads(sys.argv[1])
async def main():
    runtime = ProcessRuntime(told["argv"], record=Path(told["record"]), port=told["port"])
    if told["dies_before_the_record"]:
        records.save = lambda file, record: os.kill(os.getpid(), signal.SIGKILL)
    await runtime.start()
    while told["until"] not in runtime.output():
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def killed_gate(argv, record: Path, *, until="up", port=None, dies_before_the_record=False):
    """Return when it is dead; whatever it started lives on."""
    told = {
        "argv": list(argv),
        "record": str(record),
        "until": until,
        "port": port,
        "dies_before_the_record": dies_before_the_record,
    }
    gate = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, json.dumps(told), stdin=subprocess.DEVNULL
    )
    assert await gate.wait() == -signal.SIGKILL
