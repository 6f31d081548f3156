"""What every route may ask for: the house and the feed of the app it runs in."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from gpu_turnstile.control.external import OllamaListing
from gpu_turnstile.control.feed import Feed
from gpu_turnstile.control.house import House


async def _house(request: Request) -> House:
    return cast(House, request.app.state.house)


async def _feed(request: Request) -> Feed:
    return cast(Feed, request.app.state.feed)


async def _ollama(request: Request) -> OllamaListing:
    return cast(OllamaListing, request.app.state.ollama)


TheHouse = Annotated[House, Depends(_house)]
TheFeed = Annotated[Feed, Depends(_feed)]
TheOllama = Annotated[OllamaListing, Depends(_ollama)]
