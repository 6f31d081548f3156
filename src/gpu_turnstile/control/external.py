"""What the external Ollama lists, for our own listing: asked briefly, remembered for a while, never in the way."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx

from gpu_turnstile.control.house import House

ASK_TIMEOUT = 1.0  # seconds it may take
KEEP = 60.0  # seconds its last answer stands in when it does not answer …
PAUSE = 5.0  # … and for so many it is not asked again


class OllamaListing:
    """Times inside are on the monotonic clock."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._heard_at = float("-inf")
        self._not_before = float("-inf")

    async def models(self, house: House) -> list[dict[str, Any]]:
        """Its entries as it wrote them; none where there is no such Ollama or it is silent. Never raises."""
        tenant = house.gateway.table.external
        seat = house.arbiter.seat(tenant) if tenant is not None else None
        if seat is None or house.http is None:
            return []
        now = time.monotonic()
        if now >= self._not_before:
            fresh = await _ask(house.http, seat.engine.url)
            if fresh is not None:
                self._entries, self._heard_at = fresh, now
            else:
                self._not_before = now + PAUSE
        return self._entries if now - self._heard_at < KEEP else []


async def _ask(http: httpx.AsyncClient, url: str) -> list[dict[str, Any]] | None:
    try:
        async with asyncio.timeout(ASK_TIMEOUT):
            reply = await http.get(url + "/v1/models")
        found = reply.json()["data"] if reply.is_success else None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError, TypeError):  # a timeout is an OSError
        return None
    if not isinstance(found, list):
        return None
    return [item for item in found if isinstance(item, dict) and isinstance(item.get("id"), str)]
