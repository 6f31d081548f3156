"""Was a measurement alone on the card? The record of a window -> a certificate.

Pure: no clock, no I/O, and nothing decided elsewhere. The rule is the one the incidents taught (2026-09-08,
2026-09-18): a number counts only if nobody else used the card while it was taken *and* somebody was watching. What
was not watched is a finding, like what was seen. What could not be seen at all, such as a card that does not say who
holds its memory, is a note: it is told with the certificate and does not spoil it.

    lease      a request or job of somebody else held the card
    drain      a tenant was leaving: it worked to its end, or gave its memory back
    swap       somebody else's tenant was being loaded
    forced     a swap cut requests
    lapse      the owner's lock ended without the owner's doing
    lost       an engine went away
    released   somebody broke the glass
    bypass     somebody used an engine past the gate
    process    a process that is no engine of the gate held memory
    restart    the gate was started
    unwatched  the gate was away, or its history has a hole

Times are wall time, seconds since the epoch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from gpu_turnstile.journal.schema import Event, Holder, Lease, Record, Sample, Span

FLOOR = 200_000_000  # bytes: less than this is a context, not a model
UNWATCHED = 1.0  # seconds without a watcher that are forgiven
CONTAMINATED = 3  # the exit code
NAME_LIMIT = 80
GB = 1 << 30


class Kind(StrEnum):
    LEASE = "lease"
    DRAIN = "drain"
    SWAP = "swap"
    FORCED = "forced"
    LAPSE = "lapse"
    LOST = "lost"
    RELEASED = "released"
    BYPASS = "bypass"
    PROCESS = "process"
    RESTART = "restart"
    UNWATCHED = "unwatched"


@dataclass(frozen=True, slots=True)
class Window:
    since: float
    until: float

    def overlap(self, since: float, until: float) -> tuple[float, float] | None:
        """The part of the window from `since` to `until`; None = there is none. A moment inside is one of 0 s."""
        begin, end = max(self.since, since), min(self.until, until)
        return (begin, end) if begin < end or (begin == end and since == until) else None


@dataclass(frozen=True, slots=True)
class Who:
    """Whose measurement it is: names of owners and clients, pids of its own processes, and names of processes that
    may be on the card (a desktop, say). Empty names: nobody, so that every use of the card is somebody else's."""

    names: frozenset[str] = frozenset()
    pids: frozenset[int] = frozenset()
    allowed: frozenset[str] = frozenset()

    def owns(self, lease: Lease) -> bool:
        """What says whose it is counts; only what does not belongs to its client."""
        return (lease.client if lease.owner is None else lease.owner) in self.names

    def may(self, holder: Holder) -> bool:
        return holder.name in self.allowed or not self.pids.isdisjoint(holder.lineage)


@dataclass(frozen=True, slots=True)
class Finding:
    """`when`: where it begins in the window. `seconds`: how much of the window it took; None = a moment."""

    kind: Kind
    who: str
    when: float
    seconds: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Certificate:
    clean: bool
    since: float
    until: float
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def judge(window: Window, who: Who, record: Record) -> Certificate:
    """What else used the card in the window. Findings are in the order of time."""
    events = sorted(record.events, key=lambda event: event.id)
    end = window.until
    foreign = [lease for lease in record.leases if not who.owns(lease)]
    own = {lease.tenant for lease in record.leases if who.owns(lease)}
    findings = [
        *_leases(window, foreign),
        *_swaps(window, own, _intervals(events, end)),
        *_moments(window, who, events),
        *_bypasses(window, events),
        *_processes(window, who, record.samples),
        *_unwatched(window, record.spans),
    ]
    findings.sort(key=lambda finding: (finding.when, finding.kind, finding.who))
    return Certificate(not findings, window.since, window.until, tuple(findings), _notes(window, record.samples))


# ------------------------------------------------------------------------------------------------- leases


def _leases(window: Window, leases: Iterable[Lease]) -> Iterable[Finding]:
    """One finding for each client and tenant, however many requests there were."""
    parts: dict[tuple[str, bool, str], list[tuple[float, float]]] = defaultdict(list)
    requests: dict[tuple[str, bool, str], int] = defaultdict(int)
    for lease in leases:
        if part := window.overlap(lease.since, lease.until):
            key = lease.owner or lease.client, lease.owner is not None, lease.tenant
            parts[key].append(part)
            requests[key] += lease.requests
    for key, spans in parts.items():
        name, named, tenant = key
        seconds = covered(spans)
        called = say(name) if name else "somebody unnamed"
        advice = "" if named else "; if it is yours, name its owner (X-Turnstile-Owner) or pass it as a client"
        text = (
            f"{called} used {say(tenant)}: {_count(requests[key], 'request')}, {_time(seconds)} of the window{advice}"
        )
        yield Finding(Kind.LEASE, called, min(spans)[0], seconds, text)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that are in at least one of the spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


# -------------------------------------------------------------------------------------------------- swaps


@dataclass(slots=True)
class _Move:
    """A tenant leaves the card (`comes` False) or comes onto it."""

    comes: bool
    tenant: str
    target: str
    since: float
    until: float


@dataclass(slots=True)
class _Under:
    """What is under way while the notes are read, one after the other."""

    leaving: dict[str, tuple[float, str]] = field(default_factory=dict)  # tenant -> since, for whom
    coming: dict[str, float] = field(default_factory=dict)
    target: str = ""


def _intervals(events: Sequence[Event], end: float) -> list[_Move]:
    """Notes -> who left and came, from when to when. What nothing ends lasts to `end`."""
    moves: list[_Move] = []
    now = _Under()

    def gone(tenant: str, at: float) -> None:
        if tenant in now.leaving:
            since, target = now.leaving.pop(tenant)
            moves.append(_Move(False, tenant, target, since, at))

    def come(tenant: str, at: float) -> None:
        if tenant in now.coming:
            moves.append(_Move(True, tenant, "", now.coming.pop(tenant), at))

    for event in events:
        fields, at = event.fields, event.at
        tenant = str(fields.get("tenant") or "")
        match event.kind:
            case "drain":
                now.target = str(fields.get("target") or "")
                for victim in fields.get("victims") or ():
                    now.leaving.setdefault(str(victim), (at, now.target))
            case "evicting":
                now.leaving.setdefault(tenant, (at, now.target))
            case "evicted" | "evict_failed" | "engine_lost":
                gone(tenant, at)
            case "admitting":
                now.coming[tenant] = at
            case "admitted" | "admit_failed":
                come(tenant, at)
            case "swapped" | "swap_failed" | "drain_end" | "started":
                for name in tuple(now.leaving):
                    gone(name, at)
                for name in tuple(now.coming):
                    come(name, at)
                now.target = ""
    for name in tuple(now.leaving):
        gone(name, end)
    for name in tuple(now.coming):
        come(name, end)
    return moves


def _swaps(window: Window, own: set[str], moves: Iterable[_Move]) -> Iterable[Finding]:
    """Whoever leaves disturbs; whoever comes does unless it is what is measured."""
    for move in moves:
        part = window.overlap(move.since, move.until)
        if part is None or (move.comes and move.tenant in own):
            continue
        seconds, name = part[1] - part[0], say(move.tenant)
        if move.comes:
            yield Finding(Kind.SWAP, name, part[0], seconds, f"{name} was loaded onto the card for {_time(seconds)}")
        else:
            cause = f" for {say(move.target)}" if move.target else ""
            text = f"{name} was drained and taken off the card{cause}: {_time(seconds)} in which both may have held it"
            if not cause:
                text = f"{name} was drained and taken off the card: {_time(seconds)}"
            yield Finding(Kind.DRAIN, name, part[0], seconds, text)


# ------------------------------------------------------------------------------------------------ moments


def _moments(window: Window, who: Who, events: Iterable[Event]) -> Iterable[Finding]:
    for event in events:
        if window.since <= event.at <= window.until:
            found = _moment(who, event.kind, event.fields)
            if found is not None:
                kind, name, text = found
                yield Finding(kind, name, event.at, None, text)


def _moment(who: Who, kind: str, fields: dict[str, Any]) -> tuple[Kind, str, str] | None:
    tenant, reason = say(fields.get("tenant")), say(fields.get("reason"), 200)
    match kind:
        case "forced":
            victims = ", ".join(say(victim) for victim in fields.get("victims") or ())
            target = say(fields.get("target")) or "an unload"
            cut = _count(_number(fields.get("cut")), "request")
            return Kind.FORCED, victims, f"{cut} of {victims} were cut off for {target}"
        case "lapsed" if fields.get("owner") in who.names:
            owner, cause = say(fields.get("owner")), say(fields.get("cause"), 200)
            by = f" by {say(fields['by'])}" if fields.get("by") else ""
            return Kind.LAPSE, owner, f"the lock of {owner} ended{by} ({cause})"
        case "unlocked":
            taken = [owner for owner in fields.get("cut") or () if owner in who.names]
            if taken:
                owner, by = say(taken[0]), say(fields.get("caller") or fields.get("peer")) or "somebody unnamed"
                return Kind.LAPSE, owner, f"the lock of {owner} was taken away by {by}"
        case "engine_lost":
            return Kind.LOST, tenant, f"{tenant} was lost: {reason}"
        case "released":
            cut = _count(_number(fields.get("cut")), "request")
            by = say(fields.get("client") or fields.get("peer")) or "somebody unnamed"
            return Kind.RELEASED, by, f"{by} forced the card free ({reason}); {cut} cut off"
        case "started":
            return Kind.RESTART, "the gate", "the gate was started: nobody knows what used the card just before"
    return None


def _bypasses(window: Window, events: Iterable[Event]) -> Iterable[Finding]:
    """From the note to `bypass_end`, or until the tenant was taken off the card."""
    open_: dict[str, tuple[float, str]] = {}
    spans: list[tuple[str, str, float, float]] = []

    def close(tenant: str, at: float) -> None:
        if tenant in open_:
            since, what = open_.pop(tenant)
            spans.append((tenant, what, since, at))

    for event in events:
        tenant = str(event.fields.get("tenant") or "")
        match event.kind:
            case "bypass":
                close(tenant, event.at)
                open_[tenant] = (event.at, str(event.fields.get("what") or ""))
            case "bypass_end" | "evicted":
                close(tenant, event.at)
            case "started":
                for name in tuple(open_):
                    close(name, event.at)
    for name in tuple(open_):
        close(name, window.until)
    for tenant, what, since, until in spans:
        if part := window.overlap(since, until):
            seconds = part[1] - part[0]
            text = f"somebody used {say(tenant)} past the gate for {_time(seconds)}: {say(what, 200)}"
            yield Finding(Kind.BYPASS, say(tenant), part[0], seconds, text)


# ---------------------------------------------------------------------------------------------- processes


def _processes(window: Window, who: Who, samples: Sequence[Sample]) -> Iterable[Finding]:
    parts: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    most: dict[tuple[int, str], int | None] = {}
    for sample, until in _steps(samples, window.until):
        part = window.overlap(sample.at, until)
        if part is None:
            continue
        for holder in sample.holders or ():
            if who.may(holder) or (holder.used is not None and holder.used < FLOOR):
                continue
            key = (holder.pid, holder.name)
            parts[key].append(part)
            most[key] = max(most.get(key) or 0, holder.used or 0) or None
    for (pid, name), spans in parts.items():
        seconds, held = covered(spans), most[pid, name]
        amount = "an unknown amount" if held is None else f"{held / GB:.1f} GB"
        text = f"the process {say(name)} ({pid}) held {amount} of the card for {_time(seconds)}"
        yield Finding(Kind.PROCESS, f"{say(name)} ({pid})", min(spans)[0], seconds, text)


def _steps(samples: Sequence[Sample], end: float) -> Iterable[tuple[Sample, float]]:
    """Each sample holds until the next one."""
    for number, sample in enumerate(samples):
        last = number + 1 == len(samples)
        yield sample, max(end, sample.at) if last else samples[number + 1].at


def _notes(window: Window, samples: Sequence[Sample]) -> tuple[str, ...]:
    seen = [
        part
        for sample, until in _steps(samples, window.until)
        if sample.holders is not None and (part := window.overlap(sample.at, until))
    ]
    unseen = window.until - window.since - covered(seen)
    if not seen or unseen > UNWATCHED:
        how_long = "in this window" if not seen else f"for {_time(unseen)} of the window"
        return (f"who else holds memory of the card could not be seen {how_long}",)
    return ()


def _unwatched(window: Window, spans: Iterable[Span]) -> Iterable[Finding]:
    reached = window.since
    ends = sorted((span.began, span.seen) for span in spans)
    for began, seen in (*ends, (window.until, window.until)):
        gap = min(began, window.until) - reached
        if gap > UNWATCHED:
            text = f"the gate was away, or kept no history, for {_time(gap)}: nobody knows what used the card"
            yield Finding(Kind.UNWATCHED, "the gate", reached, gap, text)
        reached = max(reached, seen)


# ------------------------------------------------------------------------------------- shapes and sentences


def as_json(certificate: Certificate) -> dict[str, Any]:
    """What `GET /contention` answers."""
    return {
        "clean": certificate.clean,
        "since": _iso(certificate.since),
        "until": _iso(certificate.until),
        "seconds": round(certificate.until - certificate.since, 3),
        "findings": [
            {
                "kind": str(finding.kind),
                "who": finding.who,
                "when": _iso(finding.when),
                "seconds": None if finding.seconds is None else round(finding.seconds, 3),
                "text": finding.text,
            }
            for finding in certificate.findings
        ],
        "notes": list(certificate.notes),
    }


def from_json(found: dict[str, Any]) -> Certificate:
    """The other way. Raises ValueError for what is no certificate."""
    try:
        return Certificate(
            found["clean"] is True and not found["findings"],
            _from_iso(found["since"]),
            _from_iso(found["until"]),
            tuple(
                Finding(Kind(f["kind"]), str(f["who"]), _from_iso(f["when"]), f["seconds"], str(f["text"]))
                for f in found["findings"]
            ),
            tuple(str(note) for note in found["notes"]),
        )
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"not a certificate: {problem!r}") from None


def certificate_text(certificate: Certificate) -> str:
    """For people: the verdict first, then one line a finding. Nothing in it controls a terminal."""
    length = _time(certificate.until - certificate.since)
    span = f"{_clock(certificate.since)} to {_clock(certificate.until)} UTC, {length}"
    if certificate.clean:
        lines = [f"clean: nothing else used the card ({span})"]
    else:
        lines = [f"CONTAMINATED: do not trust this measurement ({span})"]
    lines += [f"  {_clock(f.when)}  {f.kind:<9}  {say(f.text, 1000)}" for f in certificate.findings]
    lines += [f"  note: {say(note, 1000)}" for note in certificate.notes]
    return "\n".join(lines)


def exit_code(certificate: Certificate, command: int = 0) -> int:
    """Of `certify -- COMMAND`: a command that failed says so; else CONTAMINATED, or 0."""
    return command or (0 if certificate.clean else CONTAMINATED)


def say(value: object, limit: int = NAME_LIMIT) -> str:
    """Somebody's text as it may be shown: one line, bounded, printable."""
    text = "" if value is None else str(value)
    shown = "".join(c if c.isprintable() else "?" for c in text[:limit])
    return shown + "…" if len(text) > limit else shown


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _from_iso(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")
