"""What the gate adds to a swap between two engines it owns, beyond what these need to stop and to load by themselves.

    python bench/swap.py                       # stand-ins with known times, llama.cpp and Docker if they are here
    python bench/swap.py --check               # exit code 1 if the stand-ins' overhead is above the limits
    python bench/swap.py --only standin --load 10

By hand: a process (or container) is started and asked for its health every millisecond; it is asked something; it is
ended, and waited for. Through the gate: a request for the preset that is not there, until its answer. The overhead of a
swap is its time less the medians of the other one's stop, of its own load and of its answer. Everything that the
gate does is in it: deciding, looking for strays, making sure of the memory, the record, the waits between two looks.

The limits are for the stand-ins: their times are always the same. What llama.cpp or Docker need varies from time to
time by more than the gate adds, and all that is in the overhead too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gpu_turnstile import logs
from gpu_turnstile.app import App
from gpu_turnstile.presets.schema import Preset
from gpu_turnstile.presets.store import PresetStore
from gpu_turnstile.presets.values import Address
from gpu_turnstile.runtimes.docker_config import container_config
from gpu_turnstile.runtimes.launch import child_environment
from gpu_turnstile.settings import Settings
from gpu_turnstile.sim import SimCard

HERE = Path(__file__).resolve().parent
LIMIT_MEDIAN_MS = 30.0
LIMIT_P99_MS = 100.0
BY_HAND = 8  # rounds for each preset, before and after the gate's turn
GIVE_UP = 60.0  # seconds
BODY = {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
STANDIN = [sys.executable, "-I", "-S", str(HERE / "standin.py"), "{port}"]
NAMES = ("a", "b")


class Hand(Protocol):
    """How an engine is started and ended without the gate."""

    def start(self, preset: Preset) -> int:
        """The port it will listen on."""
        ...

    def stop(self) -> None: ...


@dataclass
class Own:
    """Seconds the engine of one preset needs by itself."""

    load: list[float] = field(default_factory=list)
    stop: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)

    def median(self, what: str) -> float:
        return statistics.median(getattr(self, what))


# ------------------------------------------------------------------------------------------------------- by hand


class Process:
    """A child of ours, with the environment the gate gives."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, preset: Preset) -> int:
        port = free_port()
        environment = child_environment(os.environ, preset.environment(port))
        null = subprocess.DEVNULL
        self._child = subprocess.Popen(preset.argv(port), env=environment, stdin=null, stdout=null, stderr=null)
        return port

    def stop(self) -> None:
        assert self._child is not None
        self._child.terminate()
        self._child.wait()  # with a limit it would look every 50 ms only


class Container:
    """The same calls to Docker that a shell script would make."""

    def __init__(self, place: Path) -> None:
        transport = httpx.HTTPTransport(uds=str(place))
        self._http = httpx.Client(transport=transport, base_url="http://docker", timeout=GIVE_UP)
        self._id = ""

    def start(self, preset: Preset) -> int:
        port = free_port()
        config = container_config(preset, port)
        self._id = self._call("POST", "/containers/create", json=config).json()["Id"]
        self._call("POST", f"/containers/{self._id}/start")
        return port

    def stop(self) -> None:
        self._call("POST", f"/containers/{self._id}/stop", params={"t": 10})
        self._call("DELETE", f"/containers/{self._id}")

    def _call(self, method: str, path: str, **more: object) -> httpx.Response:
        return self._http.request(method, path, **more).raise_for_status()  # type: ignore[arg-type]


def by_hand(hand: Hand, preset: Preset, own: Own) -> None:
    with httpx.Client(trust_env=False, timeout=GIVE_UP) as http:
        for _ in range(BY_HAND):
            began = time.monotonic()
            url = f"http://127.0.0.1:{hand.start(preset)}"
            until_healthy(http, url, began + GIVE_UP)
            own.load.append(time.monotonic() - began)
            own.answer.append(timed(lambda url=url: http.post(f"{url}/v1/chat/completions", json=BODY)))
            own.stop.append(timed(hand.stop))


def until_healthy(http: httpx.Client, url: str, deadline: float) -> None:
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if http.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.001)
    raise SystemExit(f"{url} was not healthy within {GIVE_UP:g} s")


def timed(action) -> float:  # type: ignore[no-untyped-def]
    began = time.monotonic()
    action()
    return time.monotonic() - began


# ----------------------------------------------------------------------------------------------- through the gate


@contextlib.asynccontextmanager
async def gate(folder: Path, **settings: object) -> AsyncIterator[str]:
    """Its URL. The card is a simulated one that nobody holds: it is asked as a real one is."""
    card = folder / "card.json"
    SimCard(card)
    given = {"turnstile_gpu": f"sim:{card}", "listen_ollama": Address("127.0.0.1", 0), "listen_comfy": None}
    own = {"ollama_url": None, "comfy_url": None, "shutdown_timeout": 0.1}
    app = App(Settings(**given, **own, **settings), folder / "presets", folder / "state")  # type: ignore[arg-type]
    await app.start()
    try:
        yield f"http://127.0.0.1:{app.port('llm')}"
    finally:
        await app.stop()


async def through_the_gate(folder: Path, count: int) -> dict[str, list[float]]:
    """Seconds of each swap, by the preset that came."""
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    async with gate(folder) as url, httpx.AsyncClient(trust_env=False, timeout=GIVE_UP) as http:
        for n in range(count + 2):
            name = NAMES[n % 2]
            began = time.monotonic()
            answer = await http.post(f"{url}/v1/chat/completions", json={"model": name, **BODY})
            if answer.status_code not in (200, 501):  # 501: what busybox says to a POST
                raise SystemExit(f"the gate answered {answer.status_code}: {answer.text}")
            if n > 1:  # nobody had to leave for the first; the second one's way is not warm yet
                found[name].append(time.monotonic() - began)
    return found


# --------------------------------------------------------------------------------------------------------- kinds


def write(folder: Path, texts: dict[str, str]) -> None:
    (folder / "presets").mkdir()
    for name, text in texts.items():
        (folder / "presets" / f"{name}.toml").write_text(text)


def standins(folder: Path, load: float) -> Hand:
    """Their times are no multiples of each other, so that no wait of the gate always fits them."""
    texts = {}
    for name, times in (("a", (load, 0.037)), ("b", (load * 1.83, 0.113))):
        command = json.dumps([*STANDIN, *map(str, times)])
        texts[name] = f'engine = "command"\n[runtime]\nkind = "process"\ncommand = {command}\n'
    write(folder, texts)
    return Process()


def llamas(folder: Path) -> Hand:
    texts = {}
    for seed, name in enumerate(NAMES):
        model = folder / f"{name}.gguf"
        maker = [sys.executable, str(HERE.parent / "tools" / "make_tiny_gguf.py"), str(model), "--seed", str(seed)]
        subprocess.run(maker, check=True)
        command = json.dumps([sys.executable, str(HERE.parent / "tools" / "llama_server.py")])
        texts[name] = (
            f'engine = "llama-server"\n[model]\npath = "{model}"\n'
            f'[runtime]\nkind = "process"\ncommand = {command}\ncontext = 4096\n'
        )
    write(folder, texts)
    return Process()


def containers(folder: Path, image: str, place: Path) -> Hand:
    script = "echo ok > /www/health; exec httpd -f -p 8080 -h /www"
    text = (
        f'engine = "command"\n[runtime]\nkind = "docker"\nimage = "{image}"\n'
        f'command = ["sh", "-c", {json.dumps(script)}]\ngpus = []\n'
    )
    write(folder, dict.fromkeys(NAMES, text))
    return Container(place)


# --------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class Result:
    what: str
    own: dict[str, Own]
    swaps: dict[str, list[float]]

    @property
    def overhead(self) -> list[float]:
        """Milliseconds, sorted."""
        found = []
        for name, seconds in self.swaps.items():
            other = NAMES[1 - NAMES.index(name)]
            own = self.own[other].median("stop") + self.own[name].median("load") + self.own[name].median("answer")
            found += [(second - own) * 1000 for second in seconds]
        return sorted(found)

    @property
    def median(self) -> float:
        return statistics.median(self.overhead)

    @property
    def p99(self) -> float:
        return self.overhead[int(0.99 * (len(self.overhead) - 1))]

    def row(self) -> str:
        load, stop = (
            statistics.fmean(own.median(what) for own in self.own.values()) * 1000 for what in ("load", "stop")
        )
        swap = statistics.median(second for seconds in self.swaps.values() for second in seconds) * 1000
        values = (load, stop, swap, min(self.overhead), self.median, self.p99, max(self.overhead))
        return f"{self.what:18} {len(self.overhead):5} " + " ".join(f"{value:9.1f}" for value in values)


HEADER = f"{'ms':18} {'swaps':>5} " + " ".join(
    f"{name:>9}" for name in ("own load", "own stop", "swap", "min", "p50", "p99", "max")
)


async def measure(what: str, folder: Path, hand: Hand, count: int) -> Result:
    store = PresetStore(folder / "presets")
    store.refresh()
    presets = store.catalogue.presets
    own = {name: Own() for name in NAMES}
    for name in NAMES:
        await asyncio.to_thread(by_hand, hand, presets[name], own[name])
    swaps = await through_the_gate(folder, count)
    for name in NAMES:  # before and after: a machine that gets slower meanwhile is slower for both
        await asyncio.to_thread(by_hand, hand, presets[name], own[name])
    return Result(what, own, swaps)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def docker_image() -> Iterator[tuple[str, Path] | None]:
    """An image and the socket of a Docker Engine of our own; None, with the reason on standard error, without one."""
    sys.path.insert(0, str(HERE.parent))
    from tests.docker.daemon import IMAGE, Daemon, NoDaemon

    try:
        daemon = Daemon()
    except NoDaemon as reason:
        print(f"Docker is not measured: {reason}", file=sys.stderr)
        yield None
        return
    before = os.environ.get("DOCKER_HOST")
    os.environ["DOCKER_HOST"] = f"unix://{daemon.socket}"
    try:
        yield IMAGE, daemon.socket
    finally:
        os.environ.pop("DOCKER_HOST")
        if before is not None:
            os.environ["DOCKER_HOST"] = before
        daemon.close()


def run(kind: str, folder: Path, count: int, load: float) -> Result | None:
    match kind:
        case "standin":
            hand = standins(folder, load)
            return uvloop.run(measure("stand-ins", folder, hand, count))
        case "llama.cpp":
            if importlib.util.find_spec("xllamacpp") is None:
                print("llama.cpp is not measured: pip install -r requirements-real.txt", file=sys.stderr)
                return None
            return uvloop.run(measure("llama.cpp", folder, llamas(folder), count))
        case _:
            with docker_image() as found:
                if found is None:
                    return None
                return uvloop.run(measure("containers", folder, containers(folder, *found), count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="swaps for each kind of engine")
    parser.add_argument("--load", type=float, default=0.31, help="seconds the quicker stand-in takes to load")
    parser.add_argument("--only", choices=("standin", "llama.cpp", "docker"))
    limits = f"{LIMIT_MEDIAN_MS:g} ms (median), {LIMIT_P99_MS:g} ms (p99)"
    parser.add_argument("--check", action="store_true", help=f"fail if the stand-ins are above {limits}")
    given = parser.parse_args()
    logs.configure("warn", "text", None, color=False)
    print(HEADER, flush=True)
    missed = False
    for kind in (given.only,) if given.only else ("standin", "llama.cpp", "docker"):
        folder = Path(tempfile.mkdtemp(prefix="swap-"))
        try:
            result = run(kind, folder, max(2, given.count), given.load)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if result is not None:
            print(result.row(), flush=True)
            missed |= kind == "standin" and (result.median > LIMIT_MEDIAN_MS or result.p99 > LIMIT_P99_MS)
    if given.check and missed:
        print(f"allowed for stand-ins: {limits}", file=sys.stderr)
    return int(given.check and missed)


if __name__ == "__main__":
    sys.exit(main())
