"""Bounded JSON calls to an engine's API. What goes wrong comes back as a value: nothing here raises.

Every call has one limit for the whole of it (connecting, waiting, reading: a server that drips bytes does not get
more) and one for the size of the answer. A GET whose connection breaks is sent once more, because a kept-alive
connection may have been closed by the other side a moment ago; a POST is never repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import TypeVar

import httpx
import msgspec

from gpu_turnstile.engines.base import Health, Probe, Timing

T = TypeVar("T")

ANSWER_LIMIT = 64 * 1024 * 1024  # bytes: a ComfyUI history entry repeats its prompt, images and all
LOADING_STATUS = frozenset({429, 502, 503, 504})  # "not now", from the server or from what stands in front of it


class Failure(StrEnum):
    UNREACHABLE = "unreachable"  # no connection: nobody heard the question
    TIMEOUT = "timeout"  # connected, and no whole answer in time
    BROKEN = "broken"  # the connection or the answer broke


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer (`status`) or the reason there is none (`failure` and `error`).

    `connection` names the TCP connection it came by: two replies on one connection come from one server process.
    `refused`: the machine is there and says that nobody listens at this address.
    """

    status: int | None = None
    body: bytes = b""
    failure: Failure | None = None
    error: str = ""
    connection: str | None = None
    date: datetime | None = None
    refused: bool = False

    @property
    def ok(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def reason(self) -> str:
        """One line: why this is no good answer."""
        if self.status is None:
            return self.error
        said = " ".join(self.body[:200].decode(errors="replace").split())
        return f"answered {self.status}: {said}" if said else f"answered {self.status}"

    def read(self, shape: type[T]) -> T | None:
        """The body as `shape` (fields it does not name are skipped unread); None if it is not that."""
        if not self.ok:
            return None
        try:
            return msgspec.json.decode(self.body, type=shape)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def was_cut_short(self, wanted: float, got: float) -> bool:
        """Not answered, but not given its `wanted` seconds either: this says less than the look before it."""
        return self.failure is Failure.TIMEOUT and got < wanted

    def server_time(self) -> datetime:
        """The clock of the server's machine (its Date header, whole seconds), else ours."""
        return self.date or datetime.now(UTC)


async def call(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    body: object | None = None,
    timeout: float,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """One call, over in `timeout` seconds. Connecting gets half of them, to tell 'nobody there' from 'hangs'."""
    try:
        async with asyncio.timeout(timeout):
            reply = await _attempt(http, method, url, body, timeout, headers)
            if reply.failure is Failure.BROKEN and method == "GET":
                reply = await _attempt(http, method, url, body, timeout, headers)
            return reply
    except TimeoutError:
        return Reply(failure=Failure.TIMEOUT, error=f"no answer within {timeout:.3g} s")


async def _attempt(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    body: object | None,
    timeout: float,
    headers: Mapping[str, str] | None,
) -> Reply:
    limits = httpx.Timeout(timeout, connect=timeout / 2)
    try:
        async with http.stream(method, url, json=body, timeout=limits, headers=headers) as response:
            return await _read(response)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        said = f"cannot connect: {_text(error)}"
        return Reply(failure=Failure.UNREACHABLE, error=said, refused=_was_refused(error))
    except httpx.TimeoutException:
        return Reply(failure=Failure.TIMEOUT, error=f"no answer within {timeout:.3g} s")
    except TimeoutError:
        raise  # the limit of the whole call
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
        return Reply(failure=Failure.BROKEN, error=f"the connection broke: {_text(error)}")


async def _read(response: httpx.Response) -> Reply:
    body, connection = bytearray(), _connection(response)  # a connection that is closed after the body has no address
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > ANSWER_LIMIT:
            return Reply(failure=Failure.BROKEN, error=f"its answer is larger than {ANSWER_LIMIT} bytes")
    return Reply(
        status=response.status_code,
        body=bytes(body),
        connection=connection,
        date=_date(response.headers.get("date")),
    )


def _connection(response: httpx.Response) -> str | None:
    stream = response.extensions.get("network_stream")
    address = stream.get_extra_info("client_addr") if stream is not None else None
    return None if address is None else str(address)


def _date(header: str | None) -> datetime | None:
    if header is None:
        return None
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def _was_refused(error: BaseException | None) -> bool:
    """Whether what lies under an error of connecting is a refusal, at every address of the name."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        if isinstance(error, BaseExceptionGroup):
            return all(map(_was_refused, error.exceptions))
        error = error.__cause__ or error.__context__
    return error is not None


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def probe_of(reply: Reply) -> Probe:
    """The usual reading of a health answer: 2xx ready, 'not now' loading, other statuses broken."""
    if reply.ok:
        return Probe(Health.READY)
    if reply.failure is not None:
        return Probe(Health.SILENT if reply.failure is Failure.TIMEOUT else Health.DOWN, reply.reason)
    if reply.status in LOADING_STATUS:
        return Probe(Health.LOADING, reply.reason)
    return Probe(Health.BROKEN, reply.reason)


class HttpEngine:
    """The part every engine shares: where it is, how to reach it, how long to wait."""

    def __init__(self, url: str, http: httpx.AsyncClient, timing: Timing) -> None:
        self.url = url.rstrip("/")
        self.http = http
        self.timing = timing

    async def get(self, path: str, timeout: float | None = None) -> Reply:
        limit = self.timing.call_timeout if timeout is None else timeout
        return await call(self.http, "GET", self.url + path, timeout=limit)

    async def post(self, path: str, body: object, timeout: float | None = None) -> Reply:
        limit = self.timing.call_timeout if timeout is None else timeout
        return await call(self.http, "POST", self.url + path, body=body, timeout=limit)
