"""The lock book on paper: written as plain JSON-able values, and read back with a distrust of whoever wrote it.

Seconds that are left are written instead of points in time, so no clock has to agree with another: neither the time
the gate was away nor a step of the clock frees or prolongs a lock. Reading never raises: what makes no sense is left
out and told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from gpu_turnstile.core.locks.state import Hold, Place, State
from gpu_turnstile.core.locks.words import MAX_NAME, MAX_TTL, Cause, Ended, check_owner, is_number


def write(state: State, now: float, busy: Collection[str] = ()) -> dict[str, Any]:
    """The whole of it; {} when there is nothing to tell.

    Who works has its whole TTL left: work ends with the gate, and the TTL counts from there.
    """
    if not state.token and not state.queue and not state.endings:
        return {}
    return {
        "token": state.token,
        "preset": state.preset,
        "owners": {
            name: {
                "token": h.token,
                "left": round(h.ttl if name in busy else h.until - now, 3),
                "ttl": h.ttl,
                "held": round(now - h.since, 3),
                "client": h.client,
            }
            for name, h in state.holds.items()
        },
        "queue": [
            {
                "owner": name,
                "preset": p.preset,
                "left": round(p.until - now, 3),
                "ttl": p.ttl,
                "waited": round(now - p.since, 3),
                "client": p.client,
            }
            for name, p in state.queue.items()
        ],
        "ended": [
            {
                "owner": e.owner,
                "preset": e.preset,
                "ago": round(now - e.at, 3),
                "cause": e.cause.value,
                "token": e.token,
                "by": e.by,
            }
            for e in state.endings.values()
        ],
    }


def read_into(state: State, view: object, now: float) -> tuple[str, ...]:
    """Fill a new `state` with what `view` tells; what in it made no sense and was left out.

    The seconds left go on from where they were. Unknown keys are ignored, missing ones have their plain meaning.
    """
    reader = _Reader(state, now)
    reader.read(view)
    state.mark_saved(write(state, now), now)
    state.unsaved = bool(reader.odd)
    return tuple(reader.odd)


class _Reader:
    """Reads a view that may have been written by another version, or by a hand."""

    def __init__(self, state: State, now: float) -> None:
        self.odd: list[str] = []
        self._state = state
        self._now = now

    def read(self, view: object) -> None:
        if not isinstance(view, Mapping):
            self.odd.append("the lock's state is not an object")
            return
        self._read_owners(view)
        for row in self._rows(view, "queue"):
            self._read_place(row)
        for row in self._rows(view, "ended"):
            self._read_ended(row)
        self._read_token(view.get("token", 0))

    def _read_owners(self, view: Mapping[str, Any]) -> None:
        owners, preset = view.get("owners", {}), view.get("preset")
        if not isinstance(owners, Mapping):
            return self.odd.append("the lock's owners are not an object")
        if owners and not _is_name(preset):
            return self.odd.append("the lock has owners and no preset")
        for name, row in owners.items():
            token = row.get("token") if isinstance(row, Mapping) else None
            if (
                not _is_name(name)
                or not isinstance(row, Mapping)
                or not _is_token(token)
                or token in [hold.token for hold in self._state.holds.values()]
                or not self._is_timed(row, "held")
            ):
                self.odd.append(f"the lock's owner {str(name)[:MAX_NAME]!r} makes no sense")
                continue
            ttl = float(row["ttl"])
            until = self._now + min(float(row["left"]), ttl)
            since = self._now - float(row.get("held", 0.0))
            self._state.holds[name] = Hold(token, ttl, until, since, _client(row))
            self._state.preset = preset
        return None

    def _read_place(self, row: Mapping[str, Any]) -> None:
        owner, preset = row.get("owner"), row.get("preset")
        if (
            not _is_name(owner)
            or not _is_name(preset)
            or owner in self._state.queue
            or not self._is_timed(row, "waited")
        ):
            self.odd.append(f"the waiter {str(owner)[:MAX_NAME]!r} makes no sense")
            return
        ttl = float(row["ttl"])
        until = self._now + min(float(row["left"]), ttl, self._state.ttl)
        since = self._now - float(row.get("waited", 0.0))
        self._state.queue[owner] = Place(preset, ttl, until, since, _client(row))

    def _read_ended(self, row: Mapping[str, Any]) -> None:
        owner, preset, ago, token = row.get("owner"), row.get("preset"), row.get("ago"), row.get("token", 0)
        known = row.get("cause") in [cause.value for cause in Cause]
        if not _is_name(owner) or not _is_name(preset) or not is_number(ago) or not known:
            self.odd.append(f"the end of the lock of {str(owner)[:MAX_NAME]!r} makes no sense")
            return
        by = row.get("by", "")
        self._state.remember(
            [
                Ended(
                    owner,
                    preset,
                    self._now - ago,
                    Cause(row["cause"]),
                    token if _is_token(token) else 0,
                    by if isinstance(by, str) else "",
                )
            ]
        )

    def _read_token(self, token: object) -> None:
        """Whatever the file says, no token that was ever seen is given again."""
        if token != 0 and not _is_token(token):
            self.odd.append("the lock's token is not a whole number")
        seen = [hold.token for hold in self._state.holds.values()] + [e.token for e in self._state.endings.values()]
        self._state.token = max([*seen, token if _is_token(token) else 0])

    def _rows(self, view: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
        rows = view.get(key, [])
        if not isinstance(rows, list):
            self.odd.append(f"the lock's {key} is not a list")
            return []
        self.odd += [f"an entry of the lock's {key} is not an object" for row in rows if not isinstance(row, Mapping)]
        return [row for row in rows if isinstance(row, Mapping)]

    @staticmethod
    def _is_timed(row: Mapping[str, Any], age: str) -> bool:
        ttl = row.get("ttl")
        return is_number(row.get("left")) and is_number(row.get(age, 0.0)) and is_number(ttl) and 0 < ttl <= MAX_TTL


def _is_token(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_name(value: object) -> TypeGuard[str]:
    try:
        check_owner(value)
    except ValueError:
        return False
    return True


def _client(row: Mapping[str, Any]) -> str:
    client = row.get("client", "")
    return client if isinstance(client, str) else ""
