"""Heads and framings against two other parsers: where this one accepts, they find the same end and the same bytes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import uvloop
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpu_turnstile.gateway import wire
from gpu_turnstile.gateway.wire import Chunked, Length, Malformed, RequestHead, UntilClose
from tests.aio import run_async
from tests.gateway.bench import bench, chunk, get, post
from tests.gateway.fuzz_wire import fuzz
from tests.gateway.oracle import Refused, h11_request, h11_response, llhttp_request, llhttp_response

REQUEST = b"POST / HTTP/1.1\r\nHost: g\r\n"


def parse(data: bytes) -> RequestHead:
    return wire.parse_request(data, 256)


# ------------------------------------------------------------------------------------------ request heads


def with_field(line: bytes) -> bytes:
    return REQUEST + line + b"\r\n\r\n"


REFUSED_FIELDS = {
    "two lengths that agree": b"Content-Length: 5\r\nContent-Length: 5",
    "two lengths that differ": b"Content-Length: 5\r\nContent-Length: 6",
    "two lengths in one line": b"Content-Length: 5, 5",
    "a length with a sign": b"Content-Length: +5",
    "a negative length": b"Content-Length: -5",
    "a length in hex": b"Content-Length: 0x5",
    "a length with an underscore": b"Content-Length: 1_0",
    "a length with a space inside": b"Content-Length: 1 0",
    "an empty length": b"Content-Length:",
    "a length beyond 64 bits": b"Content-Length: 99999999999999999999",
    "a length in other digits": "Content-Length: ５".encode(),
    "a length and chunked": b"Content-Length: 5\r\nTransfer-Encoding: chunked",
    "chunked and a length": b"Transfer-Encoding: chunked\r\nContent-Length: 5",
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "chunked twice in one line": b"Transfer-Encoding: chunked, chunked",
    "chunked and then not": b"Transfer-Encoding: chunked, identity",
    "another transfer coding": b"Transfer-Encoding: gzip, chunked",
    "an unknown transfer coding": b"Transfer-Encoding: xchunked",
    "identity": b"Transfer-Encoding: identity",
    "chunked after a vertical tab": b"Transfer-Encoding: \x0bchunked",
    "chunked in quotes": b'Transfer-Encoding: "chunked"',
    "an empty transfer coding": b"Transfer-Encoding:",
    "a space before the colon": b"Content-Length : 5",
    "a tab before the colon": b"Transfer-Encoding\t: chunked",
    "a folded field": b"A: b\r\n c",
    "a folded length": b"Content-Length:\r\n 5",
    "a folded transfer coding": b"Transfer-Encoding:\r\n\tchunked",
    "a field that begins with space": b" A: b",
    "a bare LF": b"A: b\nContent-Length: 5",
    "a bare CR": b"A: b\rContent-Length: 5",
    "a NUL in a value": b"A: b\x00c",
    "a NUL in a name": b"A\x00: b",
    "a control character in a value": b"A: b\x01c",
    "a DEL in a value": b"A: b\x7fc",
    "a name with a space": b"A b: c",
    "a name in brackets": b"(A): b",
    "a name beyond ASCII": "Contént-Length: 5".encode(),
    "no name": b": b",
    "no colon": b"Content-Length",
    "a second Host": b"Host: h",
}


@pytest.mark.parametrize("field", REFUSED_FIELDS.values(), ids=REFUSED_FIELDS)
def test_a_field_that_could_be_read_in_two_ways_is_refused(field):
    with pytest.raises(Malformed) as caught:
        parse(with_field(field))
    assert caught.value.status in (400, 501)


REFUSED_LINES = {
    "HTTP/2.0": (b"GET / HTTP/2.0", 505),
    "HTTP/0.9": (b"GET / HTTP/0.9", 505),
    "HTTP/1.2": (b"GET / HTTP/1.2", None),
    "HTTP/1.10": (b"GET / HTTP/1.10", 400),
    "HTTP/01.1": (b"GET / HTTP/01.1", 400),
    "lower case http": (b"GET / http/1.1", 400),
    "no version": (b"GET /", None),
    "RTSP": (b"DESCRIBE rtsp://g/ RTSP/1.0", None),
    "RTSP with a method of HTTP": (b"OPTIONS * RTSP/1.0", None),
    "RTSP that reads": (b"GET_PARAMETER / RTSP/1.0", None),
    "ICE": (b"SOURCE / ICE/1.0", None),
    "CONNECT": (b"CONNECT g:80 HTTP/1.1", 501),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0", None),
    "a method in lower case": (b"get / HTTP/1.1", 400),
    "an unknown method": (b"FOO / HTTP/1.1", None),
    "a tab after the method": (b"GET\t/ HTTP/1.1", 400),
    "a space after the version": (b"GET / HTTP/1.1 ", 400),
    "a space in the target": (b"GET /a b HTTP/1.1", 400),
    "a control character in the target": (b"GET /\x01 HTTP/1.1", 400),
    "a NUL in the target": (b"GET /\x00 HTTP/1.1", 400),
    "bytes beyond ASCII in the target": ("GET /é HTTP/1.1".encode(), 400),
    "a relative target": (b"GET foo HTTP/1.1", 400),
    "a target of a query only": (b"GET ?x HTTP/1.1", 400),
    "a star for GET": (b"GET * HTTP/1.1", 400),
    "another scheme": (b"GET ftp://h/x HTTP/1.1", 400),
    "a byte order mark": (b"\xef\xbb\xbfGET / HTTP/1.1", 400),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "a bare LF": (b"GET / HTTP/1.1\nA: b", 400),
}


@pytest.mark.parametrize(("line", "status"), REFUSED_LINES.values(), ids=REFUSED_LINES)
def test_a_request_line_that_is_not_http_1_is_refused(line, status):
    with pytest.raises(Malformed) as caught:
        parse(line + b"\r\nHost: g\r\n\r\n")
    assert caught.value.status in ((400, 501, 505) if status is None else (status,))


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\nHost: g\n\n", b"GET / HTTP/1.1\r\nHost: g\n\r\n"])
def test_a_head_that_ends_with_a_bare_line_feed_is_refused(head):
    with pytest.raises(Malformed):
        parse(head + b"\r\n\r\n")


def test_an_http_1_1_request_needs_one_host_and_an_http_1_0_request_may_have_one():
    with pytest.raises(Malformed):
        parse(b"GET / HTTP/1.1\r\n\r\n")
    assert parse(b"GET / HTTP/1.0\r\n\r\n").host is None
    with pytest.raises(Malformed):
        parse(b"GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n")


@pytest.mark.parametrize("host", ["g/x", "g x", "g@h", "g,h", "[::1", "g:x", "g:99999999", "http://g", "g\\h"])
def test_a_host_that_is_no_host_is_refused(host):
    with pytest.raises(Malformed):
        parse(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())


@pytest.mark.parametrize("host", ["", "g", "g:1", "[::1]", "[::1]:80", "127.0.0.1:11434", "a_b.local", "g."])
def test_a_host_that_is_one_is_taken(host):
    assert parse(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()).host == host.encode()


def test_http_1_0_knows_no_chunked():
    with pytest.raises(Malformed):
        parse(b"POST / HTTP/1.0\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n")


@pytest.mark.parametrize("space", [b"", b" ", b"\t ", b" \t"])
def test_the_space_around_a_value_is_no_part_of_it(space):
    fields = {
        b"Content-Length": b"5",
        b"Content-Type": b"application/json",
        b"Content-Encoding": b"gzip",
        b"Expect": b"100-continue",
        b"Origin": b"http://o",
        b"X-LLM-Capability": b"vision",
        b"X-Turnstile-Client": b"me",
        b"Authorization": b"Bearer k",
        b"Upgrade": b"websocket",
    }
    lines = b"".join(name + b":" + space + value + space + b"\r\n" for name, value in fields.items())
    head = parse(REQUEST + lines + b"\r\n")
    assert head.length == 5
    read = (head.content_type, head.encoding, head.expect, head.origin, head.capability, head.client)
    assert read == (b"application/json", b"gzip", b"100-continue", b"http://o", b"vision", b"me")
    assert (head.authorization, head.upgrade) == (b"Bearer k", b"websocket")


@pytest.mark.parametrize("value", [b"chunked", b"Chunked", b"CHUNKED", b" chunked"])
def test_chunked_is_chunked_in_any_case(value):
    assert parse(with_field(b"Transfer-Encoding:" + value)).chunked


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://g/x/y?z", "/x/y"),
        ("HTTP://g/x", "/x"),
        ("http://g", "/"),
        ("http://g/", "/"),
        ("http://g//x", "//x"),
    ],
)
def test_an_absolute_target_has_the_path_that_follows_its_host(target, path):
    assert parse(f"GET {target} HTTP/1.1\r\nHost: g\r\n\r\n".encode()).path == path


def test_more_fields_than_allowed_are_a_431():
    many = b"".join(b"A%d: b\r\n" % n for n in range(256))
    with pytest.raises(Malformed) as caught:
        parse(REQUEST + many + b"\r\n")
    assert caught.value.status == 431
    assert len(parse(REQUEST + many[: many.index(b"A255")] + b"\r\n").headers) == 256


TOKENS = st.text(alphabet="AZaz09!#$%&'*+-.^_`|~", min_size=1, max_size=12).map(str.encode)
VALUES = st.text(alphabet='az09 \t:;,="é', max_size=20).map(lambda t: t.strip().encode("latin-1"))
FIELDS = st.lists(st.tuples(TOKENS, VALUES), max_size=6)
KNOWN = frozenset(wire._REQUEST_FIELDS) | {b"te", b"trailer", b"keep-alive", b"proxy-connection"}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(FIELDS, st.sampled_from(["/", "/a?b=%20", "/x//y;z"]), st.binary(max_size=30), st.booleans())
def test_what_is_forwarded_is_what_came_and_both_other_parsers_read_it_alike(fields, target, body, chunked):
    assume(not any(name.lower() in KNOWN for name, _ in fields))
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
    framing = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % len(body)
    head = parse(b"POST %s HTTP/1.1\r\nHost: g\r\n%s%s\r\n" % (target.encode(), lines, framing))
    assert head.headers[1:-1] == [(name, value) for name, value in fields]
    sent = wire.request_bytes(head, head.target, len(body), False) + body
    for other in (h11_request(sent), llhttp_request(sent)):
        assert (other.method, other.target, other.body, other.end) == ("POST", target.encode(), body, len(sent))


SEEDS = [
    REQUEST + b"Content-Length: 5\r\n\r\n",
    REQUEST + b"Transfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n",
    b"GET /a?b HTTP/1.0\r\nConnection: keep-alive, x-y\r\nX-Y: z\r\nKeep-Alive: 5\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: g\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\nTE: trailers\r\n\r\n",
    b"POST http://g/x HTTP/1.1\r\nHost: g\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: g\r\nConnection: host, content-length\r\n\r\n",
]
BITS = [b"\r\n", b"\n", b"\r", b" ", b"\t", b"\x00", b":", b",", b"chunked", b"5", b"0", b"Content-Length: 4\r\n"]
BITS += [
    b"Transfer-Encoding: chunked\r\n",
    b"\x0b",
    b"\xff",
    b"HTTP/1.1",
    b"Host: h\r\n",
    b"Connection: host\r\n",
    b"+",
]


def mutated(seed: bytes, rng: random.Random) -> bytes:
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at:at] = rng.choice(BITS)
            case 1:
                del data[at : at + rng.randint(1, 4)]
            case 2 if at < len(data):
                data[at] = rng.randrange(256)
            case _:
                data[at:at] = data[max(0, at - rng.randint(1, 30)) : at]
    return bytes(data)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(SEEDS), st.integers(0, 1 << 32))
def test_a_mutated_head_is_refused_or_forwarded_so_that_others_read_it_alike(seed, number):
    data = mutated(seed, random.Random(number))
    end = data.find(wire.HEAD_END) + 4
    assume(end > 3)
    try:
        head = parse(data[:end])
    except Malformed:
        return
    body = b"12345" if head.has_body else b""
    length = len(body) if head.has_body else head.length
    sent = wire.request_bytes(head, head.target, length, False) + body
    for other in (h11_request(sent), llhttp_request(sent)):
        assert (other.method, other.body, other.end) == (head.method, body, len(sent)), (data, sent)


# ------------------------------------------------------------------------------------------ what is dropped


def fields_sent(*lines: str, length: int | None = None) -> list[bytes]:
    head = parse("\r\n".join(["POST / HTTP/1.1", "Host: g", *lines, "", ""]).encode())
    return wire.request_bytes(head, b"/", length, False).split(b"\r\n")[1:-2]


def test_what_belongs_to_this_hop_goes_no_further():
    lines = ["Connection: close, X-Hop", "X-Hop: 1", "Keep-Alive: 5", "Proxy-Connection: x", "TE: trailers"]
    assert fields_sent(*lines, "Upgrade: h2c", "X-End: 2") == [b"Host: g", b"X-End: 2"]


@pytest.mark.parametrize("named", ["host", "Host, close", "content-length", "content-type", "authorization, host"])
def test_connection_cannot_take_away_what_the_request_needs(named):
    """Naming Host or a framing field in Connection must not leave a request that engines read in another way."""
    sent = fields_sent(f"Connection: {named}", "Content-Length: 2", length=2)
    assert b"Host: g" in sent
    assert b"Content-Length: 2" in sent


def test_a_request_without_a_body_gets_no_framing_and_an_empty_one_keeps_its_zero():
    assert fields_sent() == [b"Host: g"]
    assert fields_sent("Content-Length: 0", length=0) == [b"Host: g", b"Content-Length: 0"]


# ------------------------------------------------------------------------------------------ bodies

BAD_CHUNKS = {
    "no digits": b"\r\n",
    "not hex": b"g\r\nx\r\n",
    "a sign": b"+1\r\nx\r\n",
    "a negative size": b"-1\r\nx\r\n",
    "0x": b"0x1\r\nx\r\n",
    "an underscore": b"1_0\r\n",
    "a space before": b" 1\r\nx\r\n",
    "a bare LF": b"1\nx\r\n",
    "a bare LF after the data": b"1\r\nx\n0\r\n\r\n",
    "a CR only": b"1\rx\r\n",
    "a size that is too small": b"1\r\nxy\r\n",
    "a size that is too large": b"5\r\nx\r\n0\r\n\r\n",
    "a size beyond 64 bits": b"11111111111111111\r\n",
    "a NUL in an extension": b"1;a=\x00\r\nx\r\n",
    "a CR in an extension": b"1;a=\r\rx\r\n",
    "a bare LF in an extension": b"1;a\nb\r\nx\r\n",
    "an extension that is no token": b"1;a,=b\r\nx\r\n",
    "an extension with an open quote": b'1;a="b\r\nx\r\n',
    "an extension without a name": b"1;=b\r\nx\r\n",
    "a tab in an extension": b"1;\ta=b\r\nx\r\n",
    "a space before an extension": b"1 ;a=b\r\nx\r\n",
    "a space in an extension": b"1; a=b\r\nx\r\n",
    "a space after an extension's name": b"1;a =b\r\nx\r\n",
    "an endless size": b"0" * 5000,
    "an endless extension": b"1;" + b"a" * 5000,
    "a trailer without a colon": b"0\r\nTrailer\r\n\r\n",
    "a folded trailer": b"0\r\nA: b\r\n c\r\n\r\n",
    "a trailer with space before its colon": b"0\r\nA : b\r\n\r\n",
    "a trailer with a bare LF": b"0\r\nA: b\n\r\n\r\n",
    "a length in a trailer": b"0\r\nContent-Length: 5\r\n\r\n",
    "a coding in a trailer": b"0\r\ntransfer-encoding: chunked\r\n\r\n",
    "a host in a trailer": b"0\r\nHost: h\r\n\r\n",
    "a NUL in a trailer": b"0\r\nA: \x00\r\n\r\n",
    "endless trailers": b"0\r\n" + b"A: bbbbbbbbbb\r\n" * 2000,
    "a last chunk that ends with LF": b"0\r\n\n",
    "another line end after zero": b"0\n\r\n",
}


BEGINNINGS = {
    "a bare CR before another request": b"0\r\n\rGET / HTTP/1.1\rHost: x\r\r",
    "a bare CR in a trailer": b"0\r\nA: b\rC",
    "a bare CR in an extension": b"1;a\rb",
    "a bare CR after a size": b"0\rG",
    "a header for a size": b"Connection: close",
    "a path for an extension": b"0/api/p",
    "a request for a trailer": b"0\r\nGET /a",
    "a NUL in an extension": b'1;a="\x00',
    "a fold": b"0\r\nA: b\r\n c",
}


@pytest.mark.parametrize("line", BEGINNINGS.values(), ids=BEGINNINGS)
@pytest.mark.parametrize("step", [1, 2, 10_000])
def test_what_cannot_become_a_valid_line_is_refused_before_its_line_has_ended(line, step):
    """It would be passed on; for a lenient engine the body could end in it, and what follows be a request."""
    framing = Chunked()

    def take_all() -> None:
        for start in range(0, len(line), step):
            framing.take(line[start : start + step])

    with pytest.raises(Malformed):
        take_all()


@pytest.mark.parametrize("host", [b"", b"Host: gate\r\n"])
def test_a_server_named_only_in_the_target_is_named_to_the_engine(host):
    head = wire.parse_request(b"GET http://gate/api/tags?x=1 HTTP/1.0\r\n" + host + b"\r\n", 10)
    assert wire.request_bytes(head, head.target, None, False).count(b"Host: gate\r\n") == 1


def test_what_an_engine_says_twice_is_passed_on_once():
    head = wire.parse_response(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n")
    out = wire.response_bytes(head, True, True, head.chunked, head.length)
    assert out.lower().count(b"transfer-encoding") == 1


@pytest.mark.parametrize("data", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
@pytest.mark.parametrize("step", [1, 3, 10_000])
def test_a_bad_chunk_is_never_passed_over(data, step):
    framing = Chunked()

    def take_all() -> None:
        for start in range(0, len(data), step):
            framing.take(data[start : start + step])
            assert not framing.done

    with pytest.raises(Malformed):
        take_all()


EXTENSIONS = st.sampled_from([b"", b";a", b";a=b", b';a="b \\"c"', b";a=1;b"])
SIZES = st.sampled_from([b"%x", b"%X", b"0%x", b"000%x"])
CHUNKS = st.lists(st.tuples(st.binary(min_size=1, max_size=40), EXTENSIONS, SIZES), max_size=6)
NO_TRAILERS = (b"content-length", b"transfer-encoding", b"host")
TRAILERS = st.lists(st.tuples(TOKENS.filter(lambda name: name.lower() not in NO_TRAILERS), VALUES), max_size=3)


def coded(chunks: list[tuple[bytes, bytes, bytes]], trailers: list[tuple[bytes, bytes]]) -> bytes:
    body = b"".join(size % len(data) + extension + b"\r\n" + data + b"\r\n" for data, extension, size in chunks)
    return body + b"0\r\n" + b"".join(n + b": " + v + b"\r\n" for n, v in trailers) + b"\r\n"


def run(framing: Chunked | Length, data: bytes, cuts: list[int]) -> int:
    """Feed it in pieces; returns where it ended, or -1."""
    places = [0, *sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    for start, end in pairwise(places):
        taken = framing.take(data[start:end])
        if framing.done:
            return start + taken
        assert taken == end - start
    return -1


@settings(max_examples=200, deadline=None, derandomize=True)
@given(CHUNKS, TRAILERS, st.binary(max_size=20), st.lists(st.integers(0, 400), max_size=8))
def test_a_chunked_body_ends_where_the_others_find_its_end(chunks, trailers, after, cuts):
    body = coded(chunks, trailers)
    payload: list[bytes] = []
    assert run(Chunked(payload), body + after, cuts) == len(body)
    meant = b"".join(data for data, _, _ in chunks)
    assert b"".join(payload) == meant
    top = REQUEST + b"Transfer-Encoding: chunked\r\n\r\n"
    try:
        other = h11_request(top + body + after)
        assert (other.body, other.end) == (meant, len(top + body))
    except Refused:
        assert any(b"\\" in extension for _, extension, _ in chunks) or trailers
    try:
        other = llhttp_request(top + body + after)
        assert (other.body, other.end) == (meant, len(top + body))
    except Refused:
        assert any(extension for _, extension, _ in chunks) or trailers


@settings(max_examples=400, deadline=None, derandomize=True)
@given(CHUNKS, TRAILERS, st.integers(0, 1 << 32), st.lists(st.integers(0, 300), max_size=5))
def test_of_mutated_chunks_what_is_accepted_is_read_alike_by_all(chunks, trailers, number, cuts):
    body = mutated(coded(chunks, trailers), random.Random(number))
    payload: list[bytes] = []
    try:
        end = run(Chunked(payload), body, cuts)
    except Malformed:
        return
    if end < 0:
        return
    top = REQUEST + b"Transfer-Encoding: chunked\r\n\r\n"
    accepted = 0
    for read in (h11_request, llhttp_request):
        try:
            other = read(top + body)
        except Refused:
            continue
        accepted += 1
        assert (other.body, other.end) == (b"".join(payload), len(top) + end), body


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CHUNKS, TRAILERS, st.lists(st.integers(0, 300), max_size=8))
def test_however_it_is_cut_a_chunked_body_is_the_same(chunks, trailers, cuts):
    body = coded(chunks, trailers)
    one, many = [], []
    assert run(Chunked(one), body, []) == run(Chunked(many), body, cuts) == len(body)
    assert b"".join(one) == b"".join(many)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CHUNKS, st.integers(0, 300))
def test_a_place_between_chunks_is_known_as_one(chunks, cut):
    """Only there may the gate put a chunk of its own into an answer."""
    body, framing = coded([(data, b"", size) for data, _, size in chunks], []), Chunked()
    framing.take(body[:cut])
    if framing.boundary and not framing.done:
        assert h11_response(SSE_HEAD + body[:cut] + chunk(b"own") + b"0\r\n\r\n").complete


SSE_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@settings(derandomize=True)
@given(st.integers(0, 50), st.binary(max_size=80), st.lists(st.integers(0, 80), max_size=5))
def test_a_length_is_taken_to_the_byte(length, data, cuts):
    framing = Length(length)
    assert run(framing, data, cuts) == (length if length <= len(data) else -1)


# ------------------------------------------------------------------------------------------ answers

BAD_ANSWERS = {
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3",
    "a length and chunked": b"Content-Length: 2\r\nTransfer-Encoding: chunked",
    "a length that is no number": b"Content-Length: two",
    "another transfer coding": b"Transfer-Encoding: gzip",
    "a folded field": b"A: b\r\n c",
    "a bare LF": b"A: b\nC: d",
    "a NUL": b"A: \x00",
    "a space before the colon": b"A : b",
    "no colon": b"A",
}


@pytest.mark.parametrize("field", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_an_answer_that_could_be_read_in_two_ways_is_a_502(field):
    with pytest.raises(Malformed) as caught:
        wire.parse_response(b"HTTP/1.1 200 OK\r\n" + field + b"\r\n\r\n")
    assert caught.value.status == 502


@pytest.mark.parametrize(
    "line",
    [
        b"HTTP/2.0 200 OK",
        b"HTTP/1.1 0 OK",
        b"HTTP/1.1 099 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 abc OK",
        b"ICY 200 OK",
        b"RTSP/1.0 200 OK",
    ],
)
def test_an_answer_that_is_not_http_1_is_a_502(line):
    with pytest.raises(Malformed) as caught:
        wire.parse_response(line + b"\r\nContent-Length: 0\r\n\r\n")
    assert caught.value.status == 502


@pytest.mark.parametrize(
    ("method", "status", "field", "kind"),
    [
        ("GET", 200, b"Content-Length: 2", Length),
        ("GET", 200, b"Transfer-Encoding: chunked", Chunked),
        ("GET", 200, b"A: b", UntilClose),
        ("HEAD", 200, b"Content-Length: 2", Length),
        ("HEAD", 200, b"Transfer-Encoding: chunked", Length),
        ("GET", 204, b"A: b", Length),
        ("GET", 204, b"Content-Length: 2", Length),
        ("GET", 304, b"Content-Length: 2", Length),
    ],
)
def test_the_end_of_an_answer_is_where_the_standard_puts_it(method, status, field, kind):
    head = wire.parse_response(b"HTTP/1.1 %d X\r\n%s\r\n\r\n" % (status, field))
    framing = wire.response_framing(head, method)
    assert isinstance(framing, kind)
    assert framing.done == (method == "HEAD" or status in (204, 304))


ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: y\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\n",
    b"HTTP/1.1 404 Not Found\r\nConnection: close, x\r\nX: 1\r\nContent-Length: 5\r\n\r\n",
]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(ANSWERS), st.integers(0, 1 << 32))
def test_a_mutated_answer_is_refused_or_passed_on_so_that_others_read_it_alike(seed, number):
    data = mutated(seed, random.Random(number))
    end = data.find(wire.HEAD_END) + 4
    assume(end > 3)
    try:
        head = wire.parse_response(data[:end])
    except Malformed:
        return
    framing = wire.response_framing(head, "GET")
    assume(head.status >= 200 and not isinstance(framing, UntilClose))
    body = b"" if framing.done else b"5\r\n12345\r\n0\r\n\r\n" if head.chunked else b"x" * (head.length or 0)
    assume(len(body) < 1000)
    sent = wire.response_bytes(head, True, True, head.chunked, head.length) + body
    meant = b"12345" if head.chunked and body else body
    ours = h11_response(sent)
    assert (ours.body, ours.end) == (meant, len(sent)), (data, sent)
    theirs = llhttp_response(sent)
    assert (theirs.body, theirs.end) == (meant, len(sent)), (data, sent)


# ------------------------------------------------------------------------------------ through the gateway


@pytest.mark.parametrize("name", [n for n in REFUSED_FIELDS if "Host" not in n])
@run_async
async def test_a_request_that_could_be_two_reaches_nobody_and_closes_the_connection(name):
    async with bench() as b:
        client = await b.client()
        body = b"0\r\n\r\nGET /admin HTTP/1.1\r\nHost: g\r\n\r\n"
        await client.send(b"POST /api/chat HTTP/1.1\r\nHost: g\r\n" + REFUSED_FIELDS[name] + b"\r\n\r\n" + body)
        data, _ = await client.read_all()
        assert data.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))
        assert data.count(b"HTTP/1.1 ") == 1
        assert b"X-Turnstile-Error: bad_request\r\n" in data
        assert not b.engine.seen


@pytest.mark.parametrize("name", BAD_CHUNKS)
@run_async
async def test_a_body_of_bad_chunks_is_never_a_complete_one_for_its_engine(name):
    top = b" HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with bench() as b:
        b.engine.answer()
        b.comfy.answer()
        for target, port in ((b"/api/chat", b.port), (b"/upload/image", b.comfy_port)):
            client = await b.client(port)
            await client.send(b"POST " + target + top + b"2\r\n{}\r\n" + BAD_CHUNKS[name])
            data, _ = await client.read_all()
            assert data.startswith(b"HTTP/1.1 400 ")
        assert not b.engine.seen
        assert not b.comfy.seen


@pytest.mark.parametrize("name", BAD_ANSWERS)
@run_async
async def test_a_bad_answer_reaches_nobody(name):
    async with bench() as b:
        b.engine.answer(b"HTTP/1.1 200 OK\r\n" + BAD_ANSWERS[name] + b"\r\n\r\n{}")
        status, headers, _ = await b.ask(post("/api/chat", {"model": "m"}))
        assert (status, headers["x-turnstile-error"]) == (502, "upstream_died")


@run_async
async def test_bytes_after_an_answer_are_never_the_next_ones_beginning():
    """An engine that sends more than it promised poisons nobody: its connection is not used again."""
    async with bench() as b:
        extra = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"
        b.engine.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}" + extra)
        b.engine.answer()
        client = await b.client()
        for _ in range(2):
            await client.send(post("/api/chat", {"model": "m"}))
            assert (await client.response())[2] == b"{}"
        assert len(b.engine.connections) == 2


@run_async
async def test_an_upgrade_to_http_2_is_not_forwarded():
    async with bench() as b:
        b.engine.answer()
        await b.ask(
            get("/", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAA"), method="GET"
        )
        assert {n.lower() for n, _ in b.engine.seen[0].headers} == {"host"}


def test_the_fuzzers_first_cases_find_nothing():
    bad = uvloop.run(fuzz(seed=1, cases=range(300), seconds=20))
    assert not [(case.number, case.faults) for case in bad]
