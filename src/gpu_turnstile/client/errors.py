"""What can go wrong, as types. Each says what happened in the gate's own sentence."""

from __future__ import annotations

from gpu_turnstile.client.shapes import Owner, Waiter


class TurnstileError(Exception):
    """Every error of this client. `code` is the gate's (`X-Turnstile-Error`), `status` HTTP's, 0 = no answer."""

    def __init__(self, message: str, *, code: str = "", status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.retry_after = retry_after


class Locked(TurnstileError):
    """Others hold the lock or are next for it (409), or it would take force to end theirs. Nothing changed.

    `retry_after`: seconds until it may be free by itself; None = it will not be by waiting.
    """

    def __init__(
        self,
        message: str,
        *,
        owners: tuple[Owner, ...] = (),
        queue: tuple[Waiter, ...] = (),
        preset: str | None = None,
        status: int = 409,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, code="locked", status=status, retry_after=retry_after)
        self.owners = owners
        self.queue = queue
        self.preset = preset  # the one that is pinned


class StaleLock(TurnstileError):
    """The token names no lock that lives (409): it lapsed, was taken away, or was let go."""


class NotHeld(TurnstileError):
    """There is nothing to renew (404)."""


class BadRequest(TurnstileError):
    """The gate does not understand or does not allow the call: 400, 401, 403, 404. Asking again does not help."""


class Unavailable(TurnstileError):
    """The gate answers, but cannot do it now: 422, 503 and the like."""


class Unreachable(TurnstileError):
    """No gate answers there, it broke off, or something else answers. `sent`: the call may have been carried out."""

    sent = False
