"""An engine somebody else runs. It is never started or stopped from here; whether it serves, its probe tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar


class ExternalRuntime:
    kind: ClassVar[str] = "external"
    owned: ClassVar[bool] = False

    def __init__(self) -> None:
        self.on_exit: Callable[[str], None] | None = None

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""

    async def alive(self) -> bool:
        return True

    async def adopt(self) -> bool:
        """Nothing to take over: whoever runs it has it."""
        return True

    def output(self) -> tuple[str, ...]:
        return ()
