"""Which card to read, by the setting's word: `auto`, `none`, `nvml` (or `nvml:1`), `sysfs`, `sim:PATH`."""

from __future__ import annotations

from gpu_turnstile.gpu.base import Card
from gpu_turnstile.gpu.none import NoCard
from gpu_turnstile.gpu.nvml import NvmlCard
from gpu_turnstile.gpu.sysfs import find_cards


def open_card(spec: str) -> Card:
    """Raises ValueError, in one line, when there is no such word or no such card. `auto` always finds something."""
    word, _, rest = spec.partition(":")
    match word, rest:
        case "auto", "":
            return _nvml(0) or _sysfs() or NoCard()
        case "none", "":
            return NoCard()
        case "nvml", index if index == "" or index.isdecimal():
            return _found(_nvml(int(index or 0)), spec, "the NVIDIA driver does not answer, or has no such card")
        case "sysfs", "":
            return _found(_sysfs(), spec, "no AMD card under /sys/class/drm")
        case "sim", path if path:
            return _simulated(path)
    raise ValueError(f"unknown card {spec!r}: use auto, none, nvml, nvml:INDEX, sysfs or sim:PATH")


def _nvml(index: int) -> Card | None:
    card = NvmlCard(index)
    return card if card.read() is not None else None


def _sysfs() -> Card | None:
    return next(iter(find_cards()), None)


def _found(card: Card | None, spec: str, why_not: str) -> Card:
    if card is None:
        raise ValueError(f"cannot open card {spec!r}: {why_not}")
    return card


def _simulated(path: str) -> Card:
    from gpu_turnstile.sim.card import SimCard

    return SimCard(path)
