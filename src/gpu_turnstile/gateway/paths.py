"""One table: (listener, method, path) -> what a request is. For every client API, in one place.

work      it uses the card: it needs a lease, and the model it names decides whose
resident  only an engine that is on the card can answer it (counting tokens, slots); it never brings one in
neutral   reading, listing, uploading, websockets: it goes to the engine at once and never takes the card
listing   the presets' list where there are presets, else neutral
control   the gate's own API
closed    nobody's: how an engine is put to sleep, given other weights or made to run a method belongs to the gate alone

Connections are not activity: a browser tab that polls `/queue` for ever is neutral. What writes to a GPU engine and is
not listed is work, because an engine that loads a model behind the gate's back is what the gate exists to prevent.
SGLang generates on PUT, too; DELETE loads nothing anywhere.

A path is read as the most forgiving engine would read it: percent-codes decoded (`%2F` too), empty segments and dots
resolved, a trailing slash and a fragment dropped. Only what an engine could not take for anything else is neutral: a
write whose spelling needs more than decoding is work. What is forwarded is the target as it was sent.

Sources: the turnstile document's endpoint table; the routes of ollama, llama-server, vLLM, SGLang and ComfyUI.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import NamedTuple
from urllib.parse import unquote


class Kind(Enum):
    WORK = "work"
    RESIDENT = "resident"
    NEUTRAL = "neutral"
    LISTING = "listing"
    CONTROL = "control"
    CLOSED = "closed"


class Site(StrEnum):
    """Which engine a path belongs to."""

    LLM = "llm"
    COMFYUI = "comfyui"
    A1111 = "a1111"
    INVOKEAI = "invokeai"
    TRAIN = "train"
    CONTROL = "control"


class Dialect(StrEnum):
    """Whose shape errors and keep-alives take."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"
    COMFYUI = "comfyui"
    PLAIN = "plain"


class Place(NamedTuple):
    """`strip`: bytes of the target's path that name the mount and are not the engine's."""

    kind: Kind
    site: Site
    dialect: Dialect
    strip: int = 0


_READS = frozenset(("GET", "HEAD", "OPTIONS"))
_HARMLESS = _READS | {"DELETE", "TRACE"}

# The gate's own paths on the main listener; a trailing slash means everything below.
_CONTROL = frozenset(
    (
        "/status",
        "/health",
        "/healthz",
        "/metrics",
        "/mode",
        "/lock",
        "/unlock",
        "/unload",
        "/contention",
        "/events",
        "/ui",
        "/docs",
        "/openapi.json",
        "/v1/presets",
        "/v1/contexts",
    )
)
_CONTROL_BELOW = ("/ui/", "/docs/", "/v1/presets/", "/v1/contexts/", "/gpu-turnstile/")
_CONTROL_COMFY = frozenset(("/healthz",))

_A1111_WORK = frozenset(
    (
        "/sdapi/v1/txt2img",
        "/sdapi/v1/img2img",
        "/sdapi/v1/extra-single-image",
        "/sdapi/v1/extra-batch-images",
        "/sdapi/v1/interrogate",
        "/sdapi/v1/refresh-checkpoints",
        "/sdapi/v1/reload-checkpoint",
        "/run/predict",
        "/queue/join",
    )
)

_LISTINGS = frozenset(("/v1/models", "/models", "/api/tags", "/api/ps"))
_LISTINGS_BELOW = ("/v1/models/",)

# POSTs of the native Ollama API that use no GPU.
_OLLAMA_NEUTRAL = frozenset(
    (
        "/api/show",
        "/api/pull",
        "/api/push",
        "/api/copy",
        "/api/create",
        "/api/delete",
        "/api/me",
        "/api/signin",
        "/api/signout",
        "/api/web_search",
        "/api/web_fetch",
    )
)
_OLLAMA_NEUTRAL_BELOW = ("/api/blobs/", "/api/experimental/")
# POSTs of llama-server, vLLM and friends that only look at text or at what the server holds: a tokenizer is part of a
# loaded model, so nobody but the resident can answer.
_LLM_RESIDENT = frozenset(
    (
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/slots",
        "/props",
        "/lora-adapters",
        "/cvectors",
        "/v1/messages/count_tokens",
        "/messages/count_tokens",
        "/chat/completions/input_tokens",
        "/v1/chat/completions/input_tokens",
        "/responses/input_tokens",
        "/v1/responses/input_tokens",
        "/v1/chat/completions/control",
        "/v1/streams/lookup",
        "/abort_request",
    )
)
_LLM_RESIDENT_BELOW = ("/slots/", "/cvectors/")
# What vLLM in its development mode and SGLang take from whoever reaches their port. `/collective_rpc` runs methods by
# name, the others pull the card out from under the gate's books or let files of the machine be read as weights.
_ENGINE_ONLY = frozenset(
    (
        "/sleep",
        "/wake_up",
        "/collective_rpc",
        "/server_info",
        "/pause",
        "/resume",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/scale_elastic_ep",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/init_weights_send_group_for_remote_instance",
        "/send_weights_to_remote_instance",
        "/start_profile",
        "/stop_profile",
        "/set_internal_state",
        "/configure_logging",
    )
)
_ANTHROPIC = ("/v1/messages", "/messages", "/api/hello")
_PLAIN = ("/sdapi/",)


def classify(listener: Site, method: str, path: str) -> Place:
    """What a request to `path` (the target up to `?`) is, on the main listener (Site.LLM) or an image server's own."""
    if listener is Site.COMFYUI:
        return _comfyui(method, path, 0, own=True)
    if listener is Site.A1111 or listener is Site.INVOKEAI:
        return _image_server(listener, method, plain_path(path))
    plain = plain_path(path)
    if plain in _CONTROL or plain.startswith(_CONTROL_BELOW):
        return Place(Kind.CONTROL, Site.CONTROL, Dialect.PLAIN)
    if path.startswith("/comfyui/") or path == "/comfyui":
        return _comfyui(method, path[8:], 8, own=False)
    if path.startswith("/train/") or path == "/train":
        kind = Kind.NEUTRAL if method in _READS else Kind.WORK
        return Place(kind, Site.TRAIN, Dialect.PLAIN, 6)
    return _llm(method, path, plain)


def plain_path(path: str) -> str:
    """The path as the most forgiving engine reads it; of an absolute target, what follows the authority."""
    path = path.partition("#")[0]
    if not path.startswith("/"):
        path = "/" + path.partition("://")[2].partition("/")[2]
    segments: list[str] = []
    for segment in unquote(path, "latin-1").split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    return "/" + "/".join(segments)


def _comfyui(method: str, path: str, strip: int, own: bool) -> Place:
    """Only `POST /prompt` is image work; every route exists again under `/api`."""
    plain = plain_path(path)
    if own and plain in _CONTROL_COMFY:
        return Place(Kind.CONTROL, Site.CONTROL, Dialect.PLAIN)
    bare = plain.lower()
    while bare.startswith("/api/"):
        bare = bare[4:]
    kind = Kind.WORK if method not in _HARMLESS and bare == "/prompt" else Kind.NEUTRAL
    return Place(kind, Site.COMFYUI, Dialect.COMFYUI, strip)


def _image_server(site: Site, method: str, plain: str) -> Place:
    """Image servers with a listener of their own: what they are asked to paint is work, the rest of their page is not.

    A1111 and Forge paint on POSTs of their API and on what their page's framework sends; InvokeAI on what is queued.
    """
    if plain in _CONTROL_COMFY:
        return Place(Kind.CONTROL, Site.CONTROL, Dialect.PLAIN)
    if method in _HARMLESS:
        work = False
    elif site is Site.A1111:
        work = plain in _A1111_WORK
    else:
        work = plain.endswith(("/enqueue_batch", "/enqueue_graph"))
    return Place(Kind.WORK if work else Kind.NEUTRAL, site, Dialect.PLAIN)


def _llm(method: str, path: str, plain: str) -> Place:
    return Place(_llm_kind(method, path, plain), Site.LLM, _dialect(plain))


def _dialect(plain: str) -> Dialect:
    if plain.startswith(_ANTHROPIC):
        return Dialect.ANTHROPIC
    if plain.startswith(_PLAIN):
        return Dialect.PLAIN
    return Dialect.OLLAMA if plain.startswith("/api/") else Dialect.OPENAI


def _llm_kind(method: str, path: str, plain: str) -> Kind:
    if plain in _ENGINE_ONLY:
        return Kind.CLOSED
    if method in ("GET", "HEAD") and (plain in _LISTINGS or plain.startswith(_LISTINGS_BELOW)):
        return Kind.LISTING
    if method in _HARMLESS:
        return Kind.NEUTRAL
    if method != "POST" or unquote(path, "latin-1").rstrip("/") != plain:
        return Kind.WORK
    if plain in _OLLAMA_NEUTRAL or plain.startswith(_OLLAMA_NEUTRAL_BELOW):
        return Kind.NEUTRAL
    if plain in _LLM_RESIDENT or plain.startswith(_LLM_RESIDENT_BELOW):
        return Kind.RESIDENT
    return Kind.WORK
