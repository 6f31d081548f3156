"""The Python client: look at a gate, hold its lock, follow its events.

    from gpu_turnstile.client import Turnstile

    ts = Turnstile()
    with ts.lock("coder", owner="loop-1", wait=True) as lock:
        httpx.post(f"{ts.url}/v1/chat/completions", headers=lock.headers, json=…)

`AsyncTurnstile` has the same calls to await. Nothing here knows the gate's insides: it speaks HTTP, as anybody may.
"""

from gpu_turnstile.client.aio import AsyncLock, AsyncTurnstile
from gpu_turnstile.client.errors import (
    BadRequest,
    Locked,
    NotHeld,
    StaleLock,
    TurnstileError,
    Unavailable,
    Unreachable,
)
from gpu_turnstile.client.shapes import Event, Granted, Owner, Queued, Unlocked, Waiter
from gpu_turnstile.client.sync import Lock, Turnstile

__all__ = [
    "AsyncLock",
    "AsyncTurnstile",
    "BadRequest",
    "Event",
    "Granted",
    "Lock",
    "Locked",
    "NotHeld",
    "Owner",
    "Queued",
    "StaleLock",
    "Turnstile",
    "TurnstileError",
    "Unavailable",
    "Unlocked",
    "Unreachable",
    "Waiter",
]
