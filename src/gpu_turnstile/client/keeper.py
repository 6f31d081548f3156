"""How a lock is taken, kept and let go, decided without a thread, a task or a socket.

`taking`, `keeping` and `leaving` are what happens, step by step: a step is a call, whose outcome is sent in, or seconds
to wait. The two clients only carry steps out. One keeper is one wish of one owner. What it promises:

- While queued it asks again before the place goes stale, also through a restart of the gate.
- While held it renews at a third of the TTL, naming its token, so that it never prolongs somebody else's hold.
- Only the gate's word makes a lock lost; a gate that is silent does not, because the time it is away does not count.
- What was begun is ended: `farewell` is the call that leaves nothing of it behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from gpu_turnstile.client import wire
from gpu_turnstile.client.errors import BadRequest, Locked, NotHeld, StaleLock, TurnstileError, Unavailable, Unreachable
from gpu_turnstile.client.shapes import Granted, Queued

log = logging.getLogger("gpu_turnstile.client")
T = TypeVar("T")
Steps = Generator[wire.Call | float, wire.Outcome | None, T]

HEAD_POLL = 2.0  # seconds: who is next asks more often, so that the card does not stand idle
RETRY = 1.0  # seconds between attempts while the gate does not answer
FAREWELL = 10.0  # seconds an unlock is tried for; then the TTL does it


@dataclass
class Keeper:
    """`wait`: False = fail at once, True = queue, a number = queue that many seconds. `ttl` None = the gate's own."""

    preset: str | None
    owner: str
    ttl: float | None = None
    wait: bool | float = False
    token: int | None = None  # given: "only if that hold of mine still lives"; then the hold's own
    requeue: bool = False
    granted: Granted | None = None
    confirmed: float = 0.0  # when the last call was sent that the gate answered with the lock
    queued: Queued | None = None
    trouble: TurnstileError | None = None  # why the last call did not work, while it may again
    lost: TurnstileError | None = None
    _asked: bool = False
    _deadline: float | None = None

    # ---------------------------------------------------------------------------------------------- the steps

    def taking(self, waits: Callable[[], None]) -> Steps[None]:
        """Until it is held; `waits` is called after every answer that says to. Raises what cannot be waited for."""
        while True:
            sent = time.monotonic()
            outcome = yield self.ask(sent)
            pause = self.asked(outcome, sent, time.monotonic())
            if pause is None:
                return
            waits()
            yield pause

    def keeping(self, tell: Callable[[], None]) -> Steps[None]:
        """The heartbeat, as long as there is something to keep; `tell` is called after every one."""
        pause: float | None = self.beat_every
        while pause is not None:
            yield pause
            sent = time.monotonic()
            outcome = yield self.beat()
            pause = self.beaten(outcome, sent, time.monotonic())
            tell()

    def leaving(self, limit: float) -> Steps[bool]:
        """Let go what there is; False when the gate could not be told within `limit` seconds, or will not have it."""
        call, until = self.farewell(), time.monotonic() + limit
        while call is not None:
            outcome = yield call
            if not isinstance(outcome, TurnstileError) or isinstance(outcome, StaleLock):
                break
            if time.monotonic() >= until or isinstance(outcome, (BadRequest, Locked)):
                log.warning("the lock of %s was not let go, its TTL will do it: %s", self.owner, outcome)
                return False
            yield RETRY / 4
        return True

    # ----------------------------------------------------------------------------------------------- taking it

    def ask(self, now: float) -> wire.Call:
        """The next call to get the lock."""
        if self._deadline is None and self.waits and not isinstance(self.wait, bool):
            self._deadline = now + self.wait
        self._asked = True
        return wire.lock(self.preset, self.owner, self.ttl, self.waits, self.token)

    def asked(self, outcome: wire.Outcome | None, sent: float, now: float) -> float | None:
        """None: it is held. A number: ask again after so many seconds. Raises what cannot be waited for."""
        match outcome:
            case Granted():
                self._have(outcome, sent)
                return None
            case Queued():
                self.queued, self.trouble = outcome, None
                pause = outcome.retry_after if outcome.position > 1 else min(outcome.retry_after, HEAD_POLL)
            case Unreachable() | Unavailable() if self.queued is not None:
                self.trouble, pause = outcome, RETRY
            case TurnstileError():
                raise outcome
            case _:
                raise AssertionError(outcome)
        if self._deadline is None:
            return pause
        if now >= self._deadline:
            raise self._given_up()
        return min(pause, self._deadline - now)

    @property
    def waits(self) -> bool:
        return self.wait is True or self.wait > 0

    def _given_up(self) -> TurnstileError:
        if self.trouble is not None:
            return self.trouble
        assert self.queued is not None
        place = self.queued
        return Locked(
            f"{place.preset!r} was not free within {self.wait:g} s; the place in the queue (position "
            f"{place.position}) was given up",
            owners=place.owners,
            queue=place.queue,
            preset=place.raw.get("preset"),
            status=202,
            retry_after=place.retry_after,
        )

    # ---------------------------------------------------------------------------------------------- keeping it

    @property
    def beat_every(self) -> float:
        assert self.granted is not None
        return self.granted.ttl / 3

    def beat(self) -> wire.Call:
        """The heartbeat, or, after a loss that shall be made good, the next call for the lock."""
        if self.lost is not None:
            return wire.lock(self.preset, self.owner, self.ttl, True, None)
        return wire.renew(self.owner, None, self.token)

    def beaten(self, outcome: wire.Outcome | None, sent: float, now: float) -> float | None:
        """Seconds until the next beat; None = there is nothing left to keep. `lost` says whether it is held."""
        match outcome:
            case Granted():
                self._have(outcome, sent)
                return self.beat_every
            case Queued():
                self.queued, self.trouble = outcome, None
                return min(outcome.retry_after, HEAD_POLL) if outcome.position == 1 else outcome.retry_after
            case TurnstileError() if self.lost is not None:
                self.trouble = outcome
                return None if isinstance(outcome, BadRequest) else max(RETRY, outcome.retry_after or 0.0)
            case StaleLock() | NotHeld():
                return self._lose(outcome)
            case TurnstileError():
                self.trouble = outcome
                if self.expires_in(now) <= 0 and not isinstance(outcome, Unreachable):
                    return self._lose(outcome)
                return min(RETRY, self.beat_every)
        raise AssertionError(outcome)

    def expires_in(self, now: float) -> float:
        """Seconds of silence that are left as far as is known here: at least so many, if the gate did not say else."""
        if self.granted is None or self.lost is not None:
            return 0.0
        return max(0.0, self.confirmed + self.granted.ttl - now)

    def _have(self, granted: Granted, sent: float) -> None:
        self.granted, self.token, self.confirmed = granted, granted.token, sent
        self.preset = granted.preset  # "whatever is on the card" means this one from now on
        self.queued = self.lost = self.trouble = None

    def _lose(self, why: TurnstileError) -> float | None:
        self.lost, self.trouble = why, None
        return 0.0 if self.requeue else None

    # ------------------------------------------------------------------------------------------------- the end

    def nothing_left(self, problem: BaseException) -> bool:
        """Whether the gate surely has nothing of this wish after `problem`: it refused, or was never reached."""
        answered = isinstance(problem, TurnstileError) and not (isinstance(problem, Unreachable) and problem.sent)
        return answered and self.queued is None

    def farewell(self) -> wire.Call | None:
        """The call that ends the hold, or the place in the queue; None = there is nothing to end.

        A hold is ended by its token, so nobody's later hold under the same name ends with it. A place has none.
        """
        if self.granted is not None and self.lost is None:
            return wire.unlock(self.owner, self.token)
        waiting = self._asked and self.granted is None
        holds_another = self.queued is not None and any(o.owner == self.owner for o in self.queued.owners)
        if waiting or self.requeue:
            return wire.unlock(self.owner, None, leave=waiting and holds_another)
        return None


class Flag(Protocol):
    """`threading.Event` and `asyncio.Event`."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...
    def clear(self) -> None: ...


class Held:
    """What both clients' locks tell of theirs."""

    lost: Flag
    _keeper: Keeper
    _on_wait: Callable[[Any], None] | None
    _on_lost: Callable[[Any], None] | None

    def _waits(self) -> None:
        if self._on_wait is not None:
            self._on_wait(self)

    def _tell(self) -> None:
        """Make `lost` what it is; who wants to know of a loss is told once."""
        if self._keeper.lost is None:
            self.lost.clear()
            return
        if self.lost.is_set():
            return
        self.lost.set()
        log.warning("the lock on %s is lost: %s", self.preset, self._keeper.lost)
        if self._on_lost is not None:
            try:
                self._on_lost(self)
            except Exception:
                log.exception("on_lost failed")

    @property
    def preset(self) -> str | None:
        return self._keeper.preset

    @property
    def owner(self) -> str:
        return self._keeper.owner

    @property
    def token(self) -> int:
        return self._keeper.token or 0

    @property
    def headers(self) -> dict[str, str]:
        """For requests under the lock: they refresh it, and run only while it is yours."""
        return {"X-Turnstile-Lock": str(self.token), "X-Turnstile-Client": wire.label(self.owner)}

    @property
    def granted(self) -> Granted | None:
        """The gate's last word on it."""
        return self._keeper.granted

    @property
    def queued(self) -> Queued | None:
        """The place in the queue, while it waits."""
        return self._keeper.queued

    @property
    def expires_in(self) -> float:
        """Seconds of silence it survives, as far as is known here."""
        return self._keeper.expires_in(time.monotonic())

    @property
    def why_lost(self) -> TurnstileError | None:
        return self._keeper.lost

    @property
    def trouble(self) -> TurnstileError | None:
        """Why the last call did not work, while the next may: mostly a gate that restarts."""
        return self._keeper.trouble
