"""Getting an image that is not there, and saying how far it has come.

Docker tells the progress of each layer many times a second; a person gets one line per percent. A pull may take hours;
it fails when Docker has said nothing for a while.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from gpu_turnstile.runtimes.base import StartFailed
from gpu_turnstile.runtimes.docker_api import DockerApi, Json
from gpu_turnstile.runtimes.docker_config import split_image
from gpu_turnstile.runtimes.docker_errors import DockerError

STALLED = 300.0  # seconds without a word
GB = 1e9
_ID = re.compile(r"(sha256:)?[0-9a-f]{64}")


async def ensure_image(api: DockerApi, image: str, say: Callable[[str], None]) -> None:
    """Return when Docker has it. Raises StartFailed, DockerAway, DockerError."""
    if await api.has_image(image):
        return
    if _ID.fullmatch(image):
        raise StartFailed(f"Docker has no image {image}, and what is named by its id cannot be pulled")
    say(f"pulling {image}")
    progress = Progress(image)
    try:
        async with api.pull(*split_image(image)) as told:
            lines = aiter(told)
            while True:
                async with asyncio.timeout(STALLED):
                    line = await anext(lines, None)
                if line is None:
                    break
                if "error" in line:
                    raise StartFailed(_failed(image, str(line["error"])))
                if text := progress.feed(line):
                    say(text)
    except TimeoutError:
        raise StartFailed(_failed(image, f"no progress for {STALLED:g} s")) from None
    except DockerError as error:
        raise StartFailed(_failed(image, error.message)) from None
    if not await api.has_image(image):
        raise StartFailed(_failed(image, "Docker ended the pull without having it"))
    say(f"pulled {image}")


def _failed(image: str, why: str) -> str:
    return f"Docker has no image {image}, and it could not be pulled: {' '.join(why.split())}"


class Progress:
    """Layers' bytes summed up. `feed` returns a text when it has something new to say."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._layers: dict[str, dict[str, tuple[int, int]]] = {"Downloading": {}, "Extracting": {}}
        self._said = ""

    def feed(self, line: Json) -> str | None:
        status, layer = str(line.get("status", "")), str(line.get("id", ""))
        detail = line.get("progressDetail") or {}
        if status in self._layers and detail.get("total"):
            self._layers[status][layer] = (int(detail.get("current") or 0), int(detail["total"]))
        elif status in ("Download complete", "Pull complete"):
            status = "Downloading" if status == "Download complete" else "Extracting"
            _, total = self._layers[status].get(layer, (0, 0))
            self._layers[status][layer] = (total, total)
        else:
            return None
        text = self._text(status)
        if not text or text == self._said:
            return None
        self._said = text
        return text

    def _text(self, status: str) -> str:
        done, total = map(sum, zip(*self._layers[status].values(), strict=True))
        if not total:
            return ""
        return f"pulling {self._image}: {status.lower()} {100 * done // total} % of {total / GB:.1f} GB"
