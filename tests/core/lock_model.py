"""The lock, written a second time from the document alone, as simply as it can be said.

It counts seconds that are left down, where the book keeps points in time; it walks lists, and it tells what happened
as plain tuples. `test_locks_model.py` compares the two.
"""

from dataclasses import dataclass, field


@dataclass
class Row:
    owner: str
    preset: str
    ttl: float
    left: float
    client: str
    token: int = 0  # 0 = waits


@dataclass
class Model:
    place_ttl: float
    token: int = 0
    holds: list[Row] = field(default_factory=list)
    line: list[Row] = field(default_factory=list)

    def pass_time(self, seconds, busy):
        """Who is out by silence: owner, whether it held, and how long ago."""
        for row in self.holds + self.line:
            row.left -= seconds
            if row.left <= 0 and row.owner in busy:
                self.hear(row)
        gone = {(r.owner, r.token > 0, -r.left) for r in self.holds + self.line if r.left <= 0}
        self.holds, self.line = ([r for r in rows if r.left > 0] for rows in (self.holds, self.line))
        return gone

    def hear(self, row, ttl=None):
        row.ttl = ttl or row.ttl
        row.left = row.ttl if row.token else min(row.ttl, self.place_ttl)

    def stale(self, token, owner):
        return token is not None and not any(r.token == token and owner in (None, r.owner) for r in self.holds)

    def take(self, preset, owner, ttl, client):
        if self.holds and self.holds[0].preset != preset:
            self.holds = []  # only ever its own
        self.line = [r for r in self.line if (r.owner, r.preset) != (owner, preset)]
        row = find(self.holds, owner)
        fresh, joined = row is None, any(r.owner != owner for r in self.holds)
        if row is None:
            self.token += 1
            row = Row(owner, preset, ttl, ttl, client, self.token)
            self.holds.append(row)
        row.client = client or row.client
        self.hear(row, ttl)
        return ("granted", preset, row.token, fresh, joined)

    def lock(self, preset, owner, ttl, wait, token, client):
        if self.stale(token, owner):
            return ("stale",)
        if self.holds and self.holds[0].preset == preset:  # joining is never gated
            return self.take(preset, owner, ttl, client)
        place = find(self.line, owner)
        if place:
            self.hear(place, ttl if place.preset == preset else None)
        if wait and (place is None or place.preset != preset):
            place = Row(owner, preset, ttl, min(ttl, self.place_ttl), client)
            self.line = [r for r in self.line if r.owner != owner] + [place]
        first = not self.line or (self.line[0].owner, self.line[0].preset) == (owner, preset)
        if first and (not self.holds or (wait and all(r.owner == owner for r in self.holds))):
            return self.take(preset, owner, ttl, client)
        return ("queued", self.line.index(place) + 1) if wait else ("refused",)

    def renew(self, owner, ttl, token):
        hold, place = find(self.holds, owner), find(self.line, owner)
        if self.stale(token, owner) or not (hold or place):
            return ("stale",) if self.stale(token, owner) else ("missing",)
        if place:
            self.hear(place, ttl)
        if place and not self.holds and self.line[0] is place:
            return self.take(place.preset, owner, place.ttl, place.client)
        return self.take(hold.preset, owner, ttl or hold.ttl, "") if hold else ("queued", self.line.index(place) + 1)

    def unlock(self, owner, caller, token, free_for_all, leave):
        if self.stale(token, None):
            return ("stale",)
        caller = next((r.owner for r in self.holds if r.token == token), caller)
        is_owner = caller is not None and any(caller in (r.owner, r.client) for r in self.holds)
        theirs = {r.client for r in self.holds + self.line if r.owner == owner} - {"", caller}
        if not (free_for_all or is_owner or (caller in (None, owner) or not theirs if owner else not self.holds)):
            return ("denied",)
        off = [r for r in self.holds if owner in (None, r.owner) and not leave]
        out = [r for r in self.line if r.owner == owner]
        self.holds, self.line = [r for r in self.holds if r not in off], [r for r in self.line if r not in out]
        return ("unlocked", [r.owner for r in off], [r.owner for r in out])

    def request(self, want, owner, token):
        """A request comes; what it began refreshes the lock."""
        if self.stale(token, owner):
            return ("stale",)
        owner = next((r.owner for r in self.holds if r.token == token), owner)
        if self.holds and self.holds[0].preset != want:
            return ("policed",)
        head = self.line[0] if self.line and not self.holds else None
        wins = head and (head.owner, head.preset) == (owner, want)
        said = self.take(want, head.owner, head.ttl, head.client) if wins else ("runs",)
        for row in [r for r in self.holds if owner in (None, r.owner)] + [r for r in self.line if r.owner == owner]:
            self.hear(row)
        return said


def find(rows, owner):
    return next((r for r in rows if r.owner == owner), None)
