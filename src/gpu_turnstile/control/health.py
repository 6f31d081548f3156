"""Is the gate alive, and what does it do: `/healthz` for machines, `/health` and `/status` for people."""

from fastapi import APIRouter

from gpu_turnstile.control import shapes, views
from gpu_turnstile.control.given import TheFeed, TheHouse

router = APIRouter(tags=["state"])


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", summary="Who uses the card: idle, llm or image")
async def healthz(house: TheHouse, feed: TheFeed) -> shapes.Healthz:
    """Answers as long as the gate runs, on both listeners. `image_pending`: an image job waits for the card."""
    return views.healthz(house, feed)


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="The gate is alive")
async def health(house: TheHouse, feed: TheFeed) -> shapes.Health:
    """Says nothing about engines: one that is down is brought up by the next request."""
    return views.health(house, feed)


@router.head("/status", include_in_schema=False)
@router.get("/status", summary="Everything about the card, the line and the engines")
async def status(house: TheHouse, feed: TheFeed) -> shapes.Status:
    """Who holds the card and for whom, who waits and for how long, what was swapped, and what looks wrong."""
    return await views.status(house, feed)
