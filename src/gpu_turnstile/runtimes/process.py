"""An engine as a process of ours, in a session of its own.

Kept true here: its exit is noticed when it happens; its output never blocks on us and takes bounded memory; after
`stop` has returned, nothing that came from it lives and no zombie is left. The group gets SIGTERM and its grace as a
whole: a launcher that dies first does not cost a child the time to save its work.

With a record the engine outlives a gate that was killed, and the next gate finds it: it prints into a file, and it is
not let go before its record is written, so that there is never an engine nobody knows of.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import structlog

from gpu_turnstile.runtimes import records
from gpu_turnstile.runtimes.base import StartFailed, StopFailed
from gpu_turnstile.runtimes.group import TOKEN
from gpu_turnstile.runtimes.launch import WAIT_FOR_A_LINE, check_command, check_port, child_environment
from gpu_turnstile.runtimes.output import LogFile
from gpu_turnstile.runtimes.records import Record
from gpu_turnstile.runtimes.ring import OutputRing
from gpu_turnstile.runtimes.runs import Adopted, Child, Run

log = structlog.get_logger("process")

KILL_WAIT = 10.0  # seconds a process may outlive SIGKILL (the driver frees its memory first)
KILL_AGAIN = 1.0  # seconds between two SIGKILLs: something may have been forked meanwhile
SCAN = 0.05  # seconds between two looks for members that outlived the leader
TRIM = 1.0  # seconds between two looks at the size of the log


class ProcessRuntime:
    """`env` is added to our own environment (less the gate's keys); `grace` in seconds, from SIGTERM to SIGKILL.

    `port`: where it will listen on the loopback, if that is known; nobody else may. `record`: the file that lets a
    later gate find the process, in which the port is noted; the engine's output then goes to `log` (default: the
    record's name with `.log`). Without a record the process cannot be found again.
    """

    kind: ClassVar[str] = "process"
    owned: ClassVar[bool] = True

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        grace: float = 10.0,
        record: Path | None = None,
        log: Path | None = None,
        port: int | None = None,
    ) -> None:
        self.argv = tuple(argv)
        self.env = dict(env or {})
        self.cwd = None if cwd is None else Path(cwd)
        self.grace = grace
        self.record = record
        self.port = port
        self.on_exit: Callable[[str], None] | None = None
        self._printed: OutputRing | LogFile = OutputRing()
        if record is not None:
            self._printed = LogFile(log or record.with_suffix(".log"))
        self._run: Run | None = None
        self._changing = asyncio.Lock()
        self._stopping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the leader, until it has been stopped."""
        return None if self._run is None else self._run.group.leader

    async def pids(self) -> tuple[int, ...]:
        return () if self.pid is None else (self.pid,)

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
        return self._run is not None and not self._run.exited.is_set()

    async def adopt(self) -> bool:
        """Take over the process that an earlier gate started for the same command; whether there was one.

        What else is left of an earlier run is ended. Raises StopFailed if that cannot be done.
        """
        async with self._changing:
            if self._run is None and (record := self._recorded()) is not None and record.command == self._command():
                run = Adopted(self._report, record)
                if not run.exited.is_set():
                    self._run = run
                    self._trim(run)
            if not await self.alive():
                await self._end_run()
            return await self.alive()

    def output(self) -> tuple[str, ...]:
        return self._printed.lines()

    async def _start(self) -> None:
        async with self._changing:
            if await self.alive():
                raise StartFailed(f"{self.argv[0]} is already running as process {self.pid}")
            await self._end_run()
            environment = child_environment(os.environ, self.env)
            check_command(self.argv, self.cwd, environment)
            check_port(self.port)
            if isinstance(self._printed, LogFile) and self.record is not None:
                await self._spawn_recorded(environment, self.record, self._printed)
            else:
                self._printed = ring = OutputRing()
                self._run = await self._spawn(self.argv, environment, Child(self._report, ring))

    async def _spawn(self, argv: Sequence[str], environment: dict[str, str], child: Child, **streams: Any) -> Child:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **streams}
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: child,
                *argv,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.cwd,
                start_new_session=True,
                **streams,
            )
        except (OSError, ValueError) as error:
            raise StartFailed(f"cannot run {self.argv[0]}: {getattr(error, 'strerror', None) or error}") from error
        return child

    async def _spawn_recorded(self, environment: dict[str, str], file: Path, printed: LogFile) -> None:
        """It waits as a shell until its record is written; if we are killed before, the shell ends."""
        token = secrets.token_hex(16)
        try:
            out = printed.begin()
        except OSError as error:
            raise StartFailed(f"its output cannot go to {printed.path}: {error.strerror}") from error
        try:
            argv = (*WAIT_FOR_A_LINE, *self.argv)
            child = Child(self._report, None, token)
            self._run = await self._spawn(argv, {**environment, TOKEN: token}, child, stdin=subprocess.PIPE, stdout=out)
        finally:
            os.close(out)
        self._note(child.group.leader, token, file)
        child.release()
        self._trim(child)

    def _note(self, pid: int, token: str, file: Path) -> None:
        born = records.birth(pid)
        if born is None:  # it has ended already
            return
        try:
            records.save(file, Record(pid, born, records.boot_id(), token, self._command(), self.port))
        except OSError as error:
            log.warning(
                "record_not_written",
                file=str(file),
                reason=error.strerror,
                consequence="the engine runs; if the gate is killed, the next one will not know of it",
            )

    def _command(self) -> str:
        return records.fingerprint(self.argv, self.env, self.cwd)

    def _recorded(self) -> Record | None:
        return None if self.record is None else records.load(self.record)

    def _trim(self, run: Run) -> None:
        """Keep the log short as long as this run prints into it."""
        if run is self._run and not run.exited.is_set() and isinstance(self._printed, LogFile):
            self._printed.trim()
            asyncio.get_running_loop().call_later(TRIM, self._trim, run)

    def _report(self, run: Run) -> None:
        if run is self._run and not run.asked_to_stop and self.on_exit is not None:
            self.on_exit(self._why(run))

    def _why(self, run: Run) -> str:
        last = self._printed.last()
        how = f"{Path(self.argv[0]).name} {run.how_it_ended()}"
        return f"{how}; its last line: {last}" if last else how

    async def _stop(self) -> None:
        async with self._changing:
            await self._end_run()

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._stopping = None
        if not task.cancelled():
            task.exception()  # callers have it through their own await; one that gave up does not want it

    async def _end_run(self) -> None:
        """End what runs, or what a record says was left by an earlier gate, and forget it."""
        run = self._run or self._left_behind()
        if run is not None:
            run.asked_to_stop = True
            if not await self._end_group(run):
                left = ", ".join(str(p.pid) for p in await asyncio.to_thread(run.group.members))
                name = self.argv[0] if self.argv else "a former engine"
                raise StopFailed(f"{name}: process {left or run.group.leader} outlived SIGKILL for {KILL_WAIT:g} s")
            run.close()
            self._run = None
        if self.record is not None:
            records.forget(self.record)

    def _left_behind(self) -> Run | None:
        record = self._recorded()
        return Adopted(self._report, record) if record is not None and record.is_of_this_boot else None

    async def _end_group(self, run: Run) -> bool:
        await asyncio.to_thread(run.group.signal, signal.SIGTERM)
        if await self._is_gone(run, self.grace):
            return True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + KILL_WAIT
        while loop.time() < deadline:
            await asyncio.to_thread(run.group.signal, signal.SIGKILL)
            if await self._is_gone(run, min(KILL_AGAIN, KILL_WAIT)):
                return True
        return False

    async def _is_gone(self, run: Run, limit: float) -> bool:
        """Whether within `limit` seconds the leader was reaped and no other member lived."""
        try:
            async with asyncio.timeout(limit):
                await run.exited.wait()
                while not await asyncio.to_thread(run.group.is_empty):  # noqa: ASYNC110 - strangers' exits make no event
                    await asyncio.sleep(SCAN)
        except TimeoutError:
            return False
        run.group.reap()
        return True


async def end_forgotten(folder: Path, kept: Collection[Path]) -> None:
    """End what the records in `folder` tell of, but for those in `kept`: their presets are gone. Raises StopFailed."""
    for file in await asyncio.to_thread(lambda: sorted(folder.glob("*.json"))):
        if file not in kept:
            await ProcessRuntime((), record=file).stop()
