"""The one exception to "bytes are forwarded as they came": engines that refuse every name but their own.

A client may name a preset by an alias, a route or a capability, or not at all; vLLM and NInfer answer 404 to whatever
is not the name they were started with. Only the value of the top-level `model` is replaced; every other value stays
the bytes that it was, in its order.
"""

from __future__ import annotations

import msgspec

from gpu_turnstile.gateway.wire import RequestHead

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def renamed(head: RequestHead, body: bytes, name: str) -> bytes:
    """The body with `name` as its model. One that is compressed, a form, or no JSON object stays as it is."""
    if head.encoding or body.lstrip()[:1] != b"{":
        return body
    try:
        fields = _decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return body
    fields["model"] = msgspec.Raw(msgspec.json.encode(name))
    return msgspec.json.encode(fields)
