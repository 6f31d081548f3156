"""The control API: what people and scripts ask the gate itself. One small router per subject, put together here."""

from __future__ import annotations

from fastapi import FastAPI

from gpu_turnstile import __version__
from gpu_turnstile.control import (
    contention,
    contexts,
    docs,
    events,
    health,
    locks,
    metrics,
    mode,
    models,
    native,
    presets,
    problems,
    release,
)
from gpu_turnstile.control.external import OllamaListing
from gpu_turnstile.control.feed import Feed
from gpu_turnstile.control.house import House
from gpu_turnstile.control.shapes import Problem

DESCRIPTION = (
    "One GPU, many workloads, one gate. This is the gate's own API; inference goes through the same address, "
    'to the paths the clients know. Every error is `{"error": code, "message": sentence}` with the code in the '
    "header `X-Turnstile-Error`. Times are seconds, sizes GB."
)


def create_app(house: House) -> FastAPI:
    """Build it before `Arbiter.start`, so that `/events` knows everything from the beginning.

    `app.state.feed` is the feed; whoever serves the app closes it first.
    """
    app = FastAPI(
        title="gpu-turnstile",
        version=__version__,
        summary="Who may use the card now?",
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": {"model": Problem, "description": "What went wrong"}},
    )
    app.state.house = house
    app.state.feed = Feed(house.arbiter)
    app.state.ollama = OllamaListing()
    problems.install(app)
    for room in (health, mode, locks, release, models, presets, native, events, contention, contexts, metrics, docs):
        app.include_router(room.router)
    return app
