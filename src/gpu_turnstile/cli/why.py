"""`turnstile why`: what a request or an owner waits for, and what would help.

Reads what the gate tells and decides nothing: the gate's own words for a thing are the only ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import typer

from gpu_turnstile.cli.gate import Gate
from gpu_turnstile.cli.hold import caller
from gpu_turnstile.cli.say import clean
from gpu_turnstile.cli.show import ago, holders, war

_SWAP = "gpu_turnstile_swap_seconds"


@dataclass
class Reason:
    """The answer, for programs. Times in seconds; None = not known, or nothing to wait for."""

    client: str
    waits: list[dict[str, Any]] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)
    card: dict[str, Any] = field(default_factory=dict)
    lock: dict[str, Any] = field(default_factory=dict)
    ahead: list[dict[str, Any]] = field(default_factory=list)
    swap_seconds: float | None = None
    beside: list[str] = field(default_factory=list)  # what goes on that is nobody's place in a line
    turn: dict[str, Any] | None = None
    war: dict[str, Any] | None = None
    would_help: list[str] = field(default_factory=list)


def why(url: str | None, client: str | None, as_json: bool) -> None:
    gate = Gate(url)
    with gate.calling() as ts:
        found, metrics = ts.status(), ts.metrics()
    reason = explain(found, metrics, client or caller(), datetime.now(UTC), everybody=client is None)
    if as_json:
        typer.echo(json.dumps(asdict(reason), indent=2))
        return
    for line in lines(reason):
        typer.echo(line)


def explain(found: dict[str, Any], metrics: str, client: str, now: datetime, *, everybody: bool = False) -> Reason:
    """`client` is an owner, or part of a client's name. `everybody`: when it waits for nothing, tell of all."""
    reason = Reason(client, lock=found["locks"], swap_seconds=mean_swap(metrics), war=found.get("war"))
    reason.waits = _waits(found, client)
    if everybody and not reason.waits:
        reason.waits = _waits(found, "")
    reason.holds = _holds(found, client)
    reason.card = _card(found, now)
    reason.ahead = _ahead(found, reason.waits)
    reason.beside = list(_beside(found))
    reason.turn = found.get("turn") if reason.waits else None
    reason.would_help = list(_help(found, reason))
    return reason


def _waits(found: dict[str, Any], client: str) -> list[dict[str, Any]]:
    """Requests whose client holds the name, and places in the lock's queue that have it; all for an empty name."""
    requests = [{"kind": "request", **w} for w in found["queue"] if client in w["client"]]
    places = [{"kind": "lock", **w} for w in found["locks"].get("queue", []) if client in ("", w["owner"])]
    return requests + places


def _holds(found: dict[str, Any], client: str) -> list[str]:
    running = [f"a request on {h['tenant']}, for {ago(h['age_s'])}" for h in found["inflight"] if client in h["client"]]
    return [f"the lock on {found['locks']['preset']}"] * (client in found["locks"].get("owners", {})) + running


def _card(found: dict[str, Any], now: datetime) -> dict[str, Any]:
    last = found["swaps"]["last"] or {}
    since = None
    if last.get("ok") and last.get("target") in found["residents"]:
        since = round((now - datetime.fromisoformat(last["time"])).total_seconds(), 1)
    return {
        "phase": found["phase"],
        "residents": found["residents"],
        "since_s": since,
        "target": found["target"],
        "forced_in_s": found["drain_deadline_in_s"],
        "inflight": found["inflight"],
        "jobs": found["jobs"],
    }


def _beside(found: dict[str, Any]) -> Iterator[str]:
    """Work past the gate, which a hand-over waits for; engines that are off, whose requests are in no line."""
    for item in found.get("bypass", ()):
        yield f"{item['tenant']}: {item['what']}, for {ago(item['age_s'])}"
    for engine in found["engines"]:
        if engine.get("away"):
            name = engine["name"]
            yield f"{name} did not take the last connection: requests for it are tried again, without the card"


def _ahead(found: dict[str, Any], waits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Who is served before the first of those waits, in either line."""
    ahead: list[dict[str, Any]] = []
    for kind, line in (("request", found["queue"]), ("lock", found["locks"].get("queue", []))):
        mine = [w["position"] for w in waits if w["kind"] == kind]
        ahead += [{"kind": kind, **w} for w in line if mine and w["position"] < min(mine)]
    return ahead


def _help(found: dict[str, Any], reason: Reason) -> Iterator[str]:
    locks, card = found["locks"], reason.card
    pinned, owners = locks.get("preset"), locks.get("owners", {})
    if not reason.waits:
        if pinned and reason.client not in owners:
            yield f"requests for other presets are refused with 422 until {pinned} is unlocked; they do not wait"
            yield "to wait for your turn: turnstile lock PRESET --wait, or turnstile run --preset PRESET -- COMMAND"
        return
    if pinned and any(w["kind"] == "lock" for w in reason.waits):
        longest = max((o["expires_in"] for o in owners.values()), default=0.0)
        yield f"the owner runs turnstile unlock, or is silent until its TTL is over ({ago(longest)} from now at least)"
        yield f"asking for {pinned} as well: its lock can be shared at once"
        yield "a lock whose owner is gone: turnstile unlock --owner OWNER --force"
    elif locks.get("entitled") and any(w["kind"] == "lock" for w in reason.waits):
        first = next(iter(locks["queue"]))
        yield f"{locks['entitled']} takes the lock with its next call, or loses its place in {ago(first['expires_in'])}"
    if any(w["kind"] == "request" for w in reason.waits):
        if card["phase"] == "draining":
            forced = card["forced_in_s"]
            when = "it is not forced" if forced is None else f"the swap is forced in {ago(forced)}"
            work = f"{len(card['inflight'])} requests and {len(card['jobs'])} image jobs"
            yield f"what is in flight ends ({work}); {when}"
        elif card["phase"] == "swapping":
            known = "" if reason.swap_seconds is None else f"; a swap takes {ago(reason.swap_seconds)} on average"
            yield f"waiting: {card['target'] or 'the card'} is on its way{known}"
    if card["inflight"] or card["phase"] == "swapping":
        yield "something hangs: turnstile release --reason WHY cuts everybody's work"


def mean_swap(metrics: str) -> float | None:
    """Seconds the swaps of this gate took so far, on average."""
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith(_SWAP))
    count = float(values.get(f"{_SWAP}_count", 0))
    return round(float(values[f"{_SWAP}_sum"]) / count, 3) if count else None


# -------------------------------------------------------------------------------------------------- for people


def lines(reason: Reason) -> Iterator[str]:
    for wait in reason.waits:
        yield f"waiting: {_wait(wait)}"
    if not reason.waits:
        yield f"{clean(reason.client)} waits for nothing"
    for held in reason.holds:
        yield f"{clean(reason.client)} has {clean(held)}"
    yield f"the card: {_card_line(reason.card)}"
    for lease in reason.card["inflight"]:
        yield f"  in flight: {clean(lease['client'])} on {clean(lease['tenant'])}, for {ago(lease['age_s'])}"
    for job in reason.card["jobs"]:
        yield f"  image job: {clean(job['prompt_id'])}, {clean(job['phase'])}, for {ago(job['age_s'])}"
    for beside in reason.beside:
        yield f"  {clean(beside)}"
    yield f"the lock: {holders(reason.lock)}"
    if reason.turn is not None:
        yield f"the turn: {_turn(reason.turn)}"
    for wait in reason.ahead:
        yield f"ahead: {_wait(wait)}"
    if reason.waits and reason.swap_seconds is not None:
        yield f"a swap takes {ago(reason.swap_seconds)} on average"
    for line in war({"war": reason.war}):
        yield clean(line)
    for help in reason.would_help:
        yield f"what would help: {clean(help)}"


def _wait(wait: dict[str, Any]) -> str:
    if wait["kind"] == "lock":
        what, who = f"the lock on {wait['preset']}", wait["owner"]
    else:
        what, who = f"a request for {' or '.join(wait['wants'])}", wait["client"]
    age = wait["waited"] if wait["kind"] == "lock" else wait["waited_s"]
    return f"{clean(who)}, {clean(what)}, position {wait['position']}, for {ago(age)}"


def _turn(kept: dict[str, Any]) -> str:
    why = "for a client that usually comes back at once" if kept["idle"] else "for its own clients"
    cost = f"bringing it in cost {ago(kept['cost_s'])}"
    return f"the card is kept for {clean(kept['tenant'])} for {ago(kept['for_s'])} at most, {why}: {cost}"


def _card_line(card: dict[str, Any]) -> str:
    who = ", ".join(map(clean, card["residents"])) or "nobody"
    since = "" if card["since_s"] is None else f", since {ago(card['since_s'])}"
    coming = f"; {clean(card['target'])} is next" if card["target"] else ""
    return f"{card['phase']}, {who}{since}{coming}"
