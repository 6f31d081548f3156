"""The pictures of the simulated ComfyUI: uploads, and what jobs wrote. Every picture a job writes is one pixel."""

from __future__ import annotations

import base64
from email import message_from_bytes
from pathlib import PurePosixPath

from starlette.requests import Request
from starlette.responses import Response

from gpu_turnstile.sim.comfy_http import JsonAnswer, empty
from gpu_turnstile.sim.comfy_queue import Queue

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
_PLACES = ("input", "output", "temp")


class Files:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    async def view(self, request: Request) -> Response:
        name, place = request.query_params.get("filename", ""), request.query_params.get("type", "output")
        if not name:
            return empty(404)
        if place not in _PLACES or ".." in name or name.startswith("/"):
            return empty(400)
        if place == "input":
            content = self._queue.inputs.get(name)
        else:
            content = PIXEL if self._queue.files.get(name) == place else None
        if content is None:
            return empty(404)
        headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": f'filename="{name}"'}
        return Response(content, media_type="image/png", headers=headers)

    async def upload(self, request: Request) -> Response:
        """A name that is taken by another picture gets a number, unless it is to be overwritten."""
        fields = _form(request.headers.get("content-type", ""), await request.body())
        name, content = fields.get("image", ("", b""))
        folder, place = _text(fields, "subfolder"), _text(fields, "type") or "input"
        if not name or ".." in PurePosixPath(folder, name).parts:
            return empty(400)
        path, number = PurePosixPath(name), 0
        while _text(fields, "overwrite") not in ("true", "1") and self._queue.inputs.get(name, content) != content:
            number += 1
            name = f"{path.stem} ({number}){path.suffix}"
        self._queue.inputs[name] = content
        return JsonAnswer({"name": name, "subfolder": folder, "type": place})


def _form(content_type: str, body: bytes) -> dict[str, tuple[str, bytes]]:
    """The fields of a multipart form: name -> (file name, content); nothing of anything else."""
    message = message_from_bytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body)
    fields: dict[str, tuple[str, bytes]] = {}
    for part in message.walk():
        name, content = part.get_param("name", header="content-disposition"), part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(content, bytes):
            fields[name] = (part.get_filename() or "", content)
    return fields


def _text(fields: dict[str, tuple[str, bytes]], name: str) -> str:
    return fields.get(name, ("", b""))[1].decode(errors="replace")
