"""A timeline as an SVG picture: a lane for the card and one for each client, one band of lanes for each run.

Nothing is loaded from anywhere, nothing runs in it; names are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from gpu_turnstile.simulate.outcome import Outcome, Span, quantile

WIDTH, LABEL, LANE, GAP = 1600, 130, 14, 6
COLOURS = {"wait": "#f2c078", "prefill": "#d1495b", "work": "#30638e"}
PALETTE = ("#30638e", "#7a9e7e", "#8d6a9f", "#c97b63", "#4f772d", "#577590", "#b56576", "#6d597a")
SWAP = "#222222"


def timeline(outcomes: Sequence[Outcome], since: float = 0.0, until: float | None = None) -> str:
    """The picture. `since`, `until`: seconds of the run; left out: all of it."""
    end = max((outcome.seconds for outcome in outcomes), default=0.0) if until is None else until
    scale = (WIDTH - LABEL - 10) / max(end - since, 1e-9)
    parts: list[str] = []
    top = 30.0
    for outcome in outcomes:
        top = _band(parts, outcome, top, since, end, scale)
    legend = " ".join(f'<tspan fill="{colour}">■</tspan> {name}' for name, colour in (("swap", SWAP), *COLOURS.items()))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top:.0f}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/><text x="8" y="18">{legend}</text>'
        + "".join(parts)
        + "</svg>\n"
    )


def _band(parts: list[str], outcome: Outcome, top: float, since: float, end: float, scale: float) -> float:
    title = (
        f"{outcome.policy}, contexts {outcome.context}: {outcome.steps} steps, {outcome.swaps} swaps, "
        f"95 % waited {quantile(outcome.waits, 0.95):.0f} s or less"
    )
    parts.append(f'<text x="8" y="{top + 12:.0f}" font-weight="bold">{escape(title)}</text>')
    top += 18
    lanes = ["card", *outcome.clients]
    colours = dict(zip(sorted({c.preset for c in outcome.clients.values()}), PALETTE * 8, strict=False))
    for number, name in enumerate(lanes):
        y = top + number * (LANE + GAP)
        parts.append(f'<text x="8" y="{y + LANE - 3:.0f}">{escape(name[:22])}</text>')
        parts.append(f'<line x1="{LABEL}" x2="{WIDTH - 10}" y1="{y + LANE}" y2="{y + LANE}" stroke="#dddddd"/>')
    places = {name: top + number * (LANE + GAP) for number, name in enumerate(lanes)}
    for lane, colour, span in _painted(outcome, colours):
        begin, stop = max(span.since, since), min(span.until, end)
        if stop > begin:
            x, width = LABEL + (begin - since) * scale, max(0.4, (stop - begin) * scale)
            title = f"{span.what} {span.who} {span.since:.0f} to {span.until:.0f} s"
            parts.append(
                f'<rect x="{x:.1f}" y="{places[lane]:.0f}" width="{width:.1f}" height="{LANE - 2}" fill="{colour}">'
                f"<title>{escape(title)}</title></rect>"
            )
    return top + len(lanes) * (LANE + GAP) + 14


def _painted(outcome: Outcome, colours: dict[str, str]) -> Iterator[tuple[str, str, Span]]:
    """Lane, colour, span. The card shows swaps, and whose preset works."""
    for span in outcome.spans:
        if span.what == "swap":
            yield "card", SWAP, span
            continue
        yield span.who, COLOURS[span.what], span
        if span.what != "wait":
            yield "card", colours[outcome.clients[span.who].preset], span
