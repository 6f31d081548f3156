"""Who may come in at all: keys, and the lists that keep foreign web pages out (DNS rebinding, cross-site requests).

With empty lists and no keys it is not even asked. Health checks need no key.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from gpu_turnstile.gateway.errors import Problem
from gpu_turnstile.gateway.paths import Place
from gpu_turnstile.gateway.wire import RequestHead

OPEN_PATHS = frozenset(("/healthz", "/health"))


class Guard:
    def __init__(self, hosts: tuple[str, ...], origins: tuple[str, ...], keys: Mapping[str, str]) -> None:
        """`hosts` and `origins` empty = any; `keys` maps a key to the name of its client, empty = open to all."""
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)
        self._origins = frozenset(origin.lower() for origin in origins)
        self._keys = {key.encode(): name.encode() for key, name in keys.items()}
        self.active = bool(hosts or origins or keys)

    def refuses(self, head: RequestHead, place: Place) -> Problem | None:
        """Why not; None = come in. A key of ours gives the client its name and goes no further."""
        if self._hosts and not self._knows_host(head.host or b""):
            name = (head.host or b"").decode("latin-1")
            return Problem("host_not_allowed", f"the Host {name!r} is not in TURNSTILE_ALLOWED_HOSTS", 421)
        if self._origins and head.origin and head.origin.lower().decode("latin-1") not in self._origins:
            name = head.origin.decode("latin-1")
            return Problem("origin_not_allowed", f"the Origin {name!r} is not in TURNSTILE_ALLOWED_ORIGINS", 403)
        if not self._keys or head.path in OPEN_PATHS or (head.method == "OPTIONS" and head.preflight):
            return None
        return self._check_key(head)

    def _knows_host(self, host: bytes) -> bool:
        text = host.decode("latin-1").lower()
        return text in self._hosts or (urlsplit("//" + text).hostname or "") in self._hosts

    def _check_key(self, head: RequestHead) -> Problem | None:
        scheme, _, shown = head.authorization.partition(b" ")
        if scheme.lower() == b"bearer":
            for key, name in self._keys.items():
                if hmac.compare_digest(key, shown.strip()):
                    head.client, head.keyed = name, True
                    return None
        message = "a key is needed: send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY' (TURNSTILE_API_KEYS)"
        return Problem("unauthorized", message, 401)
