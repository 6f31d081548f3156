"""An engine as a systemd unit, of the system or of the user: systemd starts it, ends it and keeps its output.

Tried against a stand-in for `systemctl` only, not yet on a running systemd. The unit should say `Restart=no`: a unit
that systemd starts anew behind the gate's back would hold the card of somebody else, so it is stopped and reported.

systemctl is asked only where the kernel cannot tell: while the unit's main process lives, a look at /proc is enough,
and systemd itself is asked every few seconds. Every call is bounded. A unit's name cannot become an option or a
pattern: it is checked (units.py), and stands behind `--`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from gpu_turnstile.runtimes import records
from gpu_turnstile.runtimes.base import StartFailed, StopFailed
from gpu_turnstile.runtimes.pids import of_group
from gpu_turnstile.runtimes.units import unit_name

CALL = 10.0  # seconds one call of systemctl or journalctl may take
START = 60.0  # seconds until a started unit has a process or is active
KILL_WAIT = 10.0  # seconds a unit may outlive SIGKILL
POLL = 0.25  # seconds between two looks
ASK = 5.0  # seconds between two questions to systemd while the main process lives
LINES = 50  # of output

_PROPERTIES = "MainPID,ActiveState,SubState,Result,Job,ControlGroup"
_GONE = ("inactive", "failed")


@dataclass(frozen=True, slots=True)
class State:
    """What `systemctl show` said. `pid` 0: there is no main process."""

    active: str = ""
    sub: str = ""
    result: str = ""
    pid: int = 0
    job: bool = False  # something is still to be done for it
    group: str = ""  # its control group

    @property
    def gone(self) -> bool:
        return self.active in _GONE and not self.pid


class SystemdRuntime:
    """`grace` in seconds, from the stop to SIGKILL; the unit's own TimeoutStopSec may be shorter."""

    kind: ClassVar[str] = "systemd"
    owned: ClassVar[bool] = True

    def __init__(self, unit: str, *, user: bool = False, grace: float = 90.0) -> None:
        self.unit = unit_name(unit)
        self.grace = grace
        self.on_exit: Callable[[str], None] | None = None
        self._scope = ("--user",) if user else ()
        self._lines: tuple[str, ...] = ()
        self._seen = State()  # what systemd said last
        self._changing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """A caller that gives up leaves a unit that `stop` can find."""
        await asyncio.shield(asyncio.ensure_future(self._start()))

    async def stop(self) -> None:
        """Calls made meanwhile join this one. A caller that gives up does not interrupt it."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
            self._stopping.add_done_callback(self._stopped)
        await asyncio.shield(self._stopping)

    async def alive(self) -> bool:
        state = await self._show()
        return state is not None and not state.gone

    async def adopt(self) -> bool:
        """An active unit is taken over as it is: systemd knows what it runs."""
        async with self._changing:
            state = await self._show()
            if state is None or state.active != "active":
                return False
            self._watch(state)
            await self._read_journal()
            return True

    async def pids(self) -> tuple[int, ...]:
        """The main process as systemd said last, and whoever is in the unit's control group now."""
        if self._seen.gone or self._seen == State():
            return ()
        return (self._seen.pid, *await asyncio.to_thread(of_group, self._seen.group))

    def output(self) -> tuple[str, ...]:
        """As they were when it last started or ended, or at the last question to systemd."""
        return self._lines

    async def _start(self) -> None:
        async with self._changing:
            self._unwatch()
            await self._ctl("reset-failed")  # many swaps are no crash loop
            code, said = await self._ctl("start", "--no-block")
            if code != 0:
                raise StartFailed(f"systemd does not start {self.unit}: {said or f'systemctl ended with code {code}'}")
            self._watch(await self._until_there())

    async def _until_there(self) -> State:
        deadline = asyncio.get_running_loop().time() + START
        pause = POLL / 16
        while True:
            state = await self._show() or State()
            if state.active == "active" or (state.active in ("activating", "reloading") and state.pid):
                return state
            if state.active in _GONE and not state.job:
                await self._read_journal()
                raise StartFailed(f"{self.unit} {_how(state)}", self._lines)
            if asyncio.get_running_loop().time() >= deadline:
                await self._read_journal()
                raise StartFailed(f"{self.unit} had no process within {START:g} s", self._lines)
            await asyncio.sleep(pause)
            pause = min(POLL, pause * 2)

    async def _stop(self) -> None:
        async with self._changing:
            self._unwatch()
            await self._ctl("stop", "--no-block")
            if not await self._is_gone(self.grace):
                await self._ctl("kill", "--signal=SIGKILL")
                if not await self._is_gone(KILL_WAIT):
                    raise StopFailed(f"{self.unit}: outlived SIGKILL for {KILL_WAIT:g} s, or systemd cannot be asked")
            await self._read_journal()

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._stopping = None
        if not task.cancelled():
            task.exception()  # callers have it through their own await

    async def _is_gone(self, limit: float) -> bool:
        deadline = asyncio.get_running_loop().time() + limit
        pause = POLL / 16
        while True:
            state = await self._show()
            if state is not None and state.gone and not state.job:
                return True
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(pause)
            pause = min(POLL, pause * 2)

    # ------------------------------------------------------------------------------------------- watching

    def _watch(self, state: State) -> None:
        self._unwatch()
        self._watching = asyncio.ensure_future(self._watch_on(state))

    def _unwatch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _watch_on(self, first: State) -> None:
        """Return when it has ended without being asked to; say so."""
        loop = asyncio.get_running_loop()
        pid, born, asked = first.pid, _born(first.pid), loop.time()
        while True:
            await asyncio.sleep(POLL)
            if born is not None and _born(pid) == born and loop.time() - asked < ASK:
                continue
            state, asked = await self._show(), loop.time()
            if state is None:
                continue  # systemd does not answer: no word is no end
            if state.gone:
                return await self._lost(_how(state))
            if pid and state.pid != pid:
                with contextlib.suppress(StopFailed):
                    await self._end_newcomer()
                return await self._lost("ended and was started anew by systemd, behind the gate's back; it was stopped")
            if not pid and state.pid:
                pid, born = state.pid, _born(state.pid)
            await self._read_journal()

    async def _end_newcomer(self) -> None:
        async with self._changing:
            await self._ctl("stop", "--no-block")
            await self._is_gone(self.grace)

    async def _lost(self, how: str) -> None:
        self._watching = None
        await self._read_journal()
        last = next((line for line in reversed(self._lines) if line.strip()), "")
        if self.on_exit is not None:
            self.on_exit(f"{self.unit} {how}; its last line: {last}" if last else f"{self.unit} {how}")

    # --------------------------------------------------------------------------------------------- asking

    async def _show(self) -> State | None:
        """None: systemd could not be asked."""
        code, said = await self._ctl("show", f"--property={_PROPERTIES}")
        told = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
        if code != 0 or "ActiveState" not in told:
            return None
        pid = told.get("MainPID", "")
        self._seen = State(
            active=told["ActiveState"],
            sub=told.get("SubState", ""),
            result=told.get("Result", ""),
            pid=int(pid) if pid.isdecimal() else 0,
            job=told.get("Job", "0") not in ("", "0"),
            group=told.get("ControlGroup", ""),
        )
        return self._seen

    async def _read_journal(self) -> None:
        options = ("--no-pager", "--quiet", "--output=cat", f"--lines={LINES}")
        match = f"--user-unit={self.unit}" if self._scope else f"--unit={self.unit}"
        code, said = await _call("journalctl", *self._scope, *options, match)
        if code == 0:
            self._lines = tuple(said.splitlines()[-LINES:])

    async def _ctl(self, verb: str, *options: str) -> tuple[int, str]:
        return await _call(
            "systemctl", *self._scope, "--no-pager", "--no-ask-password", verb, *options, "--", self.unit
        )


def _born(pid: int) -> str | None:
    """None also where the process is not to be seen from here (another pid namespace)."""
    return records.running(pid) if pid else None


def _how(state: State) -> str:
    if state.active == "failed":
        return f"failed ({state.result or 'no reason given'})"
    return "has ended"


async def _call(*command: str) -> tuple[int, str]:
    """The exit code and one text: its output, or what it complained about. Never raises; never lasts long."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        return 127, f"cannot run {command[0]}: {error.strerror}"
    try:
        async with asyncio.timeout(CALL):
            out, complaint = await process.communicate()
    except TimeoutError:
        return 124, f"{command[0]} did not answer within {CALL:g} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    code = process.returncode or 0
    text = out if code == 0 else complaint or out
    return code, text.decode(errors="replace").strip() if code == 0 else " ".join(text.decode(errors="replace").split())
