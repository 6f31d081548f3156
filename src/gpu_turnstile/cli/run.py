"""`turnstile run -- COMMAND`: hold the lock for as long as a command runs, and not a moment longer.

What it promises, whatever happens: the lock, or the place in the queue, is given back; the command's exit code is this
one's; a signal to end reaches the command. From the moment the lock is held until the end the signals are blocked and
waited for in one place, so none can come at a bad moment.

The command stays in our process group: the terminal's Ctrl-C and Ctrl-Z reach it from the terminal, and it may read
from it. A signal that the terminal has sent to both is therefore not passed on again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass

from gpu_turnstile.cli.gate import Gate, sentence
from gpu_turnstile.cli.hold import OWNER, TOKEN, Stopped, Waiting, stop_by_exception
from gpu_turnstile.cli.say import NO_COMMAND, NO_EXEC, RUN_FAILED, SIGNAL, warn
from gpu_turnstile.cli.show import ago
from gpu_turnstile.client import Lock, TurnstileError
from gpu_turnstile.client.wire import who

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
BLOCKED = frozenset((*FORWARDED, signal.SIGCHLD))
KILL_AFTER = 10.0  # seconds a command has to end after SIGTERM, when its lock is lost
RELEASE = 30.0  # seconds a gate that restarts is waited for at the end
LOOK = 1.0  # seconds between two looks at whether the gate answers
_FROM_KERNEL = 0x80  # si_code of what the terminal sends
_RESET = tuple(getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ"))  # Python ignores them, commands must not


@dataclass(frozen=True, slots=True)
class Wish:
    """`wait`: as in the client. `kill`: end the command when the lock is lost."""

    command: tuple[str, ...]
    preset: str | None
    owner: str | None
    ttl: float | None
    wait: bool | float
    kill: bool


def run(url: str | None, wish: Wish) -> int:
    """The command's exit code, or 125 to 127 when it never ran."""
    program = shutil.which(wish.command[0])
    if program is None:
        there = os.path.exists(wish.command[0])
        warn(f"{wish.command[0]}: {'cannot be executed' if there else 'no such command'}")
        return NO_EXEC if there else NO_COMMAND
    stop_by_exception()
    gate = Gate(url, wish.owner or f"{who()}:{os.getpid()}")
    lock: Lock | None = None
    try:
        try:
            waiting = Waiting()
            lock = gate.client.lock(wish.preset, None, wish.ttl, wish.wait, on_wait=waiting)
            signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)  # threads that are started from here on inherit it
            if waiting.told:
                warn(f"{lock.preset} is locked, after {ago(time.monotonic() - waiting.since)}")
            return Run(lock, wish, program).code()
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
            if lock is not None:
                _give_back(lock)
    except TurnstileError as problem:
        warn(sentence(problem))
        return RUN_FAILED
    except Stopped as stopped:
        if lock is None and wish.owner is None:  # it may have come just after the grant; nobody else has this name
            with contextlib.suppress(TurnstileError):
                gate.client.unlock()
        return SIGNAL + stopped.number


def _give_back(lock: Lock) -> None:
    if lock.lost.is_set() or lock.release(0.0):
        lock.release()
        return
    warn("the gate does not answer; trying to give the lock back")
    until = time.monotonic() + RELEASE
    while time.monotonic() < until and not lock.release(0.0):
        if signal.sigtimedwait((signal.SIGINT, signal.SIGTERM), 0.25) is not None:
            break


class Run:
    """One command under a lock."""

    def __init__(self, lock: Lock, wish: Wish, program: str) -> None:
        self._lock = lock
        self._wish = wish
        self._program = program
        self._pid = 0
        self._kill_at: float | None = None
        self._warned = False  # that the lock is lost
        self._away = False  # the gate, as far as was said

    def code(self) -> int:
        environment = {**os.environ, TOKEN: str(self._lock.token), OWNER: self._lock.owner}
        try:
            self._pid = os.posix_spawn(self._program, self._wish.command, environment, setsigmask=(), setsigdef=_RESET)
        except OSError as problem:
            warn(f"{self._wish.command[0]}: {problem.strerror}")
            return NO_EXEC
        self._lock.__enter__()
        while True:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return SIGNAL - code if code < 0 else code
            self._watch()
            came = signal.sigtimedwait(BLOCKED, LOOK)
            if came is not None and came.si_signo != signal.SIGCHLD and not self._has_it(came):
                self._send(came.si_signo)

    def _has_it(self, came: signal.struct_siginfo) -> bool:
        """Whether the terminal has sent it to the command as well."""
        return came.si_code == _FROM_KERNEL and os.getpgid(self._pid) == os.getpgrp()

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _watch(self) -> None:
        """The lock's state: say what changed, and do what was asked for."""
        if self._lock.lost.is_set():
            self._lost()
        elif (away := self._lock.trouble is not None) != self._away:
            self._away = away
            left = f"the lock lives {ago(self._lock.expires_in)} of its time without it"
            warn(f"the gate does not answer; {left}" if away else "the gate answers again; the lock is held")

    def _lost(self) -> None:
        if not self._warned:
            self._warned = True
            what = "the command is ended" if self._wish.kill else "the command runs on without it"
            warn(f"warning: the lock is lost: {self._lock.why_lost}; {what}")
            if self._wish.kill:
                self._send(signal.SIGTERM)
                self._kill_at = time.monotonic() + KILL_AFTER
        elif self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._send(signal.SIGKILL)
