"""A stand-in for systemctl and journalctl: a state file per unit, a real process for each that runs."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

PROGRAM = """#!{python}
import json, os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path({folder!r})
words = sys.argv[1:]
with open(folder / "calls", "a") as calls:
    calls.write(pathlib.Path(sys.argv[0]).name + " " + " ".join(words) + "\\n")
if sys.argv[0].endswith("journalctl"):
    print("loading", "out of memory", sep="\\n")
    sys.exit()
plain = [word for word in words if not word.startswith("--")]
verb, unit = plain[0], plain[1]
assert words[words.index("--") + 1] == unit
file = folder / unit
if not file.exists():
    sys.exit(f"Unit {{unit}} not found.")
told = json.loads(file.read_text())
def lives(pid):
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
    try:
        return bool(pid) and open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
if told.get("hangs"):
    time.sleep(60)
if told["active"] == "active" and not lives(told["pid"]):
    told.update(active="failed", pid=0, result="exit-code")
if verb == "start":
    if told.get("fails"):
        told.update(active="failed", result="exit-code")
    elif told["active"] != "active":
        code = "import signal, time; " + ("signal.signal(15, signal.SIG_IGN); " if told.get("deaf") else "")
        quiet = subprocess.DEVNULL
        child = subprocess.Popen([sys.executable, "-c", code + "time.sleep(60)"], stdout=quiet, stderr=quiet)
        told.update(active="active", pid=child.pid, result="success")
elif verb in ("stop", "kill") and told["pid"]:
    os.kill(told["pid"], signal.SIGKILL if verb == "kill" else signal.SIGTERM)
    told["stopping"] = True
elif verb == "show":
    if told.get("stopping") and not lives(told["pid"]):
        told.update(active="inactive", pid=0, stopping=False)
    print("MainPID=" + str(told["pid"]), "ActiveState=" + told["active"], "SubState=x", sep="\\n")
    print("Result=" + told["result"], "Job=0", "ControlGroup=/system.slice/" + unit, sep="\\n")
file.write_text(json.dumps(told))
"""


class FakeSystemd:
    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder = folder
        for name in ("systemctl", "journalctl"):
            script = folder / name
            script.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
            script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def unit(self, name: str, text: str = '"x": 0') -> None:
        """A unit that does not run; `text` adds to its state (`"fails": 1`, `"deaf": 1`, `"hangs": 1`)."""
        (self.folder / name).write_text('{"active": "inactive", "pid": 0, "result": "success", ' + text + "}")

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []
