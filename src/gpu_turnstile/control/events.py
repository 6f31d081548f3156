"""`/events`: the feed as server-sent events.

    id: 17
    event: evicted
    data: {"id": 17, "time": "2026-01-02T03:04:05.678Z", "kind": "evicted", "fields": {…}}

A reader that is too slow gets `event: lost` with the number it missed; one with nothing to read, a comment now and
then, so that neither end takes the silence for a broken connection.
"""

import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import StreamingResponse

from gpu_turnstile.control.feed import Event, Feed, Lost
from gpu_turnstile.control.given import TheFeed

PAUSE = 15.0  # seconds of silence before a comment

router = APIRouter(tags=["observability"])

Since = Annotated[int | None, Query(ge=0, description="replay what came after this id (the last 1,000 are kept)")]
Follow = Annotated[bool, Query(description="false: end after the replay")]
LastId = Annotated[int | None, Header(alias="Last-Event-ID", ge=0, description="what browsers send on reconnecting")]


@router.get(
    "/events",
    summary="What happens, as it happens",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Server-sent events"}},
)
async def events(
    feed: TheFeed, since: Since = None, follow: Follow = True, last_id: LastId = None
) -> StreamingResponse:
    """Every decision and every step of a swap, as server-sent events. Ids begin at 1 when the gate starts."""
    start = since if since is not None else last_id
    lines = _stream(feed, start) if follow else _replay(feed, start or 0)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines, media_type="text/event-stream", headers=headers)


async def _stream(feed: Feed, since: int | None) -> AsyncIterator[str]:
    yield ": the feed of gpu-turnstile\n\n"
    with feed.subscribe(since, PAUSE) as items:
        async for item in items:
            yield text(item)
    yield ": the gate is shutting down\n\n"


async def _replay(feed: Feed, since: int) -> AsyncIterator[str]:
    yield "".join(text(item) for item in feed.since(since))


def text(item: Event | Lost | None) -> str:
    """One item as it goes over the wire."""
    match item:
        case None:
            return ": still here\n\n"
        case Lost(count):
            return f'event: lost\ndata: {{"lost": {count}}}\n\n'
        case Event():
            data = {"id": item.id, "time": item.time, "kind": item.kind, "fields": item.fields}
            return f"id: {item.id}\nevent: {item.kind}\ndata: {json.dumps(data, default=str)}\n\n"
