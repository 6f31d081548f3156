"""The commands' way to a running gate: a few calls over HTTP, and one sentence when it is not there."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

import httpx

from gpu_turnstile.cli import places
from gpu_turnstile.cli.say import FAILED, NO_GATE, fail

KEY_VARIABLE = "TURNSTILE_API_KEY"  # not an option: others can read command lines
ANSWER = 10.0  # seconds a read may take
CONNECT = 3.0


class Gate:
    """`url` is what was given on the command line or in TURNSTILE_URL; None = the default."""

    def __init__(self, url: str | None) -> None:
        self.url = places.gate_url(url)
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(trust_env=False, headers=headers, timeout=httpx.Timeout(ANSWER, connect=CONNECT))

    def get(self, path: str) -> Any:
        return self._call("GET", path, None, ANSWER)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Waits as long as the change takes."""
        return self._call("POST", path, body or {}, None)

    def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None) -> Any:
        try:
            limits = httpx.Timeout(timeout, connect=CONNECT)
            reply = self._http.request(method, self.url + path, json=body, timeout=limits)
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            self._absent(problem)
        return self._read(reply)

    def _read(self, reply: httpx.Response) -> Any:
        self._check_identity(reply)
        try:
            found = reply.json()
        except ValueError:
            fail(f"{self.url} answered {reply.status_code} with something that is not JSON", FAILED)
        if not reply.is_success:
            said = found.get("message") if isinstance(found, dict) else None
            fail(str(said or f"{self.url} answered {reply.status_code}"))
        return found

    def events(self, since: int | None, follow: bool) -> Generator[dict[str, Any]]:
        """What the feed says, one dict an event; `kind` is `lost` where the gate was faster than we were."""
        query: dict[str, Any] = {"follow": str(follow).lower()}
        if since is not None:
            query["since"] = since
        limits = httpx.Timeout(60.0, connect=CONNECT)  # it says something every 15 s
        try:
            with self._http.stream("GET", self.url + "/events", params=query, timeout=limits) as reply:
                if not reply.is_success:
                    reply.read()
                    self._read(reply)
                self._check_identity(reply)
                yield from _parse(reply.iter_lines())
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            self._absent(problem)

    def _check_identity(self, reply: httpx.Response) -> None:
        """The port may well belong to the engine the gate was meant to stand in front of."""
        ours = reply.headers.get("server", "").startswith("gpu-turnstile") or "x-turnstile-error" in reply.headers
        if not ours:
            fail(f"something answers at {self.url}, but it is no gpu-turnstile; see --url", NO_GATE)

    def _absent(self, problem: Exception) -> NoReturn:
        if not isinstance(problem, (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL)):
            fail(f"the gate at {self.url} broke off: {problem or type(problem).__name__}", NO_GATE)
        fail(f"no gate answers at {self.url} ({problem}); start it with `turnstile serve`, or see --url", NO_GATE)


def _parse(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    kind = ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            found = json.loads(value)
            yield found if "kind" in found else {"kind": kind, "fields": found}
