"""What a request is, by its path; and that the path reaches its engine as it was written."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_turnstile.gateway.paths import Dialect, Kind, Site, classify, plain_path
from tests.aio import run_async, until
from tests.gateway.bench import OK, bench, get, post

WORK, RESIDENT, NEUTRAL, LISTING, CONTROL = Kind.WORK, Kind.RESIDENT, Kind.NEUTRAL, Kind.LISTING, Kind.CONTROL


def words(text: str) -> list[str]:
    return text.split()


LLM_WORK = words(
    """
    /api/generate /api/chat /api/embed /api/embeddings /v1/chat/completions /v1/completions /v1/embeddings
    /v1/responses /v1/messages /v1/audio/transcriptions /v1/audio/translations /v1/audio/speech
    /v1/images/generations /v1/images/edits /v1/images/variations /chat/completions /completions /completion
    /responses /audio/transcriptions /infill /embedding /embeddings /rerank /reranking /v1/rerank
    /v1/reranking /v2/rerank /score /v1/score /pooling /classify /generate /encode /invocations /models/load
    /v1/load_lora_adapter /inference /sdapi/v1/txt2img
    /sdapi/v1/img2img /sdapi/v1/reload-checkpoint /anything/else /
    """
)

OLLAMA_NEUTRAL = words(
    """
    /api/show /api/pull /api/push /api/copy /api/create /api/delete /api/me /api/signout /api/web_search
    /api/experimental/web_fetch /api/blobs/sha256:0123
    """
)

ONLY_RESIDENT = words(
    """
    /tokenize /detokenize /apply-template /slots/0 /props /lora-adapters /cvectors/load
    /v1/messages/count_tokens /v1/responses/input_tokens /v1/chat/completions/input_tokens
    /v1/chat/completions/control /v1/streams/lookup
    """
)

READ = words(
    """
    / /api/version /api/status /api/show /v1/audio/transcriptions /props /slots /metrics/x
    /v1/stream /is_sleeping /sdapi/v1/progress /api/chat
    """
)

CONTROLS = words(
    """
    /status /health /healthz /metrics /mode /lock /unlock /unload /events /ui /ui/app.js /docs /openapi.json
    /v1/presets /v1/presets/x /gpu-turnstile/release /status/ /%73tatus
    """
)


@pytest.mark.parametrize("path", LLM_WORK)
def test_what_uses_the_card_or_is_unknown_is_work(path):
    assert classify(Site.LLM, "POST", path)[:2] == (WORK, Site.LLM)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/collective_rpc", "/release_memory_occupation", "/resume"])
@pytest.mark.parametrize("spelt", ["{}", "{}/", "/{}", "/x/..{}", "/.{}", "{}#x", "http://gate{}"])
def test_what_steers_an_engine_is_closed_however_it_is_spelt(method, path, spelt):
    assert classify(Site.LLM, method, spelt.format(path)).kind is Kind.CLOSED
    assert classify(Site.LLM, method, spelt.format(path.replace("e", "%65"))).kind is Kind.CLOSED


@pytest.mark.parametrize("path", OLLAMA_NEUTRAL)
def test_ollamas_housekeeping_needs_no_card(path):
    assert classify(Site.LLM, "POST", path)[:3] == (NEUTRAL, Site.LLM, Dialect.OLLAMA)


@pytest.mark.parametrize("path", ONLY_RESIDENT)
def test_what_only_a_loaded_model_can_tell_never_loads_one(path):
    assert classify(Site.LLM, "POST", path)[:2] == (RESIDENT, Site.LLM)


@pytest.mark.parametrize("path", READ)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_reading_is_neutral(method, path):
    assert classify(Site.LLM, method, path)[:2] == (NEUTRAL, Site.LLM)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/models", "/v1/models/x", "/v1/models/org%2Fx", "/v1/models/", "/api/tags", "/api/ps"]
)
def test_listings_are_listings(path):
    assert classify(Site.LLM, "GET", path).kind is LISTING


@pytest.mark.parametrize("path", CONTROLS)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_the_gates_own_paths_are_control(method, path):
    assert classify(Site.LLM, method, path).kind is CONTROL


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("DELETE", "/api/delete", NEUTRAL),
        ("DELETE", "/v1/stream", NEUTRAL),
        ("DELETE", "/v1/responses/resp_1", NEUTRAL),
        ("PUT", "/generate", WORK),
        ("PUT", "/api/chat", WORK),
        ("PATCH", "/v1/anything", WORK),
        ("PUT", "/api/show", WORK),
        ("QUERY", "/v1/chat/completions", WORK),
        ("PROPFIND", "/", WORK),
        ("TRACE", "/", NEUTRAL),
        ("OPTIONS", "*", NEUTRAL),
    ],
)
def test_other_methods_that_could_load_a_model_are_work(method, path, kind):
    assert classify(Site.LLM, method, path).kind is kind


SPELLINGS = words(
    """
    {0}/ //{1} /.{0} /./{1} {0}/. {0}// /x/..{0} /%2e%2e{0} /%2E{0} {0}#x {0}%23 {0};x=1 {0}%00 /x/%2e%2e{0}
    http://host{0} http://host:1{0} //host/..{0}
    """
)


def encoded(path: str) -> list[str]:
    """The path with its first letter, with every letter and with its slashes percent-coded."""
    every = "".join(f"%{ord(c):02x}" if c.isalpha() else c for c in path)
    return [f"{path[0]}%{ord(path[1]):02X}{path[2:]}", every, path[0] + path[1:].replace("/", "%2F")]


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/completion"])
def test_no_spelling_of_work_on_the_main_listener_is_anything_else(path):
    for spelling in [s.format(path, path[1:]) for s in SPELLINGS] + encoded(path) + [path.upper(), path + "/../chat"]:
        assert classify(Site.LLM, "POST", spelling).kind is WORK, spelling


@pytest.mark.parametrize("path", ["/prompt", "/api/prompt", "/api/api/prompt"])
def test_no_spelling_of_a_prompt_slips_past(path):
    spellings = [s.format(path, path[1:]) for s in SPELLINGS if "%23" not in s and ";" not in s and "%00" not in s]
    for spelling in spellings + encoded(path) + [path.upper(), "/api/." + path, "/api//prompt", "/API/../prompt"]:
        assert classify(Site.COMFYUI, "POST", spelling)[:2] == (WORK, Site.COMFYUI), spelling
        if spelling.startswith("/"):
            assert classify(Site.LLM, "POST", "/comfyui" + spelling)[:2] == (WORK, Site.COMFYUI), spelling


@pytest.mark.parametrize(
    "path",
    ["/api/show/../chat", "/api/blobs/../chat", "/api/blobs/%2e%2e/chat", "/slots/../completion", "/api/show/x/.."],
)
def test_a_path_that_needs_more_than_decoding_is_never_taken_for_harmless(path):
    assert classify(Site.LLM, "POST", path).kind is WORK


@pytest.mark.parametrize("path", ["/api/show/", "/api/%73how", "/api%2Fshow"])
def test_a_harmless_path_may_be_percent_coded(path):
    assert classify(Site.LLM, "POST", path).kind is NEUTRAL


COMFY = words(
    """
    /queue /history /history/ID /free /interrupt /ws /upload/image /upload/mask /view /object_info
    /system_stats /userdata/workflows%2Fa%20b.json /jobs /jobs/ID/cancel /promptx /prompts /prompt/x /x/prompt
    """
)


@pytest.mark.parametrize("path", COMFY)
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("prefix", ["", "/api"])
def test_everything_else_at_comfyui_is_neutral_with_and_without_api(method, path, prefix):
    assert classify(Site.COMFYUI, method, prefix + path) == (NEUTRAL, Site.COMFYUI, Dialect.COMFYUI, 0)
    assert classify(Site.LLM, method, "/comfyui" + prefix + path) == (NEUTRAL, Site.COMFYUI, Dialect.COMFYUI, 8)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_reading_the_prompt_queue_is_neutral(method):
    assert classify(Site.COMFYUI, method, "/prompt").kind is NEUTRAL


def test_the_mounts_strip_only_themselves():
    assert classify(Site.LLM, "POST", "/comfyui/prompt") == (WORK, Site.COMFYUI, Dialect.COMFYUI, 8)
    assert classify(Site.LLM, "GET", "/train/log") == (NEUTRAL, Site.TRAIN, Dialect.PLAIN, 6)
    assert classify(Site.LLM, "POST", "/train/start") == (WORK, Site.TRAIN, Dialect.PLAIN, 6)
    assert classify(Site.LLM, "POST", "/trainer").site is Site.LLM
    assert classify(Site.LLM, "POST", "/comfyuix").site is Site.LLM


def test_comfyuis_listener_has_only_its_health_check_from_the_gate():
    assert classify(Site.COMFYUI, "GET", "/healthz").kind is CONTROL
    assert classify(Site.COMFYUI, "GET", "/status").site is Site.COMFYUI


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages", Dialect.ANTHROPIC),
        ("/v1/messages/count_tokens", Dialect.ANTHROPIC),
        ("/api/hello", Dialect.ANTHROPIC),
        ("/api/chat", Dialect.OLLAMA),
        ("/v1/chat/completions", Dialect.OPENAI),
        ("/v1/responses", Dialect.OPENAI),
        ("/completion", Dialect.OPENAI),
        ("/sdapi/v1/txt2img", Dialect.PLAIN),
    ],
)
def test_errors_take_the_shape_of_the_api_that_was_called(path, dialect):
    assert classify(Site.LLM, "POST", path).dialect is dialect


@settings(derandomize=True)
@given(st.text(alphabet="/.%2eEfF#:apichtpromt~\x00é?", max_size=30))
def test_any_text_has_a_class_and_a_plain_path(text):
    plain = plain_path(text)
    assert plain.startswith("/")
    assert "//" not in plain.replace("://", "") or "%" in text
    for site in (Site.LLM, Site.COMFYUI):
        for method in ("GET", "POST"):
            classify(site, method, text)


# ------------------------------------------------------------------------------------ through the gateway

TARGETS = [
    "/api/userdata/workflows%2Fa%20b.json?overwrite=false&full_info=true",
    "/view?filename=%E5%9B%BE.png&subfolder=a%2Fb&type=output",
    "/x%25y;z=1?q=a+b&q=&e",
    "/a//b/./c/../d?",
    "/?",
    "/~!$&'()*+,;=:@%00?/?:@!$&'()*+,;=",
    "/%7e/%7E?%3f#frag",
]


@pytest.mark.parametrize("target", TARGETS)
@run_async
async def test_the_target_reaches_its_engine_as_it_was_written(target):
    async with bench() as b:
        b.comfy.answer()
        b.engine.answer()
        await b.ask(post(target, {}), port=b.comfy_port)
        await b.ask(get("/comfyui" + target), method="GET")
        await b.ask(get(target), method="GET")
        assert [s.target for s in b.comfy.seen] == [target, target]
        assert [s.target for s in b.engine.seen] == [target]


@pytest.mark.parametrize("path", ["/prompt", "/api/prompt", "/%70rompt", "/prompt/", "/api//prompt"])
@run_async
async def test_every_spelling_of_a_prompt_takes_the_card_and_is_followed(path):
    async with bench(quiet=False) as b:
        answer = b'{"prompt_id": "p-1", "number": 0}'
        b.comfy.answer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
        assert (await b.ask(post(path, {"prompt": {}}), port=b.comfy_port))[0] == 200
        await until(lambda: [job for _, job in b.followed] == ["p-1"])
        assert len(b.view.leases) == 1
        assert b.comfy.seen[0].target == path


@pytest.mark.parametrize("target", ["http://gate/prompt", "http://gate/api/prompt?x=1", "HTTP://gate/prompt"])
@run_async
async def test_an_absolute_target_is_read_like_any_other_and_forwarded_in_the_usual_form(target):
    async with bench(quiet=False) as b:
        go = asyncio.Event()

        async def hold(connection, seen):
            await go.wait()
            await connection.send(OK)

        b.comfy.script(hold)
        client = await b.client(b.comfy_port)
        await client.send(post(target, {"prompt": {}}))
        await until(lambda: b.comfy.seen)
        assert len(b.view.leases) == 1
        assert b.comfy.seen[0].target == "/" + target.split("/", 3)[3]
        go.set()
        assert (await client.response())[0] == 200


@run_async
async def test_an_absolute_target_on_a_mount_loses_the_mount_and_nothing_else():
    async with bench() as b:
        b.comfy.answer()
        await b.ask(get("http://gate/comfyui/queue?x=1"), method="GET")
        assert b.comfy.seen[0].target == "/queue?x=1"


@run_async
async def test_the_mount_itself_is_the_engines_root():
    async with bench() as b:
        b.comfy.answer()
        await b.ask(get("/comfyui"), method="GET")
        await b.ask(get("/comfyui/"), method="GET")
        await b.ask(get("/comfyui?x=1"), method="GET")
        assert [s.target for s in b.comfy.seen] == ["/", "/", "/?x=1"]


@run_async
async def test_a_target_with_bytes_beyond_ascii_is_answered_and_harms_nobody():
    async with bench() as b:
        b.engine.answer()
        client = await b.client()
        await client.send("GET /é HTTP/1.1\r\nHost: g\r\n\r\n".encode())
        data, _ = await client.read_all() if not b.engine.seen else (b"HTTP/1.1 200", False)
        assert data.startswith((b"HTTP/1.1 400", b"HTTP/1.1 200"))
        assert (await b.ask(get("/api/tags"), method="GET"))[0] == 200


@run_async
async def test_an_unknown_write_waits_for_the_card():
    async with bench(rules=None) as b:
        go = asyncio.Event()

        async def hold(connection, seen):
            await go.wait()
            await connection.send(b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n")

        b.comfy.script(hold)
        b.engine.answer()
        image = await b.client(b.comfy_port)
        await image.send(post("/prompt", {}))
        await until(lambda: b.comfy.seen)
        clients = []
        for request in (post("/new/api", {"model": "m"}), post("/api/ch%61t", {"model": "m"})):
            clients.append(await (await b.client()).send(request))
        put = post("/generate", {"model": "m"}).replace(b"POST", b"PUT")
        clients.append(await (await b.client()).send(put))
        await until(lambda: len(b.view.waiting) == 3)
        assert not b.engine.seen
        go.set()
        for client in clients:
            assert (await client.response())[0] == 200


@run_async
async def test_an_error_for_an_sd_client_is_plain_json():
    async with bench() as b:
        status, _, body = await b.ask(post("/sdapi/v1/txt2img", raw=b"["))
        assert (status, json.loads(body)["error"]) == (400, "bad_request")
