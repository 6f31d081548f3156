"""What the gate reads out of a body: the model, wherever and however it is written, and nothing else."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import threading
import time
import tracemalloc
import zlib
from itertools import pairwise
from typing import Any

import brotli
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_turnstile.core.routes import Directory
from gpu_turnstile.gateway import intake
from gpu_turnstile.gateway.codings import zstd
from gpu_turnstile.gateway.intake import BadBody, Wish, needs_thread, read_wish, reader_for
from gpu_turnstile.gateway.json_fields import JsonFields
from gpu_turnstile.gateway.server import Table
from gpu_turnstile.gateway.wire import RequestHead
from tests.aio import run_async, until
from tests.gateway.bench import OK, SSE, Bench, bench, chunk, get, post

LIMIT = 64 << 20
CHAT = {"model": "b", "messages": [{"role": "user", "content": "hi"}], "stream": True}
BODY = json.dumps(CHAT).encode()
JSON, FORM = b"application/json", b"application/x-www-form-urlencoded"


def head(kind: bytes = JSON, encoding: bytes = b"", path: str = "/v1/chat/completions") -> RequestHead:
    made = RequestHead()
    made.content_type, made.encoding, made.path = kind, encoding, path
    return made


def read(body: bytes, kind: bytes = JSON, encoding: bytes = b"", path: str = "/v1/chat/completions") -> Wish:
    """The same from the whole body and from pieces of it, or the test fails."""
    return _agreed(body, head(kind, encoding, path), (1, 7, 4096))


def _agreed(body: bytes, what: RequestHead, sizes: tuple[int, ...], limit: int = LIMIT) -> Wish:
    def whole() -> Wish:
        return read_wish(what, body, limit)

    def pieces(size: int) -> Wish:
        reader = reader_for(what, limit)
        for start in range(0, len(body), size):
            reader.feed(body[start : start + size])
        return reader.finish()

    outcomes = [_outcome(whole)] + [_outcome(lambda size=size: pieces(size)) for size in sizes]
    for outcome in outcomes[1:]:
        assert outcome[0] == outcomes[0][0], outcomes
        assert outcome[1] == outcomes[0][1] or isinstance(outcome[1], BadBody), outcomes
    if isinstance(outcomes[0][1], BadBody):
        raise outcomes[0][1]
    return outcomes[0][1]


def _outcome(attempt: Any) -> tuple[int, Any]:
    try:
        return 200, attempt()
    except BadBody as error:
        return error.status, error


def refused(status: int, body: bytes, kind: bytes = JSON, encoding: bytes = b"", limit: int = LIMIT) -> str:
    with pytest.raises(BadBody) as caught:
        _agreed(body, head(kind, encoding), (1, 4096), limit)
    assert caught.value.status == status, caught.value
    assert "\n" not in caught.value.message
    return caught.value.message


# ------------------------------------------------------------------------------------------------ JSON

READABLE = {
    "a byte order mark": b"\xef\xbb\xbf" + BODY,
    "a byte that is no UTF-8": b'{"model":"b","x":"\xff"}',
    "a lone surrogate": rb'{"model":"b","x":"\ud800"}',
    "half a pair": rb'{"x":"\ud83d","model":"b"}',
    "NaN": b'{"x":NaN,"model":"b","y":[Infinity,-Infinity]}',
    "a number out of range": b'{"x":1e999,"model":"b"}',
    "a control character": b'{"x":"a\nb\x00","model":"b"}',
    "escaped keys": rb'{"m\u006fdel":"b"}',
    "an escaped value": rb'{"model":"\u0062"}',
    "the model first": b'{"model":"b","x":{"model":"c"}}',
    "the model last": b'{"x":{"model":"c"},"y":[{"model":"d"}],"model":"b"}',
    "two models": b'{"model":"a","model":"b"}',
    "two models and garbage": b'{"model":"a","x":"\xff","model":"b"}',
    "brackets in strings": rb'{"x":["]}{[\"]}"],"]}":"}","model":"b"}',
    "backslashes": rb'{"x":"\\","y":["\\\\\""],"\\":1,"model":"b"}',
    "space everywhere": b' \r\n\t{ "x" : [ 1 , { } ] , "model"\n:\t"b" } \n',
    "a hundred levels": b'{"x":' + b"[" * 100 + b"]" * 100 + b',"model":"b"}',
    "nine thousand levels": b'{"x":' + b'{"a":[' * 4500 + b"]}" * 4500 + b',"model":"b"}',
    "a key without end in sight": b'{"' + b"k" * 50_000 + b'":1,"model":"b"}',
    "a long escaped key": b'{"' + rb"\"" * 3000 + b'":1,"model":"b"}',
    "Chinese": '{"x":"模型","model":"b"}'.encode(),
}


@pytest.mark.parametrize("body", READABLE.values(), ids=READABLE)
def test_the_model_is_read_where_it_can_be_read(body):
    assert read(body).model == "b"


BAD = {
    "an array": b"[]",
    "a string": b'"x"',
    "a number": b"123",
    "true": b"true",
    "only space": b" \n",
    "only a byte order mark": b"\xef\xbb\xbf",
    "half a byte order mark": b"\xef\xbb{}",
    "two byte order marks and nothing": b"\xef\xbb\xbf\xef\xbb\xbf",
    "not JSON": b"model=b",
    "cut in a key": b'{"mod',
    "cut in a string": b'{"model":"b',
    "cut after a backslash": b'{"model":"b\\',
    "cut in a number": b'{"model":"b","x":12',
    "cut in an array": b'{"model":"b","x":[1,',
    "cut before the end": b'{"model":"b"',
    "two objects": b'{"model":"a"}{"model":"b"}',
    "trailing NUL": b'{"model":"b"}\x00',
    "a trailing comma": b'{"model":"b",}',
    "no comma": b'{"model":"b" "x":1}',
    "no colon": b'{"model" "b"}',
    "no value": b'{"model":,"x":1}',
    "no key": b'{:1,"model":"b"}',
    "a bare key": b'{model:"b"}',
    "single quotes": b"{'model':'b'}",
    "brackets that do not match": b'{"model":"b","x":[}}',
    "brackets that do not match deep inside": b'{"model":"b","x":[[[[[1]]]}]}',
    "brackets that do not match in a short value": b'{"x":[},"model":"b"}',
    "a model that is no UTF-8": b'{"model":"\xff"}',
    "a model that is a lone surrogate": rb'{"model":"\ud800"}',
    "a model that is no JSON": b'{"model":nope}',
    "200,000 levels": b'{"model":"b","x":' + b"[" * 200_000,
    "200,000 levels and back": b'{"model":"b","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "200,000 levels of nothing": b"[" * 200_000,
    "a model of 2 MB": b'{"x":"' + b"y" * intake.WHOLE + b'","model":"' + b"b" * (2 << 20) + b'"}',
    "a number of 2 MB": b'{"model":' + b"1" * (2 << 20) + b"}",
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_what_cannot_be_read_is_the_callers_mistake(body):
    refused(400, body)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["model", "name", "]", '"']), inner),
    max_leaves=12,
)
KEYS = st.text(max_size=8) | st.sampled_from(["model", "name", "stream", "models", "Model"])
MEMBERS = st.lists(st.tuples(KEYS, JSON_VALUES), max_size=8)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(MEMBERS, st.booleans(), st.lists(st.integers(0, 3000), max_size=6), st.sampled_from(["", " ", "\r\n\t"]))
def test_however_it_is_cut_the_same_is_read_as_by_a_json_reader(members, ascii_only, cuts, space):
    text = ",".join(
        f"{space}{json.dumps(k, ensure_ascii=ascii_only)}{space}:{space}{json.dumps(v, ensure_ascii=ascii_only)}"
        for k, v in members
    )
    try:
        body = ("{" + text + "}").encode()
    except UnicodeEncodeError:
        return
    meant = json.loads(body)
    reader, places = JsonFields(), sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    for start, end in pairwise(places):
        reader.feed(body[start:end])
    found = reader.finish()
    for field in ("model", "name", "stream"):
        value, seen = meant.get(field), getattr(found, field)
        assert seen == value if not isinstance(value, list | dict) else seen == type(value)()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\ model12\n', max_size=60).map(str.encode))
def test_no_bytes_are_anything_worse_than_a_bad_body(body):
    for kind in (JSON, FORM, b"multipart/form-data; boundary=x", b"audio/wav", b""):
        for encoding in (b"", b"gzip", b"br", b"zstd", b"deflate"):
            _outcome(lambda k=kind, e=encoding: _agreed(body, head(k, e), (1, 3)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(alphabet='{}[]":,\\1 a', max_size=40), st.integers(1, 9))
def test_garbage_is_judged_the_same_however_it_is_cut(text, size):
    body = b'{"x":' + text.encode() + b',"model":"b"}'
    pieces, whole = JsonFields(), JsonFields()

    def cut() -> Wish:
        for start in range(0, len(body), size):
            pieces.feed(body[start : start + size])
        return pieces.finish()

    def one() -> Wish:
        whole.feed(body)
        return whole.finish()

    first, second = _outcome(cut), _outcome(one)
    assert first[0] == second[0]
    if first[0] == 200:
        assert first[1] == second[1]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_json_that_python_engines_read_in_utf_16_and_32_is_read(encoding):
    assert read_wish(head(), '{"model":"b","x":"é"}'.encode(encoding), LIMIT).model == "b"


@pytest.mark.parametrize("kind", [b"", b"text/plain", FORM, b"text/json; charset=latin-1", b"application/octet-stream"])
def test_json_is_json_whatever_its_label_says(kind):
    assert read(BODY, kind).model == "b"
    assert read(b"\n " + BODY, kind).model == "b"


@pytest.mark.parametrize(
    ("path", "model"),
    [("/api/show", "n"), ("/api/delete", "n"), ("/api/pull", "n"), ("/api/chat", None), ("/v1/chat/completions", None)],
)
def test_name_stands_in_for_model_only_where_ollamas_api_says_so(path, model):
    assert read(b'{"name":"n"}', path=path).model == model
    assert read(b'{"name":"n","model":"m"}', path=path).model == "m"


def test_an_empty_body_names_nothing():
    assert read(b"") == Wish()


def test_a_small_clean_body_is_one_decode(monkeypatch):
    monkeypatch.setattr(intake, "reader_for", None)
    assert read_wish(head(), BODY, LIMIT).model == "b"


def test_no_piece_of_a_large_body_holds_the_loop():
    """Of the shapes that cost most per byte; a piece is what a socket gives at once."""
    shapes = [b'"",', b"[],", b'[{"a":[{"a":[{"a":[1]}]}]}],', b'"a\\n",', b'"[",', b'{"":0},', b"1,"]
    piece = 1 << 16
    for shape in shapes:
        body = b'{"x":[' + shape * (4 * piece // len(shape)) + b'0],"model":"b"}'
        reader, longest = JsonFields(), 0.0
        for start in range(0, len(body), piece):
            began = time.process_time()
            reader.feed(body[start : start + piece])
            longest = max(longest, time.process_time() - began)
        assert reader.finish().model == "b"
        assert longest < 0.1, shape


def test_100_mb_of_base64_with_the_model_last_are_read_within_bounds():
    text = b"QUJD" * (1 << 16)
    reader, began = JsonFields(), time.process_time()
    reader.feed(b'{"messages":[{"content":[{"image_url":{"url":"data:image/png;base64,')
    for _ in range(400):
        reader.feed(text)
    reader.feed(b'"}}]}],"stream":true,"model":"b"}')
    assert reader.finish() == Wish(model="b", stream=True)
    assert time.process_time() - began < 1.0


# ---------------------------------------------------------------------------------------------- codings


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


CODED = {
    "gzip": (b"gzip", gzip.compress(BODY)),
    "x-gzip": (b"x-gzip", gzip.compress(BODY)),
    "GZIP": (b"GZip", gzip.compress(BODY)),
    "gzip in two members": (b"gzip", gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])),
    "deflate": (b"deflate", zlib.compress(BODY)),
    "raw deflate": (b"deflate", raw_deflate(BODY)),
    "br": (b"br", brotli.compress(BODY)),
    "zstd": (b"zstd", zstd.compress(BODY)),
    "zstd in two frames": (b"zstd", zstd.compress(BODY[:9]) + zstd.compress(BODY[9:])),
    "gzip, gzip": (b"gzip, gzip", gzip.compress(gzip.compress(BODY))),
    "br, gzip": (b"br,gzip", gzip.compress(brotli.compress(BODY))),
    "zstd, deflate, br": (b"zstd, deflate , br", brotli.compress(zlib.compress(zstd.compress(BODY)))),
    "identity": (b"identity", BODY),
    "identity, gzip and commas": (b", identity,,gzip,", gzip.compress(BODY)),
}


@pytest.mark.parametrize(("encoding", "body"), CODED.values(), ids=CODED)
def test_a_compressed_body_is_read(encoding, body):
    assert read(body, encoding=encoding) == Wish(model="b", stream=True)


@pytest.mark.parametrize("name", [n for n in CODED if "identity" not in n])
def test_a_compressed_body_that_is_cut_or_goes_on_is_a_bad_one(name):
    encoding, body = CODED[name]
    for cut in (1, 2, len(body) // 2, len(body) - 1):
        refused(400, body[:cut], encoding=encoding)
    refused(400, body + b"garbage", encoding=encoding)
    refused(400, b"\x00" + body, encoding=encoding)
    refused(400, BODY, encoding=encoding)


@pytest.mark.parametrize("encoding", [b"lz4", b"compress", b"gzip, lz4", b"br;q=1", b"\xff", b"gzip," * 5])
def test_an_unknown_coding_is_a_415(encoding):
    assert "Content-Encoding" in refused(415, BODY, encoding=encoding)


def bomb(coding: str, megabytes: int) -> bytes:
    """JSON with a string of that many megabytes, compressed without ever holding them."""
    begin, block = b'{"x":"', b"0" * (1 << 20)
    if coding == "br":
        return brotli.compress(begin + block * megabytes, quality=5)
    if coding == "zstd":
        packer = zstd.ZstdCompressor()
        return packer.compress(begin) + b"".join(packer.compress(block) for _ in range(megabytes)) + packer.flush()
    flat = zlib.compressobj(wbits={"gzip": 31, "deflate": 15}[coding])
    return flat.compress(begin) + b"".join(flat.compress(block) for _ in range(megabytes)) + flat.flush()


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_a_bomb_is_a_413_and_costs_no_memory(coding):
    body = bomb(coding, 100)
    tracemalloc.start()
    try:
        with pytest.raises(BadBody) as caught:
            read_wish(head(encoding=coding.encode()), body, 32 << 20)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.status == 413
    assert "TURNSTILE_BODY_LIMIT" in caught.value.message


def test_a_bomb_inside_another_coding_is_a_413_too():
    refused(413, gzip.compress(bomb("gzip", 100)), JSON, b"gzip, gzip", 32 << 20)
    name = (
        gzip.compress(b"")[:3] + b"\x08" + bytes(6) + b"a" * (8 << 20)
    )  # large between the codings, nothing at the end
    refused(413, gzip.compress(name), JSON, b"gzip, gzip", 1 << 20)


def test_a_zstd_frame_that_asks_for_a_huge_window_is_refused():
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    refused(400, packer.compress(BODY) + packer.flush(), encoding=b"zstd")


def test_a_gzip_body_of_countless_empty_members_is_refused_in_time():
    began = time.process_time()
    refused(400, gzip.compress(b"") * 20_000, encoding=b"gzip")
    assert time.process_time() - began < 8.0


def test_only_what_may_take_long_needs_a_thread():
    assert not needs_thread(head(), 600)
    assert not needs_thread(head(), intake.WHOLE)
    assert needs_thread(head(encoding=b"gzip"), 600)
    assert needs_thread(head(), 100 << 20)


# ------------------------------------------------------------------------------------------------ forms

ODD = "=_a'()+,-./:?"
AUDIO = bytes(range(256)) * 40


def part(name: str, value: bytes, *lines: str, disposition: str = "") -> bytes:
    shown = disposition or f'form-data; name="{name}"'
    return "\r\n".join([f"Content-Disposition: {shown}", *lines, "", ""]).encode() + value


def form(*parts: bytes, boundary: str = "bound", preamble: bytes = b"", close: bytes = b"--\r\n") -> bytes:
    mark = b"--" + boundary.encode()
    begin = preamble + b"\r\n" if preamble else b""
    return begin + b"".join(mark + b"\r\n" + each + b"\r\n" for each in parts) + mark + close


MULTI = b"multipart/form-data; boundary=bound"
FILE = part("file", AUDIO, "Content-Type: audio/wav", disposition='form-data; name="file"; filename="録音 ü.wav"')
LOOKALIKE = part(
    "file",
    b"--bound\r\n\r\n--boun\r\n--boundX\r\n--bound-\r\n--bound\r--bound--\r\n--bound  x\r\n" * 9,
    disposition='form-data; name="file"; filename="a.wav"',
)
MODEL = part("model", b"b")

FORMS = {
    "before the file": (MULTI, form(MODEL, FILE)),
    "after the file": (MULTI, form(FILE, MODEL)),
    "between boundary look-alikes": (MULTI, form(LOOKALIKE, MODEL, LOOKALIKE)),
    "a quoted boundary of odd characters": (
        f'multipart/form-data; boundary="{ODD}"'.encode(),
        form(FILE, MODEL, boundary=ODD),
    ),
    "a quoted boundary with escapes": (rb'multipart/form-data; boundary="bo\und"', form(FILE, MODEL)),
    "more parameters": (b"Multipart/Form-Data ; charset=utf-8; Boundary=bound", form(MODEL)),
    "a preamble": (MULTI, form(MODEL, preamble=b"This is --bound a form\r\n--bounds")),
    "an epilogue": (MULTI, form(MODEL) + b"\r\n--bound\r\nwhatever"),
    "no last line end": (MULTI, form(MODEL, close=b"--")),
    "space after the boundary": (MULTI, form(MODEL).replace(b"--bound\r\n", b"--bound \t\r\n")),
    "the last of two": (MULTI, form(part("model", b"a"), FILE, MODEL)),
    "a file that is called model": (
        MULTI,
        form(MODEL, part("model", b"x", disposition='form-data; name="model"; filename="x"')),
    ),
    "a file whose name says model": (
        MULTI,
        form(MODEL, part("", b"x", disposition='form-data; filename="; name=\\"model\\"; x"; name="f"')),
    ),
    "an unquoted name": (MULTI, form(part("", b"b", disposition="form-data; name=model"))),
    "odd case and more headers": (
        MULTI,
        form(b'CONTENT-TYPE: text/plain\r\ncontent-disposition:form-data;NAME="model"\r\n\r\nb'),
    ),
    "an empty part": (MULTI, form(part("x", b""), MODEL)),
    "a part without a head": (MULTI, form(b"\r\nnothing", MODEL)),
    "no part": (MULTI, form(b"\r\n", MODEL)),
}


@pytest.mark.parametrize(("kind", "body"), FORMS.values(), ids=FORMS)
def test_the_model_of_a_form_is_found_wherever_it_stands(kind, body):
    assert read(body, kind).model == "b"


def test_a_form_without_a_model_names_none():
    assert read(form(FILE), MULTI) == Wish()
    assert read(form(FILE, part("stream", b"true")), MULTI).stream is True


BAD_FORMS = {
    "another boundary": (b"multipart/form-data; boundary=nope", form(MODEL)),
    "no boundary": (b"multipart/form-data", form(MODEL)),
    "two boundaries": (b"multipart/form-data; boundary=bound; boundary=x", form(MODEL)),
    "an empty boundary": (b'multipart/form-data; boundary=""', form(MODEL)),
    "cut in the file": (MULTI, form(MODEL, FILE)[:-3000]),
    "cut in the last boundary": (MULTI, form(MODEL, FILE)[:-3]),
    "cut before the last dashes": (MULTI, form(MODEL, FILE)[:-4]),
    "cut in a head": (MULTI, form(MODEL)[:30]),
    "a head without end": (MULTI, form(b"X: " + b"y" * 40_000)),
    "a model that is no UTF-8": (MULTI, form(part("model", b"\xff"))),
    "a model of 2 MB": (MULTI, form(part("model", b"b" * (2 << 20)))),
    "JSON": (MULTI, BODY),
}


@pytest.mark.parametrize(("kind", "body"), BAD_FORMS.values(), ids=BAD_FORMS)
def test_a_malformed_form_is_the_callers_mistake(kind, body):
    refused(400, body, kind)


def test_a_form_with_a_30_mb_file_is_read_without_a_copy_of_it():
    body = form(part("file", AUDIO * 3072, disposition='form-data; name="file"; filename="a"'), MODEL)
    tracemalloc.start()
    try:
        assert read_wish(head(MULTI), body, LIMIT).model == "b"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b"model=b", "b"),
        (b"x=1&model=hf.co%2Fo%2Fb%3AQ4&y=2", "hf.co/o/b:Q4"),
        (b"model=a&model=b+c", "b c"),
        (b"m%6fdel=b", "b"),
        (b"x=" + b"y" * 200_000 + b"&model=b", "b"),
        (b"x", None),
        (b"&&=&", None),
        (b"model", ""),
    ],
)
def test_the_model_of_a_url_encoded_form_is_read(body, model):
    assert read(body, FORM).model == model


def test_a_url_encoded_model_that_is_too_long_or_no_utf_8_is_the_callers_mistake():
    refused(400, b"model=" + b"b" * 100_000, FORM)
    refused(400, b"model=%FF", FORM)


# ------------------------------------------------------------------------------------ through the gateway


def coded(path: str, body: bytes, encoding: str) -> bytes:
    return post(path, None, f"Content-Encoding: {encoding}", raw=body)


@pytest.mark.parametrize("name", ["gzip", "deflate", "raw deflate", "br", "zstd", "gzip, gzip"])
@run_async
async def test_a_compressed_request_reaches_its_engine_as_it_was_sent(name):
    encoding, body = CODED[name]
    async with bench() as b:
        b.engine.answer()
        request = coded("/v1/chat/completions", body, encoding.decode())
        assert (await b.ask(request))[0] == 200
        assert b.engine.seen[0].raw == request


@run_async
async def test_a_compressed_request_that_cannot_be_read_wakes_nobody_and_says_why():
    async with bench(body_limit=8 << 20) as b:
        cases = [
            (coded("/v1/chat/completions", gzip.compress(BODY)[:-4], "gzip"), 400, "bad_request"),
            (coded("/v1/chat/completions", BODY, "lz4"), 415, None),
            (coded("/v1/chat/completions", bomb("gzip", 100), "gzip"), 413, "too_large"),
            (coded("/v1/chat/completions", bomb("zstd", 100), "zstd"), 413, "too_large"),
        ]
        for request, status, code in cases:
            got, headers, body = await b.ask(request)
            assert got == status
            assert "x-turnstile-error" in headers
            assert code is None or headers["x-turnstile-error"] == code
            assert json.loads(body)["error"]["message"]
        assert not b.engine.seen


@run_async
async def test_a_415_says_what_would_be_accepted():
    async with bench() as b:
        _, headers, _ = await b.ask(coded("/api/chat", BODY, "lz4"))
        assert "gzip" in headers["accept-encoding"]


@run_async
async def test_a_bomb_does_not_hold_up_another_stream():
    async with bench(body_limit=200 << 20) as b:
        body = bomb("zstd", 256)
        async with steady_stream(b) as gaps:
            assert (await b.ask(coded("/api/chat", body, "zstd")))[0] == 413
        assert max(gaps) < 0.35


@pytest.mark.parametrize("name", ["a byte order mark", "a byte that is no UTF-8", "a lone surrogate", "NaN"])
@run_async
async def test_an_odd_body_is_forwarded_byte_for_byte(name):
    async with bench() as b:
        b.engine.answer()
        assert (await b.ask(post("/api/chat", raw=READABLE[name])))[0] == 200
        assert b.engine.seen[0].body == READABLE[name]


@pytest.mark.parametrize("name", [n for n in BAD if len(BAD[n]) < 500_000])
@run_async
async def test_a_bad_body_is_a_400_in_the_callers_shape_and_the_connection_lives(name):
    async with bench() as b:
        client = await b.client()
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            await client.send(post(path, raw=BAD[name]))
            status, _, body = await client.response()
            assert (status, "error" in json.loads(body)) == (400, True)
        assert not b.engine.seen


MODELS = [
    ({}, 400),
    ({"model": None}, 400),
    ({"model": ""}, 400),
    ({"model": 123}, 400),
    ({"model": ["b"]}, 400),
    ({"model": {"name": "b"}}, 400),
    ({"model": True}, 400),
    ({"model": "nobody"}, 404),
    ({"model": "LLAMA3"}, 404),
    ({"model": "llama3:1b"}, 404),
    ({"model": "\x00\x1b[31m"}, 404),
    ({"model": "x" * 100_000}, 404),
]


@pytest.mark.parametrize(("body", "status"), MODELS, ids=lambda v: str(v)[:30])
@run_async
async def test_a_model_that_is_missing_unknown_or_no_name_wakes_nobody(body, status):
    async with bench() as b:
        b.gateway.table = Table(directory=Directory(names=("ollama",), aliases={"llama3": "ollama"}))
        for path in ("/v1/chat/completions", "/v1/completions", "/completion", "/api/embed", "/v1/messages"):
            got, headers, text = await b.ask(post(path, body))
            assert got == status
            assert "x-turnstile-error" in headers
            assert "model" in text.decode() or status == 404
            assert "\x1b" not in json.loads(text)["error"] if path == "/api/embed" else True
        assert not b.engine.seen


@run_async
async def test_the_default_tag_is_no_part_of_a_name():
    async with bench() as b:
        b.gateway.table = Table(directory=Directory(names=("ollama",), aliases={"llama3": "ollama"}))
        b.engine.answer()
        for model in ("llama3", "llama3:latest"):
            assert (await b.ask(post("/api/chat", {"model": model})))[0] == 200
        assert [json.loads(s.body)["model"] for s in b.engine.seen] == ["llama3", "llama3:latest"]


@run_async
async def test_deleting_and_showing_a_model_by_name_need_no_card():
    async with bench() as b:
        b.engine.answer()
        request = post("/api/show", {"name": "m"})
        assert (await b.ask(request))[0] == 200
        assert (await b.ask(request.replace(b"POST /api/show", b"DELETE /api/delete"), method="DELETE"))[0] == 200
        assert not b.view.leases
        assert [s.method for s in b.engine.seen] == ["POST", "DELETE"]


@run_async
async def test_a_speech_upload_reaches_its_engine_byte_for_byte():
    body = form(LOOKALIKE, FILE, part("model", b"whisper"), boundary=ODD)
    async with bench() as b:
        b.engine.answer()
        lines = [
            "POST /v1/audio/transcriptions HTTP/1.1",
            "Host: g",
            f'Content-Type: multipart/form-data; boundary="{ODD}"',
        ]
        request = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body
        assert (await b.ask(request))[0] == 200
        assert b.engine.seen[0].raw == request


@run_async
async def test_an_upload_to_comfyui_passes_at_once_while_another_engine_has_the_card():
    body = form(part("image", AUDIO, disposition='form-data; name="image"; filename="a.png"'), part("overwrite", b"1"))
    async with bench() as b:
        go = asyncio.Event()

        async def hold(connection, seen):
            await go.wait()
            await connection.send(OK)

        b.engine.script(hold)
        b.comfy.answer()
        chat = await b.client()
        await chat.send(post("/api/chat", CHAT))
        await until(lambda: b.view.leases)
        request = post("/upload/image", raw=body).replace(JSON, MULTI)
        assert (await b.ask(request, port=b.comfy_port))[0] == 200
        assert b.comfy.seen[0].raw == request
        assert b.ollama_engine.released == 0
        go.set()
        await chat.response()


class steady_stream:
    """A stream with a chunk each 50 ms while the block runs; gives the gaps between arrivals, in seconds."""

    def __init__(self, b: Bench) -> None:
        self.b = b
        self.gaps: list[float] = []
        self.stop = asyncio.Event()

    async def __aenter__(self) -> list[float]:
        async def tick(connection, seen):
            await connection.send(SSE)
            while not self.stop.is_set():
                await connection.send(chunk(b"data: x\n\n"))
                await asyncio.sleep(0.05)
            await connection.send(b"0\r\n\r\n")

        self.b.engine.script(tick)
        self.b.engine.answer()
        client = await self.b.client()
        await client.send(post("/v1/chat/completions", CHAT))
        await client.read_until(b"data: x\n\n\r\n")

        async def watch() -> None:
            last = time.monotonic()
            while not (await client.read()).endswith(b"0\r\n\r\n"):
                self.gaps.append(time.monotonic() - last)
                last = time.monotonic()

        self.watching = asyncio.ensure_future(watch())
        return self.gaps

    async def __aexit__(self, *_: object) -> None:
        await until(lambda: self.gaps)
        self.stop.set()
        await self.watching


async def upload(b: Bench, top: bytes, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send it piece by piece, so that the test itself does not stall the loop it watches."""
    client = await b.client()
    await client.send(top)
    view = memoryview(body)
    for start in range(0, len(body), 1 << 18):
        await client.send(view[start : start + (1 << 18)])  # type: ignore[arg-type]
        await asyncio.sleep(0)
    return await client.response(seconds=20)


class Sink:
    """An engine that hashes a body instead of holding it."""

    async def start(self) -> int:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.digest, self.size = hashlib.sha256(), 0
        return int(self.server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        top = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(top.partition(b"content-length:")[2].split(b"\r\n")[0])
        while self.size < length:
            data = await reader.read(1 << 16)
            if not data:
                return
            self.digest.update(data)
            self.size += len(data)
        writer.write(OK)
        await writer.drain()
        writer.close()


def large(megabytes: int) -> bytes:
    text = b"QUJD" * (megabytes << 18)
    url = b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,'
    return url + text + b'"}}]}],"stream":true,"model":"b"}'


def peak(stop: threading.Event, found: list[int]) -> None:
    process = psutil.Process()
    while not stop.wait(0.005):
        found.append(process.memory_info().rss)


@run_async
async def test_a_60_mb_body_with_the_model_last_is_routed_and_holds_up_no_other_stream():
    async with bench(quiet=False) as b:
        sink = Sink()
        port = await sink.start()
        body = large(60)
        before = psutil.Process().memory_info().rss
        async with steady_stream(b) as gaps:
            await asyncio.sleep(0)
            b.comfy_engine.url = f"http://127.0.0.1:{port}"
            b.gateway.table = Table(directory=Directory(names=("ollama", "comfyui"), aliases={"b": "comfyui"}))
            stop, seen = threading.Event(), []
            watcher = threading.Thread(target=peak, args=(stop, seen))
            watcher.start()
            top = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % len(body)
            sending = asyncio.ensure_future(upload(b, top, body))
            await until(lambda: b.view.waiting, 10)
        status, _, _ = await sending
        stop.set()
        watcher.join()
        assert status == 200
        assert (sink.size, sink.digest.digest()) == (len(body), hashlib.sha256(body).digest())
        assert max(gaps) < 0.25
        assert max(seen) - before < 3 * len(body)
        await until(lambda: psutil.Process().memory_info().rss - before < len(body) / 2)
        sink.server.close()


@run_async
async def test_a_body_one_byte_above_the_limit_is_a_413_in_the_callers_shape():
    async with bench(body_limit=100_000) as b:
        b.engine.answer()
        fits = b'{"model":"m","x":"' + b"y" * (100_000 - 20) + b'"}'
        assert len(fits) == 100_000
        assert (await b.ask(post("/api/chat", raw=fits)))[0] == 200
        over = fits[:-2] + b'y"}'
        status, headers, body = await b.ask(post("/api/chat", raw=over))
        assert (status, headers["x-turnstile-error"]) == (413, "too_large")
        assert "TURNSTILE_BODY_LIMIT" in json.loads(body)["error"]
        status, _, body = await b.ask(post("/v1/messages", raw=over))
        assert (status, json.loads(body)["error"]["type"]) == (413, "request_too_large")
        in_chunks = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
        status, _, body = await b.ask(in_chunks + chunk(over) + b"0\r\n\r\n")
        assert (status, json.loads(body)["error"]["type"]) == (413, "invalid_request_error")
        assert len(b.engine.seen) == 1


@run_async
async def test_a_refused_upload_does_not_swallow_the_next_request():
    """After a 413 the rest of the body is never taken for a request."""
    async with bench(body_limit=1000) as b:
        client = await b.client()
        smuggled = post("/api/chat", {"model": "m"})
        await client.send(post("/api/chat", raw=smuggled * 100))
        data, _ = await client.read_all()
        assert data.count(b"HTTP/1.1 ") == 1
        assert b" 413 " in data
        assert not b.engine.seen


@run_async
async def test_a_listing_by_an_encoded_name_is_forwarded_as_it_was_sent():
    async with bench() as b:
        b.engine.answer()
        assert (await b.ask(get("/v1/models/org%2Fx"), method="GET"))[0] == 200
        assert b.engine.seen[0].target == "/v1/models/org%2Fx"
