"""Engines that answer to one name only: what they are sent, whatever the client called them."""

from __future__ import annotations

import dataclasses
import gzip
import json

import pytest

from gpu_turnstile.gateway.rename import renamed
from gpu_turnstile.gateway.wire import RequestHead
from tests.aio import run_async
from tests.gateway.bench import bench, post


def head(encoding: bytes = b"") -> RequestHead:
    found = object.__new__(RequestHead)
    found.encoding = encoding
    return found


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b'{"model":"x","n":1.50}', b'{"model":"own","n":1.50}'),
        (b'\n {"n":[1, 2],"model":null}', b'{"n":[1, 2],"model":"own"}'),
        (b'{"n":1}', b'{"n":1,"model":"own"}'),
        (b'{"model":"x","model":"y"}', b'{"model":"own"}'),
        (b'{"a":{"model":"x"},"model":"x"}', b'{"a":{"model":"x"},"model":"own"}'),
        ('{"model":"x","t":"é\\u00e9"}'.encode(), '{"model":"own","t":"é\\u00e9"}'.encode()),
    ],
)
def test_only_the_models_name_is_another_and_all_else_stays_as_it_was_written(sent, expected):
    assert renamed(head(), sent, "own") == expected


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model"', b"\xff\xfe{", b"a=b", b'{"model":"x"} trailing'])
def test_what_is_no_json_object_stays_as_it_is(body):
    assert renamed(head(), body, "own") == body


def test_what_is_compressed_stays_as_it_is():
    body = gzip.compress(b'{"model":"x"}')
    assert renamed(head(b"gzip"), body, "own") == body


@run_async
async def test_a_renamed_body_has_its_own_length_and_others_are_not_touched():
    async with bench() as b:
        b.engine.answer()
        sent = {"model": "an-alias-that-is-rather-long", "messages": []}
        client = await b.client()
        for served in ({"ollama": "own"}, {"another": "own"}, {}):
            b.gateway.table = dataclasses.replace(b.gateway.table, served=served)
            await client.send(post("/v1/chat/completions", sent))
            assert (await client.response())[0] == 200
        names = [json.loads(seen.body)["model"] for seen in b.engine.seen]
        assert names == ["own", sent["model"], sent["model"]]
        assert b.engine.seen[1].raw == post("/v1/chat/completions", sent)
