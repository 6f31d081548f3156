"""The lock: who pins which preset, for how long, and who is next. Pure; time is an argument.

words.py   what people see and what the book answers
state.py   what the book keeps, and how far the file is behind
paper.py   the book as JSON, and back
book.py    the rules
"""

from gpu_turnstile.core.locks.book import LockBook
from gpu_turnstile.core.locks.state import REMEMBERED
from gpu_turnstile.core.locks.words import (
    MAX_OWNERS,
    MAX_TTL,
    TTL,
    Cause,
    Denied,
    Ended,
    Granted,
    Missing,
    Owner,
    Policed,
    Queued,
    Refused,
    Stale,
    Standing,
    Unlocked,
    Waiter,
    Why,
    check_owner,
    check_ttl,
)

__all__ = [
    "MAX_OWNERS",
    "MAX_TTL",
    "REMEMBERED",
    "TTL",
    "Cause",
    "Denied",
    "Ended",
    "Granted",
    "LockBook",
    "Missing",
    "Owner",
    "Policed",
    "Queued",
    "Refused",
    "Stale",
    "Standing",
    "Unlocked",
    "Waiter",
    "Why",
    "check_owner",
    "check_ttl",
]
