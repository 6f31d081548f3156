"""Engines that want a key. It goes with every request; which header carries it is the dialect's affair."""

from __future__ import annotations

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
        return await call(self.http, method, self.url + path, body=body, timeout=limit, headers=self.headers())
