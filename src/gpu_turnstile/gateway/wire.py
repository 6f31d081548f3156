"""HTTP/1.1 on the wire: heads and where bodies end. No I/O, no policy; bytes in, facts out.

llhttp (httptools, in its strict mode) is the authority on heads: what it does not accept is `Malformed`, and so is
the little it accepts that another parser could frame differently. Bodies are not parsed into events: a framing object
only says how many of the given bytes belong to the body, so that they can be relayed as they came. A framing is at
least as strict as llhttp: digits only, CRLF only, bounded lines.

Invariant: what is forwarded is framed by exactly one of Content-Length, `chunked`, or the end of the connection, and
every receiver that follows RFC 9112 finds the same end that this file found.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, Protocol

import httptools

from gpu_turnstile import __version__

HEAD_END: Final = b"\r\n\r\n"
MAX_CHUNK_LINE: Final = 4096  # a chunk's size with its extensions, or one trailer field
MAX_TRAILER: Final = 16384
BAD_SIZE: Final = "the size of a chunk is not valid"
BAD_TRAILER: Final = "a trailer field is not valid"
STREAM_TYPES: Final = (b"text/event-stream", b"application/x-ndjson")
SERVER: Final = f"gpu-turnstile/{__version__}".encode()

_HOP_BY_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade", b"content-length")
)
_USUAL: Final = frozenset((b"keep-alive", b"close", b"upgrade", b""))
# Fields the gate went by: a client cannot have them taken off on the way to the engine (Connection: host).
_UNDERSTOOD: Final = frozenset((b"host", b"content-type", b"content-encoding", b"authorization", b"x-api-key"))
_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_OPEN_QUOTE: Final = rb'"(?:[\t\x20-\x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*'
_EXTENSION: Final = rb';%s(?:=(?:%s|%s"))?' % (_TOKEN, _TOKEN, _OPEN_QUOTE)  # no blanks in it: others refuse them
_BEGUN_EXTENSION: Final = rb";(?:%s(?:=(?:%s|%s\\?)?)?)?" % (_TOKEN, _TOKEN, _OPEN_QUOTE)
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:%s)*\r\n" % _EXTENSION)
_BEGUN_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,15}(?:%s)*(?:%s)?\r?" % (_EXTENSION, _BEGUN_EXTENSION))
_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+;=%-]*|\[[0-9A-Fa-f:.]+\])(?::([0-9]{0,5}))?")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]+)(.*)", re.IGNORECASE | re.DOTALL)
_REASON: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_FIELD: Final = re.compile(rb"(%s):[\t\x20-\x7e\x80-\xff]*\r\n" % _TOKEN)
_BEGUN_FIELD: Final = re.compile(rb"\r|%s(?::[\t\x20-\x7e\x80-\xff]*\r?)?" % _TOKEN)
_NO_TRAILERS: Final = frozenset((b"content-length", b"transfer-encoding", b"host"))  # RFC 9110, 6.5.1

_OUR_FIELDS: Final = frozenset((b"x-turnstile-lock", b"x-turnstile-owner"))
_WHO_FIELDS: Final = frozenset((b"x-turnstile-client", b"x-turnstile-peer"))
_KEY_FIELDS: Final = frozenset((b"authorization", b"x-api-key"))

Header = tuple[bytes, bytes]


class Malformed(Exception):
    """Bytes that are not HTTP as this gate speaks it. `status` is what a client is told."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


class RequestHead:
    """A request's head. `headers` are as sent, in order and spelling; the rest is what the gate had to understand."""

    __slots__ = (
        "authorization",
        "capability",
        "chunked",
        "client",
        "connection",
        "content_type",
        "encoding",
        "expect",
        "headers",
        "host",
        "http11",
        "keep_alive",
        "keyed",
        "length",
        "lock_owner",
        "lock_token",
        "method",
        "origin",
        "path",
        "preflight",
        "target",
        "upgrade",
        "user_agent",
    )

    method: str
    path: str
    http11: bool
    keep_alive: bool

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[Header] = []
        self.length: int | None = None
        self.chunked = False
        self.upgrade = b""
        self.connection = b""
        self.expect = b""
        self.host: bytes | None = None
        self.origin = b""
        self.content_type = b""
        self.encoding = b""
        self.client = b""
        self.capability = b""
        self.authorization = b""
        self.user_agent = b""
        self.preflight = b""
        self.lock_token = b""
        self.lock_owner = b""
        self.keyed = False  # it showed a key of the gate's, which is no business of the engine's

    # httptools calls these
    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    @property
    def has_body(self) -> bool:
        return self.chunked or bool(self.length)


def parse_request(data: bytes, max_headers: int) -> RequestHead:
    """Parse a whole head, with its empty line. Raises Malformed."""
    head = RequestHead()
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise Malformed(f"the request is not valid HTTP: {error}") from None
    end = data.find(b"\r\n")
    version = data[end - 9 : end]
    if version != b" HTTP/1.1" and version != b" HTTP/1.0":
        raise Malformed("only HTTP/1.1 and HTTP/1.0 are spoken here", 505)
    head.http11 = version == b" HTTP/1.1"
    head.method = parser.get_method().decode("ascii")
    head.keep_alive = parser.should_keep_alive()
    if len(head.headers) > max_headers:
        raise Malformed(f"{len(head.headers)} header fields, more than the {max_headers} allowed", 431)
    for name, value in head.headers:
        read = _REQUEST_FIELDS.get(name.lower())
        if read is not None:
            read(head, value.strip(b" \t"))
    if head.host is None and head.http11:
        raise Malformed("the field Host is missing")
    if head.method == "CONNECT":
        raise Malformed("CONNECT is not spoken here", 501)
    if not head.target.startswith(b"/"):
        _to_origin_form(head)
    head.path = head.target.partition(b"?")[0].decode("ascii")
    return head


def _to_origin_form(head: RequestHead) -> None:
    """A target that names the server too goes on as a path, and what it names is the Host (RFC 9112, 3.2.2)."""
    if head.target == b"*" and head.method == "OPTIONS":
        return
    match = _ABSOLUTE.fullmatch(head.target)
    if match is None or not _is_host(match[1]):
        raise Malformed("the target of the request is neither a path nor an http URL")
    authority, path = match.groups()
    if head.host is not None and head.host.lower() != authority.lower():
        raise Malformed("the target of the request names another server than the field Host")
    head.target = path if path.startswith(b"/") else b"/" + path
    head.headers = [(n, authority if n.lower() == b"host" else v) for n, v in head.headers]
    if head.host is None:  # HTTP/1.0 need not say it; what goes on does
        head.headers.append((b"Host", authority))
    head.host = authority


@lru_cache(maxsize=256)
def _is_host(value: bytes) -> bool:
    match = _HOST.fullmatch(value)
    return match is not None and int(match[1] or 0) < 65536


def _host(head: RequestHead, value: bytes) -> None:
    if head.host is not None:
        raise Malformed("more than one field Host")
    if not _is_host(value):
        raise Malformed(f"the Host {value[:100].decode('latin-1')!r} is not the name of a server")
    head.host = value


def _length(head: RequestHead, value: bytes) -> None:
    head.length = int(value)


def _transfer(head: RequestHead, value: bytes) -> None:
    if value.lower() != b"chunked" or not head.http11:
        raise Malformed(f"the Transfer-Encoding {value.decode('latin-1')!r} is not spoken here, only chunked", 501)
    head.chunked = True


def _connection(head: RequestHead, value: bytes) -> None:
    head.connection = head.connection + b"," + value if head.connection else value


def _upgrade(head: RequestHead, value: bytes) -> None:
    head.upgrade = head.upgrade + b"," + value if head.upgrade else value


def _expect(head: RequestHead, value: bytes) -> None:
    head.expect = value.lower()


def _origin(head: RequestHead, value: bytes) -> None:
    head.origin = value


def _content_type(head: RequestHead, value: bytes) -> None:
    head.content_type = value


def _encoding(head: RequestHead, value: bytes) -> None:
    head.encoding = head.encoding + b"," + value if head.encoding else value


def _client(head: RequestHead, value: bytes) -> None:
    head.client = value


def _lock_owner(head: RequestHead, value: bytes) -> None:
    head.lock_owner = value


def _lock_token(head: RequestHead, value: bytes) -> None:
    head.lock_token = value


def _capability(head: RequestHead, value: bytes) -> None:
    head.capability = value


def _authorization(head: RequestHead, value: bytes) -> None:
    head.authorization = value


def _api_key(head: RequestHead, value: bytes) -> None:
    head.authorization = head.authorization or b"Bearer " + value


def _preflight(head: RequestHead, value: bytes) -> None:
    head.preflight = value


def _user_agent(head: RequestHead, value: bytes) -> None:
    head.user_agent = value


_REQUEST_FIELDS: Final = {
    b"host": _host,
    b"content-length": _length,
    b"transfer-encoding": _transfer,
    b"connection": _connection,
    b"upgrade": _upgrade,
    b"expect": _expect,
    b"origin": _origin,
    b"content-type": _content_type,
    b"content-encoding": _encoding,
    b"x-turnstile-client": _client,
    b"x-turnstile-lock": _lock_token,
    b"x-turnstile-owner": _lock_owner,
    b"x-llm-capability": _capability,
    b"authorization": _authorization,
    b"x-api-key": _api_key,
    b"user-agent": _user_agent,
    b"access-control-request-method": _preflight,
}


class ResponseHead:
    """A response's head. `until_close`: its body ends with the connection."""

    __slots__ = (
        "chunked",
        "connection",
        "content_type",
        "headers",
        "http11",
        "keep_alive",
        "length",
        "reason",
        "status",
    )

    status: int
    http11: bool
    keep_alive: bool

    def __init__(self) -> None:
        self.reason = b""
        self.headers: list[Header] = []
        self.length: int | None = None
        self.chunked = False
        self.connection = b""
        self.content_type = b""

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))


def parse_response(data: bytes) -> ResponseHead:
    """Parse a whole head, with its empty line. Raises Malformed."""
    head = ResponseHead()
    parser = httptools.HttpResponseParser(head)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise Malformed(f"the engine's answer is not valid HTTP: {error}", 502) from None
    head.status = parser.get_status_code()
    version = data[:9]
    valid = version == b"HTTP/1.1 " or version == b"HTTP/1.0 "
    if not valid or head.status < 100 or not _REASON.fullmatch(head.reason):
        raise Malformed("the engine's answer has no valid status line", 502)
    head.http11 = version == b"HTTP/1.1 "
    for name, value in head.headers:
        lower = name.lower()
        if lower == b"content-length":
            head.length = int(value)
        elif lower == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise Malformed(f"the engine's Transfer-Encoding {value.decode('latin-1')!r} is not known", 502)
            head.chunked = True
        elif lower == b"connection":
            head.connection = head.connection + b"," + value if head.connection else value
        elif lower == b"content-type":
            head.content_type = value
    said = tokens(head.connection) if head.connection else frozenset()
    head.keep_alive = b"close" not in said if head.http11 else b"keep-alive" in said
    return head


# ----------------------------------------------------------------------------------------- writing heads


def tokens(value: bytes) -> frozenset[bytes]:
    """The members of a comma list, in small letters."""
    return frozenset(token.strip().lower() for token in value.split(b","))


def _dropped(connection: bytes) -> frozenset[bytes]:
    """The fields that end at this hop: the standard ones and those that Connection names."""
    if not connection:
        return _HOP_BY_HOP
    named = tokens(connection)
    return _HOP_BY_HOP if named <= _USUAL else _HOP_BY_HOP | (named - _UNDERSTOOD)


def introduce(head: RequestHead, peer: str) -> None:
    """Say in a request to the control API who asks and where from, as the gate knows it, whatever the client wrote.

    Which lock it means, the control API reads itself.
    """
    head.headers = [(name, value) for name, value in head.headers if name.lower() not in _WHO_FIELDS]
    if head.client:
        head.headers.append((b"X-Turnstile-Client", head.client))
    head.headers.append((b"X-Turnstile-Peer", peer.encode("latin-1", "replace")))
    head.lock_token = head.lock_owner = b""


def request_bytes(head: RequestHead, target: bytes, length: int | None, chunked: bool) -> bytes:
    """The head for the engine, with exactly one framing; `length` None and not `chunked` = no body."""
    dropped = _dropped(head.connection)
    if head.keyed:
        dropped |= _KEY_FIELDS
    if head.lock_token or head.lock_owner:
        dropped |= _OUR_FIELDS
    lines = [b"%s %s HTTP/1.1" % (head.method.encode(), target)]
    framed = False
    for name, value in head.headers:
        lower = name.lower()
        if lower not in dropped:
            if lower != b"expect":
                lines.append(name + b": " + value)
        elif lower == b"content-length" or lower == b"transfer-encoding":
            if length is not None:
                lines.append((name if lower == b"content-length" else b"Content-Length") + b": %d" % length)
                framed = True
            elif chunked:
                lines.append(name + b": chunked")
                framed = True
    if head.host is None:
        lines.append(b"Host: ")
    if not framed and length is not None:
        lines.append(b"Content-Length: %d" % length)
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def upgrade_bytes(head: RequestHead, target: bytes) -> bytes:
    """The head of a request that asks for another protocol: the engine itself answers it."""
    dropped = _dropped(head.connection) - {b"upgrade", b"content-length", b"transfer-encoding"}
    if head.keyed:
        dropped |= _KEY_FIELDS
    lines = [b"%s %s HTTP/1.1" % (head.method.encode(), target)]
    lines += [name + b": " + value for name, value in head.headers if name.lower() not in dropped]
    lines += [b"Connection: Upgrade", b"\r\n"]
    return b"\r\n".join(lines)


def response_bytes(head: ResponseHead, http11: bool, keep_alive: bool, chunked: bool, length: int | None) -> bytes:
    """The head for the client. `chunked`: the body goes on in chunks (never to an HTTP/1.0 client)."""
    dropped = _dropped(head.connection)
    lines = [b"HTTP/1.1 %d %s" % (head.status, head.reason)]
    cors, streams = False, head.content_type.lower().startswith(STREAM_TYPES)
    for name, value in head.headers:
        lower = name.lower()
        if lower not in dropped:
            if lower == b"access-control-allow-origin":
                if cors or not value:
                    continue  # browsers refuse an empty or a second one
                cors = True
            elif lower == b"x-accel-buffering":
                streams = False
            lines.append(name + b": " + value)
        elif lower == b"content-length":
            if length is not None:
                lines.append(name + b": " + value)
        elif lower == b"transfer-encoding" and chunked:
            lines.append(name + b": chunked")
            chunked = False  # an engine may say it twice; what is passed on says it once
    if streams:
        lines.append(b"X-Accel-Buffering: no")  # else an nginx in front of the gate gathers the stream into bursts
    if not keep_alive:
        lines.append(b"Connection: close")
    elif not http11:
        lines.append(b"Connection: keep-alive")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def switching_bytes(head: ResponseHead) -> bytes:
    """The head of a 101, or of another answer to a request for an upgrade, as the engine sent it."""
    lines = [b"HTTP/1.1 %d %s" % (head.status, head.reason)]
    lines += [name + b": " + value for name, value in head.headers]
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


# ----------------------------------------------------------------------------------------------- bodies


class Framing(Protocol):
    """Where a body ends. `take` says how many of the bytes belong to it; `done` once its end was seen."""

    done: bool

    def take(self, data: bytes) -> int: ...


class Length:
    __slots__ = ("done", "left")

    def __init__(self, length: int) -> None:
        self.left = length
        self.done = length == 0

    def take(self, data: bytes) -> int:
        size = len(data)
        if size < self.left:
            self.left -= size
            return size
        taken, self.left, self.done = self.left, 0, True
        return taken


class UntilClose:
    """Only the end of the connection ends it; the relay sets `done`."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False

    def take(self, data: bytes) -> int:
        return len(data)


SHORT_LINE: Final = 10  # bytes of a size line that is worth remembering
MOST_LENGTHS: Final = 4096
_lengths: Final[dict[bytes, int]] = {}  # size lines that were found valid -> bytes of the chunk with its CRLF


class Chunked:
    """The chunked coding. `payload`, if given, collects the decoded bytes. Raises Malformed.

    `boundary` is true where a chunk could be put in: after the last byte of a chunk, before the next size line.
    """

    __slots__ = ("_line", "_seen", "_seen_end", "_skip", "_trailer", "done", "payload")

    def __init__(self, payload: list[bytes] | None = None) -> None:
        self.payload = payload
        self.done = False
        self._skip = 0  # bytes of the running chunk still to come, its CRLF included
        self._line = b""  # the beginning of a line whose end has not come yet
        self._trailer = -1  # bytes of trailer fields so far; -1 = the last chunk has not come
        self._seen = b""  # the last piece that held payload …
        self._seen_end = 0  # … and where in it the payload ended

    @property
    def boundary(self) -> bool:
        return not self._skip and not self._line and self._trailer < 0

    @property
    def tail(self) -> bytes:
        """The last bytes of the payload so far, four at most."""
        return self._seen[max(0, self._seen_end - 4) : self._seen_end]

    def take(self, data: bytes) -> int:
        position, size = 0, len(data)
        if not self._skip and not self._line and self.payload is None and self._trailer < 0:
            # One flush of an engine is one chunk and comes in one piece: the hot path of every stream.
            end = data.find(b"\n", 0, SHORT_LINE) + 1
            length = _lengths.get(data[:end])
            if length is not None and end + length == size and data.endswith(b"\r\n") and length > 5:
                self._seen, self._seen_end = data, size - 2
                return size
        while position < size:
            if self._skip:
                position = self._pass(data, position, size)
                continue
            end = data.find(b"\n", position) + 1
            if not end:
                self._line += data[position:]
                if len(self._line) > MAX_CHUNK_LINE:
                    raise Malformed("a line of the chunked coding is too long")
                # It is passed on before its end is seen, so it must be the beginning of a line that is valid: for a
                # lenient reader a bare CR would end it, and what follows be a request.
                if self._trailer < 0 and not _BEGUN_SIZE.fullmatch(self._line):
                    raise Malformed(BAD_SIZE)
                if self._trailer >= 0 and not _BEGUN_FIELD.fullmatch(self._line):
                    raise Malformed(BAD_TRAILER)
                return size
            line = data[position:end]
            if self._line:
                line, self._line = self._line + line, b""
            if len(line) > MAX_CHUNK_LINE:
                raise Malformed("a line of the chunked coding is too long")
            position = end
            if self._trailer < 0:
                self._begin(line)
            elif line == b"\r\n":
                self.done = True
                return position
            else:
                self._field(line)
        return position

    def _begin(self, line: bytes) -> None:
        match = _SIZE.fullmatch(line)
        if match is None:
            raise Malformed(BAD_SIZE)
        length = int(match[1], 16)
        if length:
            self._skip = length + 2
            if len(line) <= SHORT_LINE:
                if len(_lengths) >= MOST_LENGTHS:
                    _lengths.clear()
                _lengths[line] = length + 2
        else:
            self._trailer = 0

    def _pass(self, data: bytes, position: int, size: int) -> int:
        """Go over the running chunk's bytes and check that CRLF ends it."""
        end = min(position + self._skip, size)
        body = self._skip - 2  # how many of the bytes still to come are payload
        if body > 0:
            self._note(data, position, min(position + body, end))
        taken = end - position
        if taken > body:
            for offset in range(max(body, 0), taken):
                if data[position + offset] != (13, 10)[offset - body]:
                    raise Malformed("a chunk is longer than its size says")
        self._skip -= taken
        return end

    def _note(self, data: bytes, start: int, stop: int) -> None:
        """Payload lies at data[start:stop]: remember its end, and collect it if that is wanted."""
        if stop - start < 4:
            self._seen = self.tail + data[start:stop]
            self._seen_end = len(self._seen)
        else:
            self._seen, self._seen_end = data, stop
        if self.payload is not None:
            self.payload.append(data[start:stop])

    def _field(self, line: bytes) -> None:
        self._trailer += len(line)
        match = _FIELD.fullmatch(line)
        if self._trailer > MAX_TRAILER or match is None or match[1].lower() in _NO_TRAILERS:
            raise Malformed(BAD_TRAILER)


LAST_CHUNK: Final = b"0\r\n\r\n"
NO_BODY: Final = Length(0)  # has no state that changes: it may be shared


def chunk(data: bytes) -> bytes:
    """One chunk of the chunked coding; `data` is not empty."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def request_framing(head: RequestHead, payload: list[bytes] | None = None) -> Length | Chunked:
    return Chunked(payload) if head.chunked else Length(head.length or 0)


def response_framing(head: ResponseHead, method: str) -> Length | Chunked | UntilClose:
    """RFC 9112, 6.3: how an answer to `method` ends."""
    if method == "HEAD" or head.status in (204, 304) or head.status < 200:
        return Length(0)
    if head.chunked:
        return Chunked()
    if head.length is not None:
        return Length(head.length)
    return UntilClose()
