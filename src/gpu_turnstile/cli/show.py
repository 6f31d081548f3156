"""What the gate says, as a person reads it. Plain functions from JSON to things rich can print, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpu_turnstile.cli.say import clean

Row = tuple[object, ...]
_PHASE = {"idle": "dim", "serving": "green", "draining": "yellow", "swapping": "yellow"}
_EVENT = {
    "swapped": "green",
    "admitted": "green",
    "drain": "yellow",
    "forced": "red",
    "swap_war": "red",
    "swap_failed": "red",
    "admit_failed": "red",
    "evict_failed": "red",
    "engine_lost": "red",
    "lost": "red",
}


def console() -> Console:
    """Colours only on a terminal and without NO_COLOR; that is rich's own rule."""
    return Console(highlight=False, soft_wrap=False)


def status(found: dict[str, Any], url: str) -> RenderableType:
    parts: list[RenderableType] = [_headline(found, url), _facts(found)]
    parts += work(found)
    parts += _section("engines", ("NAME", "MODE", "ENGINE", "RUN BY", "CARD", "URL"), map(_engine, found["engines"]))
    parts += [Text.assemble(("! ", "yellow"), clean(line)) for line in (*war(found), *found["warnings"])]
    return Group(*parts)


def war(found: dict[str, Any]) -> Iterable[str]:
    """A swap war, if there is one: who, what it costs, and what would help."""
    fought = found.get("war")
    if not fought:
        return
    sides = ", ".join(f"{preset} (for {', '.join(clients)})" for preset, clients in fought["presets"].items())
    yield (
        f"a swap war: {sides}; {fought['swaps']} swaps in {ago(fought['since_s'])}, "
        f"it costs {ago(fought['lost_s_per_hour'])} of every hour"
    )
    for help in fought["would_help"]:
        yield f"what would help: {help}"


def work(found: dict[str, Any]) -> list[RenderableType]:
    """Who has the card, and who waits for it."""
    parts = _section(
        "in flight",
        ("PRESET", "CLIENT", "FOR"),
        [(h["tenant"], h["client"], ago(h["age_s"])) for h in found["inflight"]],
    )
    parts += _section(
        "waiting",
        ("#", "WANTS", "CLIENT", "FOR"),
        [(w["position"], ", ".join(w["wants"]), w["client"], ago(w["waited_s"])) for w in found["queue"]],
    )
    parts += _section(
        "image jobs",
        ("PROMPT", "PHASE", "FOR"),
        [(j["prompt_id"], j["phase"], ago(j["age_s"])) for j in found["jobs"]],
    )
    return parts


def _headline(found: dict[str, Any], url: str) -> Text:
    return Text(f"gpu-turnstile {clean(found['version'])} at {url}, up {ago(found['uptime_s'])}", style="bold")


def _facts(found: dict[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in (
        ("card", _card(found)),
        ("next", _next(found)),
        ("stuck", ", ".join(map(clean, found["stuck"]))),
        ("lock", _lock(found["locks"])),
        ("memory", memory(found["card"])),
        ("last swap", _last_swap(found["swaps"])),
        ("contexts", _contexts(found["contexts"])),
        ("traffic", _traffic(found["counters"])),
        ("presets", f"{found['presets']['count']} in {clean(found['places']['presets'])}"),
        ("state", clean(found["places"]["state"])),
        ("settings", clean(found["places"]["config"] or "")),
    ):
        if value:
            grid.add_row(name, value)
    return grid


def _card(found: dict[str, Any]) -> Text:
    phase, mode = found["phase"], clean(found["mode"])
    holder = ", ".join(map(clean, found["residents"]))
    if not holder:
        holder = "nobody" + (f" (last: {clean(found['model'])})" if found["model"] else "")
    doing = (phase, _PHASE.get(phase, ""))
    return (
        Text.assemble(doing, "  ", (holder, "bold"))
        if phase == mode
        else Text.assemble(doing, "  ", mode, "  ", (holder, "bold"))
    )


def _next(found: dict[str, Any]) -> str:
    if not found["target"]:
        return ""
    deadline = found["drain_deadline_in_s"]
    when = "" if deadline is None else f", by force in {ago(deadline)}"
    return clean(found["target"]) + when


def _lock(locks: dict[str, Any]) -> str:
    queue = ", ".join(clean(waiter["owner"]) for waiter in locks.get("queue", []))
    waiting = f"; waiting for it: {queue}" if queue else ""
    if not locks.get("preset"):
        return waiting.removeprefix("; ")
    owners = ", ".join(f"{clean(owner)} for {ago(o['expires_in'])}" for owner, o in locks["owners"].items())
    return f"{clean(locks['preset'])}, held by {owners}{waiting}"


def holders(locks: dict[str, Any]) -> str:
    """The lock, in a line of its own."""
    if not locks.get("preset"):
        entitled = locks.get("entitled")
        return f"free, and {clean(entitled)} is next" if entitled else "free"
    owners = ", ".join(
        f"{clean(name)} (since {ago(o['held'])}, until {ago(o['expires_in'])} of silence)"
        for name, o in locks["owners"].items()
    )
    return f"{clean(locks['preset'])} is locked by {owners}"


def lock_queue(locks: dict[str, Any]) -> list[RenderableType]:
    rows = [
        (w["position"], w["owner"], w["preset"], ago(w["waited"]), ago(w["expires_in"])) for w in locks.get("queue", [])
    ]
    return _section("waiting for the lock", ("#", "OWNER", "PRESET", "FOR", "STALE IN"), rows)


def memory(card: dict[str, Any]) -> str:
    """The card's memory, as far as it is known."""
    if card["total_gb"] is None:
        return f"not readable; {card['limit_gb']:g} GB by the settings"
    line = f"{card['used_gb']:g} of {card['total_gb']:g} GB used"
    holders = [f"{clean(h['name'])} ({h['pid']}){_size(h['used_gb'])}" for h in card["holders"] or ()]
    return line + (": " + ", ".join(holders) if holders else "")


def _size(used: float | None) -> str:
    return "" if used is None else f" {used:g} GB"


def _last_swap(swaps: dict[str, Any]) -> str:
    last = swaps["last"]
    if last is None:
        return ""
    what = f"to {clean(last['target'])}" if last.get("target") else "unload"
    if last["ok"]:
        evicted = ", ".join(map(clean, last.get("evicted", ())))
        line = f"{what} in {ago(last['seconds'])}" + (f", evicted {evicted}" if evicted else "")
    else:
        line = f"{what} FAILED: {clean(last.get('reason', ''))}"
    return f"{line} ({swaps['done']} done, {swaps['failed']} failed)"


def _contexts(kept: dict[str, Any] | None) -> str:
    """Empty where nothing has been saved yet."""
    if not kept or not (kept["saved"] or kept["restored"] or kept["failures"]):
        return ""
    trouble = f", {kept['failures']} failures" if kept["failures"] else ""
    return f"{kept['saved']} saved, {kept['restored']} given back, {kept['seconds_saved']:.3g} s spared{trouble}"


def _traffic(counters: dict[str, Any]) -> str:
    names = {"died_midstream": "died midstream", "unreachable": "unreachable", "malformed": "malformed"}
    trouble = [f"{counters[key]} {name}" for key, name in names.items() if counters[key]]
    return ", ".join([f"{counters['requests']} requests", *trouble])


def _engine(engine: dict[str, Any]) -> Row:
    run_by = engine["runtime"] if engine["owned"] else "others"
    return engine["name"], engine["mode"], engine["kind"], run_by, "yes" if engine["on_card"] else "", engine["url"]


def _section(title: str, columns: Row, rows: Iterable[Row]) -> list[RenderableType]:
    """A heading with a table, or nothing when there are no rows."""
    found = list(rows)
    return [Text(), Text(title, style="bold"), table(columns, found)] if found else []


def table(columns: Row, rows: Iterable[Row]) -> Table:
    """Long cells are folded, never cut: what is not shown cannot be copied."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        made.add_column(str(column), overflow="fold")
    for row in rows:
        made.add_row(*(Text(clean(cell)) for cell in row))
    return made


def event(found: dict[str, Any]) -> Text:
    """One line of `turnstile events`."""
    moment = clean(found.get("time", ""))[11:23]
    kind = clean(found["kind"])
    fields = " ".join(f"{clean(k)}={clean(_value(v))}" for k, v in found.get("fields", {}).items())
    return Text.assemble((f"{moment:12}  ", "dim"), (f"{kind:12}", _EVENT.get(kind, "bold")), "  ", fields)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def ago(seconds: float) -> str:
    """A time as people say it: 0.4 s, 12 s, 3 min, 2 h 5 min, 4 d 3 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
