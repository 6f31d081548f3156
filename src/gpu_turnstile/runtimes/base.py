"""How an engine is put on the card and taken off. Runtimes know processes and containers, not the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol


class StartFailed(Exception):
    """The engine could not be started. The text is one line for a person; `output` its last lines."""

    def __init__(self, reason: str, output: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.output = output


class StopFailed(Exception):
    """The engine could not be ended, not even by force: it may still hold the card."""


class Runtime(Protocol):
    """`on_exit` is called on the loop, at once, with one line of reason when the engine ends unasked."""

    kind: ClassVar[str]
    owned: ClassVar[bool]  # whether start and stop do anything
    on_exit: Callable[[str], None] | None

    async def start(self) -> None:
        """Start the engine; returns when it exists (not: when it is ready). Raises StartFailed."""
        ...

    async def stop(self) -> None:
        """Return when it is gone, with all its children. Idempotent. Raises StopFailed."""
        ...

    async def alive(self) -> bool: ...

    async def adopt(self) -> bool:
        """Take over what an earlier gate left running; whether there is such an engine now. Raises StopFailed.

        Called once, before the first start. What was left and cannot be taken over is ended.
        """
        ...

    async def pids(self) -> tuple[int, ...]:
        """Processes the engine is, as this machine numbers them; what they began is its too. () = nobody can tell.

        Asked every few seconds: it must cost little. Never raises.
        """
        ...

    def output(self) -> tuple[str, ...]:
        """The last lines it printed, oldest first."""
        ...
