"""Engines that want a key. It goes with every request; which header carries it is the dialect's affair."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import httpx

from gpu_turnstile.engines.http import HttpEngine, Reply, call


class KeyedEngine(HttpEngine):
    """`api_key` may be set at any time; None = the server asks for none."""

    api_key: str | None = None

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    async def get(self, path: str, timeout: float | None = None) -> Reply:
        return await self.ask("GET", path, None, timeout)

    async def post(self, path: str, body: object, timeout: float | None = None) -> Reply:
        return await self.ask("POST", path, body, timeout)

    async def put(self, path: str, timeout: float | None = None) -> Reply:
        return await self.ask("PUT", path, None, timeout)

    async def ask(self, method: str, path: str, body: object | None, timeout: float | None) -> Reply:
        limit = self.timing.call_timeout if timeout is None else timeout
        http = cast(httpx.AsyncClient, _WithHeaders(self.http, self.headers()))
        return await call(http, method, self.url + path, body=body, timeout=limit)


class _WithHeaders:
    """The shared client as `call` uses it, with headers of one engine's own on every request."""

    def __init__(self, http: httpx.AsyncClient, headers: dict[str, str]) -> None:
        self._http = http
        self._headers = headers

    def stream(self, method: str, url: str, **options: Any) -> AbstractAsyncContextManager[httpx.Response]:
        return self._http.stream(method, url, headers=self._headers, **options)
