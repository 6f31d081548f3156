"""What every route may ask for: the house and the feed of the app it runs in, and who calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from gpu_turnstile.control.external import OllamaListing
from gpu_turnstile.control.feed import Feed
from gpu_turnstile.control.house import House
from gpu_turnstile.control.problems import Refusal

NAME = 100  # characters of a caller's name and of where it comes from


async def _house(request: Request) -> House:
    return cast(House, request.app.state.house)


async def _feed(request: Request) -> Feed:
    return cast(Feed, request.app.state.feed)


async def _ollama(request: Request) -> OllamaListing:
    return cast(OllamaListing, request.app.state.ollama)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, as the gateway says. `name`: its key's, or what it calls itself; None = it does not say.

    `peer`: its address and program. `owner` and `token`: whose lock it means (`X-Turnstile-Owner`, `X-Turnstile-Lock`).
    """

    name: str | None
    peer: str
    owner: str | None
    token: int | None

    @property
    def said(self) -> str:
        """One name for logs, lines and leases."""
        return self.name or self.peer or "control"


async def _caller(request: Request) -> Caller:
    """Raises Refusal."""
    name, peer, owner, token = (
        request.headers.get(field, "").strip().encode("latin-1").decode("utf-8", "replace")
        for field in ("x-turnstile-client", "x-turnstile-peer", "x-turnstile-owner", "x-turnstile-lock")
    )
    if token and not (token.isascii() and token.isdigit()):
        raise Refusal("bad_request", "X-Turnstile-Lock must be the number that the lock was given with")
    return Caller(name[:NAME] or None, peer[:NAME], owner or None, int(token[:18]) if token else None)


TheCaller = Annotated[Caller, Depends(_caller)]
TheHouse = Annotated[House, Depends(_house)]
TheFeed = Annotated[Feed, Depends(_feed)]
TheOllama = Annotated[OllamaListing, Depends(_ollama)]
