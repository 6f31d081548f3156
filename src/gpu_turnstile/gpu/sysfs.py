"""AMD cards, by the two files the amdgpu driver keeps: no library, no processes told apart."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from gpu_turnstile.gpu.base import Reading

DRM = Path("/sys/class/drm")


class SysfsCard:
    """`device` is a card's folder, the one with `mem_info_vram_total` in it."""

    kind: ClassVar[str] = "sysfs"

    def __init__(self, device: Path) -> None:
        self._device = device
        self.name = f"AMD {device.parent.name}"

    def read(self) -> Reading | None:
        total, used = _number(self._device / "mem_info_vram_total"), _number(self._device / "mem_info_vram_used")
        return None if total is None or used is None else Reading(total, used)

    def close(self) -> None:
        """Nothing is kept open."""


def find_cards(root: Path = DRM) -> list[SysfsCard]:
    """The largest first: a processor's own graphics also counts as a card."""
    devices = [file.parent for file in sorted(root.glob("card*/device/mem_info_vram_total"))]
    devices.sort(key=lambda device: _number(device / "mem_info_vram_total") or 0, reverse=True)
    return [SysfsCard(device) for device in devices]


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
