"""No card can be read: every reading is unknown, and whoever waits for memory is told so at once."""

from __future__ import annotations

from typing import ClassVar

from gpu_turnstile.gpu.base import Reading


class NoCard:
    kind: ClassVar[str] = "none"
    name: str = "no readable card"

    def read(self) -> Reading | None:
        return None

    def close(self) -> None:
        """Nothing is open."""
