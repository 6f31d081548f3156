"""`kill -9` of the gate at random moments of its swaps, and what must be so whenever it was started again.

Whoever uses it says how the machine is asked which presets have an engine running: that, not the gate's own word, is
the truth here. Looked at all the while: never two engines. After each restart: the gate's first word agrees with the
machine, so there is no engine that it does not know of, and the next request is served.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from tests.e2e.gate import Gate

ROUNDS = int(os.environ.get("TURNSTILE_KILLS", "8"))
LIMIT = 60 + 10 * ROUNDS  # seconds for all of it
PRESETS = ("a", "b")


class Watcher(threading.Thread):
    """Asks fifty times a second; `worst` is the most engines it ever saw at once."""

    def __init__(self, running: Callable[[], list[str]]) -> None:
        super().__init__(daemon=True)
        self.looks, self.worst = 0, 0
        self._running = running
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.02):
            found = self._running()
            self.looks += 1
            self.worst = max(self.worst, len(found))

    def end(self) -> None:
        self._over.set()
        self.join()


@dataclass
class Kills:
    """`running`: the preset of every engine that runs on the machine now; `span`: seconds a swap takes, about."""

    gate: Gate
    running: Callable[[], list[str]]
    span: float
    served: int  # the status its engine answers with
    dice: random.Random = field(default_factory=lambda: random.Random(os.environ.get("TURNSTILE_SEED", "1")))
    found: dict[str, int] = field(default_factory=dict)  # how often a restart found what

    def run(self) -> None:
        watcher = Watcher(self.running)
        watcher.start()
        self.gate.start()
        for number in range(ROUNDS):
            self._kill_in_a_swap()
            self._start_again()
            answer = self.gate.chat(PRESETS[number % 2])
            assert answer.status_code == self.served, answer.text
            assert self.running() == [PRESETS[number % 2]]
        self.gate.stop()
        watcher.end()
        assert self.running() == []
        assert watcher.worst == 1, f"{watcher.worst} engines at once"
        assert watcher.looks > ROUNDS
        print(f"{ROUNDS} kills; the restarted gate found {self.found}, in {watcher.looks} looks never two engines")

    def _kill_in_a_swap(self) -> None:
        asking = [threading.Thread(target=self._ask, args=(preset,)) for preset in PRESETS * 2]
        for thread in asking:
            thread.start()
        time.sleep(self.dice.uniform(0, 2 * self.span))  # the moment is random on purpose
        self.gate.kill()
        for thread in asking:
            thread.join()

    def _ask(self, preset: str) -> None:
        """Whatever comes of it: the gate dies meanwhile."""
        with contextlib.suppress(httpx.HTTPError):
            self.gate.chat(preset)

    def _start_again(self) -> None:
        """Its first word is compared with the machine. An engine that was told to end may do so in between."""
        self.gate.start()
        before = self.running()
        status = httpx.get(f"{self.gate.url}/status", trust_env=False, verify=False).json()
        coming = [status["target"]] if status["phase"] == "swapping" else []
        known = sorted([*status["residents"], *status["stuck"], *coming])
        assert known in (before, self.running()), status
        what = "it serving" if status["residents"] else "it loading" if coming else "it hanging" if known else "nothing"
        self.found[what] = self.found.get(what, 0) + 1
