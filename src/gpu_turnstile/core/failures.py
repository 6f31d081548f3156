"""Tenants that did not come up. A broken preset must not evict a good one each time somebody asks for it."""

from __future__ import annotations

from collections.abc import Mapping

from gpu_turnstile.core import policy
from gpu_turnstile.core.model import Code, Refuse, Tenant
from gpu_turnstile.core.policy import Rules


class Failures:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._of: dict[str, tuple[int, float, str]] = {}  # tenant -> failed swaps in a row, not before, why

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, tenant: str, why: str, now: float) -> None:
        count = self._of.get(tenant, (0, 0.0, ""))[0] + 1
        self._of[tenant] = (count, now + policy.held_back_for(count, self._rules), why)

    def forget(self, tenant: str) -> None:
        self._of.pop(tenant, None)

    def presets_changed(self, before: Mapping[str, Tenant], after: Mapping[str, Tenant]) -> None:
        """What was broken may be mended."""
        for name in tuple(self._of):
            old, new = before.get(name), after.get(name)
            if old is None or new is None or old.revision != new.revision:
                del self._of[name]

    def not_before(self, tenant: str, otherwise: float) -> float:
        """When it may be tried again."""
        return self._of[tenant][1] if tenant in self._of else otherwise

    def hold_back(self, tenant: str, now: float) -> bool:
        return now < self.not_before(tenant, now)

    def refusal(self, ticket: int, tenant: str, now: float) -> Refuse:
        """What a client is told whose tenant is held back."""
        count, until, why = self._of[tenant]
        message = (
            f"{tenant!r} has failed to start {count} times in a row and is not tried before {until - now:.0f} s; {why}"
        )
        return Refuse(ticket, Code.SWAP_FAILED, message, max(1.0, until - now))
