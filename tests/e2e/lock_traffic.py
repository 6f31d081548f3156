"""Owners that lock, renew, queue and let go at random, and remember what the gate has told them.

Each owner makes one call at a time and nobody touches another's lock, so what an owner was told last is what the gate
must know about it for ever, whenever it is killed; only the one call that was not answered may have happened or not.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

PRESETS = ("a", "b", "c")
TTLS = (300.0, 600.0, 900.0)
GRAIN = 31.0  # seconds by which a crash may shorten a lock, and one for the way


@dataclass(frozen=True)
class Hold:
    preset: str
    token: int
    ttl: float


@dataclass(frozen=True)
class Place:
    preset: str
    ttl: float


State = tuple[Hold | None, Place | None]


@dataclass(frozen=True)
class Call:
    verb: str  # lock, renew, unlock, leave
    preset: str = ""
    ttl: float | None = None
    body: dict[str, Any] = field(default_factory=dict)


@dataclass
class Owner:
    name: str
    rnd: random.Random
    hold: Hold | None = None
    place: Place | None = None
    heard_at: float = 0.0  # when the last call that refreshed its lock was sent
    entered: tuple[float, float] = (0.0, 0.0)  # when it asked for its place, and when it was told that it has it
    pending: Call | None = None
    asked_at: float = 0.0  # when that was sent
    answered: int = 0

    @property
    def state(self) -> State:
        return self.hold, self.place

    async def work(self, http: httpx.AsyncClient, url: str) -> None:
        """Until the gate does not answer any more."""
        while True:
            self.pending = call = self.choose()
            sent = self.asked_at = time.monotonic()
            try:
                answer = await http.post(
                    f"{url}/{'unlock' if call.verb in ('unlock', 'leave') else 'lock'}", json=call.body
                )
            except httpx.TransportError:
                return
            self.told(call, answer.status_code, answer.json(), sent)
            self.pending = None
            self.answered += 1

    def choose(self) -> Call:
        rnd, who = self.rnd, {"owner": self.name}
        verb = rnd.choices(("lock", "renew", "unlock", "leave"), (50, 25, 18, 7))[0]
        if verb == "lock":
            preset, ttl = rnd.choice(PRESETS), rnd.choice(TTLS)
            return Call(verb, preset, ttl, {"lock": preset, "ttl": ttl, "wait": rnd.random() < 0.7, **who})
        if verb == "renew":
            ttl = rnd.choice((None, *TTLS))
            named = {"token": self.hold.token} if self.hold and rnd.random() < 0.5 else {}
            return Call(verb, "", ttl, {"renew": True, "ttl": ttl, **named, **who})
        return Call(verb, "", None, {"lock": False, "leave": verb == "leave", **who})

    def told(self, call: Call, status: int, body: dict[str, Any], sent: float) -> None:
        """What an answer says. One that cannot be is an error of the gate's."""
        if call.verb in ("unlock", "leave"):
            assert status == 200, body
            self.place = None
            self.hold = self.hold if call.verb == "leave" else None
        elif status == 200:
            self.granted(call, Hold(body["locked"], body["token"], body["ttl"]), body["joined"], sent)
        elif status == 202:
            self.queued(call, body["lock"], sent)
        elif status == 404:
            assert self.state == (None, None), f"{self.name} was told {body}, and it had {self.state}"
        else:
            assert (status, call.verb) == (409, "lock"), (call, status, body)
            if self.place is not None and self.place.preset == call.preset:
                self.place = replace(self.place, ttl=call.ttl or 0.0)

    def granted(self, call: Call, hold: Hold, joined: bool, sent: float) -> None:
        """Who joins keeps the place it has for another preset; who takes the lock has had its one wish."""
        before = self.hold
        assert before is None or before.preset != hold.preset or before.token == hold.token
        assert before is None or before.preset == hold.preset or before.token < hold.token
        self.hold, self.heard_at = hold, sent
        took = not joined and (before is None or before.token != hold.token)
        if self.place is not None and (took or self.place.preset == hold.preset):
            self.place = None
        if self.place is not None and call.verb == "renew" and call.ttl is not None:
            self.place = replace(self.place, ttl=call.ttl)

    def queued(self, call: Call, preset: str, sent: float) -> None:
        known = self.place if self.place is not None and self.place.preset == preset else None
        assert known is not None or call.verb == "lock"
        if known is None:
            self.entered = (sent, time.monotonic())
        self.place = Place(preset, call.ttl or (known.ttl if known else 0.0))

    def possible(self, found: State, newest: int) -> bool:
        """Whether the gate may know that of it, now that it was killed. `newest`: the last token before."""
        if found == self.state:
            return True
        hold, place = found
        match self.pending:
            case None:
                return False
            case Call("unlock"):
                return found == (None, None)
            case Call("leave"):
                return found == (self.hold, None)
            case Call("renew", ttl=ttl):
                if self.place is not None and place is None:  # its turn had come
                    return hold == Hold(self.place.preset, hold.token if hold else 0, ttl or self.place.ttl)
                return found == (_with(self.hold, ttl), _with(self.place, ttl))
            case Call("lock", preset, ttl):
                if hold != self.hold:
                    same = self.hold is not None and self.hold.preset == preset
                    token = self.hold.token if same and self.hold else hold.token if hold else 0
                    return (
                        hold == Hold(preset, token, ttl or 0.0) and place in (None, self.place) and (same or token > 0)
                    )
                return place == Place(preset, ttl or 0.0)
        raise AssertionError(self.pending)


def _with(entry: Any, ttl: float | None) -> Any:
    return replace(entry, ttl=ttl) if entry is not None and ttl is not None else entry


async def traffic(owners: list[Owner], url: str, seconds: float, kill: Any) -> None:
    """All of them at once, until `kill` is called after so many seconds."""
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
        tasks = [asyncio.create_task(owner.work(http, url)) for owner in owners]
        await asyncio.sleep(seconds)
        kill()
        await asyncio.gather(*tasks)
