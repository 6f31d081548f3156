"""How other parsers frame the same bytes: h11, and llhttp (httptools) in its strict mode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import h11
import httptools


@dataclass(frozen=True)
class Message:
    """`end`: how many of the given bytes it took, None when it is not complete."""

    method: str
    target: bytes
    body: bytes
    complete: bool
    end: int | None = None


class Refused(Exception):
    """The parser does not accept these bytes."""


class _Listener:
    def __init__(self) -> None:
        self.urls: list[bytes] = []
        self.body = b""
        self.ends = 0

    def on_url(self, url: bytes) -> None:
        self.urls.append(url)

    def on_body(self, data: bytes) -> None:
        if not self.ends:
            self.body += data

    def on_message_complete(self) -> None:
        self.ends += 1


def llhttp_request(data: bytes) -> Message:
    """The first request in `data`, fed byte by byte so that its end is known to the byte."""
    listener: Any = _Listener()
    parser = httptools.HttpRequestParser(listener)
    try:
        for position in range(len(data)):
            parser.feed_data(data[position : position + 1])
            if listener.ends:
                target = b"".join(listener.urls)
                return Message(parser.get_method().decode(), target, listener.body, True, position + 1)
    except httptools.HttpParserUpgrade:
        return _as_if_no_upgrade(data, Message(parser.get_method().decode(), b"".join(listener.urls), b"", True))
    except httptools.HttpParserError as error:
        raise Refused(str(error)) from None
    return Message("", b"", listener.body, False)


def _as_if_no_upgrade(data: bytes, found: Message) -> Message:
    """llhttp stops at the head of a request for another protocol; one that does not get it has a body, too."""
    head, end, rest = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith(b"upgrade:")]
    if len(kept) == len(lines):
        return found  # CONNECT
    message = llhttp_request(b"\r\n".join(kept) + end + rest)
    taken = sum(len(line) + 2 for line in lines) - sum(len(line) + 2 for line in kept)
    return message if message.end is None else replace(message, end=message.end + taken)


def h11_request(data: bytes) -> Message:
    """The first request in `data`."""
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    parser.receive_data(data)
    method, target, body = "", b"", b""
    try:
        while True:
            event = parser.next_event()
            if isinstance(event, h11.Request):
                method, target = event.method.decode(), event.target
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return Message(method, target, body, True, len(data) - len(parser.trailing_data[0]))
            else:
                return Message(method, target, body, False)
    except h11.RemoteProtocolError as error:
        raise Refused(str(error)) from None


def h11_response(data: bytes, method: str = "GET", closed: bool = False) -> Message:
    """The answer to `method` in `data`; `closed`: the connection ended after it."""
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(data)
    if closed:
        parser.receive_data(b"")
    body = b""
    try:
        while True:
            event = parser.next_event()
            if isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return Message(method, b"", body, True, len(data) - len(parser.trailing_data[0]))
            elif event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return Message(method, b"", body, False)
    except h11.RemoteProtocolError as error:
        raise Refused(str(error)) from None


def llhttp_response(data: bytes) -> Message:
    """The first answer in `data` (not one to HEAD), byte by byte."""
    listener: Any = _Listener()
    parser = httptools.HttpResponseParser(listener)
    try:
        for position in range(len(data)):
            parser.feed_data(data[position : position + 1])
            if listener.ends:
                return Message("", b"", listener.body, True, position + 1)
    except httptools.HttpParserUpgrade:
        return Message("", b"", b"", True)
    except httptools.HttpParserError as error:
        raise Refused(str(error)) from None
    return Message("", b"", listener.body, False)
