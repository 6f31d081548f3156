"""Ask an engine to let go, then look until nothing is left: the wait that externally run engines share.

An acknowledgement is no fact and a list may flicker. So an empty list is believed when consecutive looks agree, what
is still listed is asked again at most every `timing.unload_resend` seconds, and all of it ends at the deadline. A
server that refuses the key or has no such path is not asked for a minute.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gpu_turnstile.engines.base import Release, Released, Timing
from gpu_turnstile.engines.http import Failure, Reply

AGREEING_LOOKS = 2  # an empty list is believed when this many consecutive looks say so
CONFIRM_AFTER = 0.2  # seconds to the confirming look: five looks a second at most
NOT_ALLOWED = frozenset({401, 403})
NO_SUCH_PATH = frozenset({404, 405})


@dataclass(frozen=True, slots=True)
class Look:
    """One look. `held`: what is still there; None = the answer (`reply`) did not say."""

    reply: Reply
    held: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Told:
    """What became of one request to let go. `refusal` empty: acknowledged; `final`: asking again is of no use."""

    refusal: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """The words of one wait, and its rules. `where`: the path that is looked at."""

    where: str
    still: str = "it still lists"
    done: str = "its list is empty"
    restarts: bool = False  # once told, it restarts: a refused connection then says nothing


LookAt = Callable[[float], Awaitable[Look]]  # seconds it may take
Tell = Callable[[str, float], Awaitable[Told]]  # whom, and seconds it may take


@dataclass(slots=True)
class _Progress:
    """One wait: who was told when, what was said, what the last look showed."""

    told: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    unread: str = ""
    away: bool = False
    empty_looks: int = 0
    looked: bool = False


def deadline_of(timing: Timing) -> float:
    """The moment, on the loop's clock, at which a release that begins now must be over."""
    return asyncio.get_running_loop().time() + timing.unload_timeout


async def until_empty(wait: Wait, look: LookAt, tell: Tell | None, timing: Timing, deadline: float) -> Release:
    """EMPTY when two consecutive looks found nothing, else why not. Without `tell` it only waits. Never raises."""
    loop = asyncio.get_running_loop()
    began, progress = loop.time(), _Progress()
    while (left := deadline - loop.time()) > 0:
        asked, limit = loop.time(), min(timing.call_timeout, left)
        seen = await look(limit)
        if progress.looked and limit < timing.call_timeout and _ran_out(seen.reply, loop.time() - asked, limit):
            break
        end = _end_of(seen.reply, wait, progress)
        if end is not None:
            return end
        _note(seen, wait, progress)
        if progress.empty_looks == AGREEING_LOOKS:
            return Release(Released.EMPTY, wait.done)
        refusal = None if tell is None else await _tell(tell, progress, timing, deadline)
        if refusal is not None:
            return Release(Released.REFUSED, refusal, progress.held)
        pause = min(timing.unload_poll, CONFIRM_AFTER) if progress.empty_looks else timing.unload_poll
        await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
    return _gave_up(wait, progress, deadline - began)


def told(reply: Reply) -> Told:
    """The usual reading of the answer to a request to let go. 404: it has gone already, or the list will say so."""
    if reply.ok or reply.status == 404:
        return Told()
    return Told(reply.reason, reply.status in NOT_ALLOWED)


def outcome_of(reply: Reply, what: str) -> Release:
    """Of one call that no list can confirm. `what`: its name for a person."""
    if reply.ok:
        return Release(Released.ACCEPTED, f"{what} was accepted")
    if reply.status in NO_SUCH_PATH:
        return Release(Released.UNSUPPORTED, f"it has no {what} ({reply.reason})")
    if reply.status is not None:
        return Release(Released.REFUSED, f"{what} {reply.reason}")
    outcome = Released.UNREACHABLE if reply.failure is Failure.UNREACHABLE else Released.TIMEOUT
    return Release(outcome, f"{what}: {reply.reason}")


def _end_of(reply: Reply, wait: Wait, progress: _Progress) -> Release | None:
    """What a look's answer ends at once: nobody there, no such path, the wrong key."""
    if reply.failure is Failure.UNREACHABLE and not (wait.restarts and progress.told):
        return Release(Released.UNREACHABLE, reply.reason, progress.held)
    if reply.status in NO_SUCH_PATH:
        return Release(Released.UNSUPPORTED, f"it has no {wait.where} ({reply.reason})", progress.held)
    if reply.status in NOT_ALLOWED:
        return Release(Released.REFUSED, f"{wait.where} {reply.reason}", progress.held)
    return None


def _ran_out(reply: Reply, took: float, limit: float) -> bool:
    """A last look, cut short by the deadline, says less than the one before it. A refusal comes at once and counts."""
    return reply.failure in (Failure.TIMEOUT, Failure.UNREACHABLE) and took >= limit / 2


def _note(seen: Look, wait: Wait, progress: _Progress) -> None:
    progress.looked = True
    progress.away = seen.reply.failure is Failure.UNREACHABLE
    if seen.held is None:
        progress.unread = f"{wait.where} did not say" if seen.reply.ok else seen.reply.reason
        progress.empty_looks = 0
        return
    progress.unread, progress.held = "", seen.held
    progress.empty_looks = 0 if seen.held else progress.empty_looks + 1


async def _tell(tell: Tell, progress: _Progress, timing: Timing, deadline: float) -> str | None:
    """Ask whoever is due to go, all at once: one that hangs does not keep the others. A final refusal is returned."""
    now = asyncio.get_running_loop().time()
    limit = min(timing.call_timeout, deadline - now)
    listed = () if progress.unread else progress.held
    due = [name for name in listed if now - progress.told.get(name, -math.inf) >= timing.unload_resend]
    if not due or limit <= 0:
        return None
    progress.told.update(dict.fromkeys(due, now))
    answers = await asyncio.gather(*(tell(name, limit) for name in due))
    progress.refusals.update(zip(due, (answer.refusal for answer in answers), strict=True))
    return next((answer.refusal for answer in answers if answer.final), None)


def _gave_up(wait: Wait, progress: _Progress, seconds: float) -> Release:
    if progress.away:
        detail = f"it did not come back within {seconds:.3g} s after it was told to unload: {progress.unread}"
        return Release(Released.UNREACHABLE, detail, progress.held)
    if progress.unread:
        detail = f"{wait.where} could not be read: {progress.unread}"
    elif progress.held:
        words = (_describe(name, progress.refusals.get(name, "")) for name in progress.held)
        detail = f"after {seconds:.3g} s {wait.still} {', '.join(words)}"
    else:
        detail = f"nothing was left, but two looks did not agree within {seconds:.3g} s"
    return Release(Released.TIMEOUT, detail, progress.held)


def _describe(name: str, refusal: str) -> str:
    return f"{name} (unload: {refusal})" if refusal else name
