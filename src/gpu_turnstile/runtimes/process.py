"""An engine as a child process of ours, in a session of its own.

Kept true here: its exit is noticed when it happens; its output is read as it comes, into bounded memory, so that it
never blocks on us; after `stop` has returned, nothing that came from it lives and no zombie is left. The group gets
SIGTERM and its grace as a whole: a launcher that dies first does not cost a child the time to save its work.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, cast

from gpu_turnstile.runtimes.base import StartFailed, StopFailed
from gpu_turnstile.runtimes.group import ProcessGroup
from gpu_turnstile.runtimes.ring import OutputRing

KILL_WAIT = 10.0  # seconds a process may outlive SIGKILL (the driver frees its memory first)
KILL_AGAIN = 1.0  # seconds between two SIGKILLs: something may have been forked meanwhile
SCAN = 0.05  # seconds between two looks for members that outlived the leader
LAST_WORDS = 0.1  # seconds an exit is held back for output still in the pipe

GATES_OWN = ("TURNSTILE_", "LLMC_", "GPU_TURNSTILE_")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # in the name of one of the gate's own settings
DEFAULTS = {"GGML_NO_BACKTRACE": "1"}  # a failed assert in llama.cpp would start a debugger and die slowly


class _Child(asyncio.SubprocessProtocol):
    """One run of the process. `on_end` is called once, when it has exited and its output is in, or soon after."""

    def __init__(self, ring: OutputRing, on_end: Callable[[_Child], None]) -> None:
        self.exited = asyncio.Event()
        self.asked_to_stop = False
        self._ring = ring
        self._on_end: Callable[[_Child], None] | None = on_end
        self._drained = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.SubprocessTransport, transport)
        self.group = ProcessGroup(self.transport.get_pid())

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._ring.feed(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._drained = True
        if self.exited.is_set():
            self._end()

    def process_exited(self) -> None:
        self.exited.set()
        if self._drained:
            self._end()
        else:
            asyncio.get_running_loop().call_later(LAST_WORDS, self._end)

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)


class ProcessRuntime:
    """`env` is added to our own environment (less the gate's keys); `grace` in seconds, from SIGTERM to SIGKILL."""

    kind: ClassVar[str] = "process"
    owned: ClassVar[bool] = True

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        grace: float = 10.0,
    ) -> None:
        self.argv = tuple(argv)
        self.env = dict(env or {})
        self.cwd = None if cwd is None else Path(cwd)
        self.grace = grace
        self.on_exit: Callable[[str], None] | None = None
        self._ring = OutputRing()
        self._child: _Child | None = None
        self._changing = asyncio.Lock()
        self._stopping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the leader, until it has been stopped."""
        return None if self._child is None else self._child.group.leader

    async def start(self) -> None:
        """What an earlier run left behind is ended first. A caller that gives up leaves a process `stop` can find."""
        await asyncio.shield(asyncio.ensure_future(self._start()))

    async def stop(self) -> None:
        """Calls made meanwhile join this one. A caller that gives up does not interrupt it."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
            self._stopping.add_done_callback(self._stopped)
        await asyncio.shield(self._stopping)

    async def alive(self) -> bool:
        return self._child is not None and not self._child.exited.is_set()

    def output(self) -> tuple[str, ...]:
        return self._ring.lines()

    async def _start(self) -> None:
        async with self._changing:
            if await self.alive():
                raise StartFailed(f"{self.argv[0]} is already running as process {self.pid}")
            await self._end_child()
            environment = child_environment(os.environ, self.env)
            check_command(self.argv, self.cwd, environment)
            self._ring = OutputRing()
            self._child = await self._spawn(environment)

    async def _spawn(self, environment: dict[str, str]) -> _Child:
        try:
            _, child = await asyncio.get_running_loop().subprocess_exec(
                lambda: _Child(self._ring, self._report),
                *self.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.cwd,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise StartFailed(f"cannot run {self.argv[0]}: {getattr(error, 'strerror', None) or error}") from error
        return child

    def _report(self, child: _Child) -> None:
        if child is self._child and not child.asked_to_stop and self.on_exit is not None:
            self.on_exit(self._why(child))

    def _why(self, child: _Child) -> str:
        last = self._ring.last()
        how = f"{Path(self.argv[0]).name} {exit_text(child.transport.get_returncode())}"
        return f"{how}; its last line: {last}" if last else how

    async def _stop(self) -> None:
        async with self._changing:
            await self._end_child()

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._stopping = None
        if not task.cancelled():
            task.exception()  # callers have it through their own await; one that gave up does not want it

    async def _end_child(self) -> None:
        child = self._child
        if child is None:
            return
        child.asked_to_stop = True
        if not await self._end_group(child):
            left = ", ".join(str(p.pid) for p in await asyncio.to_thread(child.group.members))
            raise StopFailed(
                f"{self.argv[0]}: process {left or child.group.leader} outlived SIGKILL for {KILL_WAIT:g} s"
            )
        child.transport.close()
        self._child = None

    async def _end_group(self, child: _Child) -> bool:
        await asyncio.to_thread(child.group.signal, signal.SIGTERM)
        if await self._is_gone(child, self.grace):
            return True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + KILL_WAIT
        while loop.time() < deadline:
            await asyncio.to_thread(child.group.signal, signal.SIGKILL)
            if await self._is_gone(child, min(KILL_AGAIN, KILL_WAIT)):
                return True
        return False

    async def _is_gone(self, child: _Child, limit: float) -> bool:
        """Whether within `limit` seconds the leader was reaped and no other member lived."""
        try:
            async with asyncio.timeout(limit):
                await child.exited.wait()
                while not await asyncio.to_thread(child.group.is_empty):  # noqa: ASYNC110 - strangers' exits make no event
                    await asyncio.sleep(SCAN)
        except TimeoutError:
            return False
        child.group.reap()
        return True


def child_environment(parent: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The preset's own settings win; the keys that open the gate do not go down."""
    inherited = {key: value for key, value in parent.items() if not _opens_the_gate(key)}
    return {**DEFAULTS, **inherited, **own}


def _opens_the_gate(key: str) -> bool:
    return key.startswith(GATES_OWN) and any(word in key for word in SECRET)


def check_command(argv: Sequence[str], cwd: Path | None, environment: Mapping[str, str]) -> None:
    """Raise StartFailed naming what is wrong, where the system's own error would name something else."""
    if not argv:
        raise StartFailed("there is no command to run")
    if any("\0" in text for text in (*argv, *environment.values())):
        raise StartFailed(f"cannot run {argv[0]}: an argument or a variable has a NUL character in it")
    if cwd is not None and not cwd.is_dir():
        raise StartFailed(f"working directory {cwd} does not exist")
    name = argv[0]
    if os.sep not in name:
        if shutil.which(name, path=environment.get("PATH")) is None:
            raise StartFailed(f"command not found: {name} (nowhere on PATH)")
        return
    file = (cwd or Path()) / name
    if not file.exists():
        raise StartFailed(f"command not found: {name} (no such file)")
    if file.is_dir() or not os.access(file, os.X_OK):
        raise StartFailed(f"not executable: {name}")


def exit_text(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
