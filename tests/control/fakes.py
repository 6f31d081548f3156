"""A house on a real arbiter and a real gateway, with engines that are a few lines of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx

from gpu_turnstile.arbiter import Arbiter, Ticket
from gpu_turnstile.control.app import create_app
from gpu_turnstile.control.house import House
from gpu_turnstile.core.model import Mode, Tenant
from gpu_turnstile.core.policy import Order, Rules
from gpu_turnstile.core.routes import Directory
from gpu_turnstile.engines.base import Health, Loaded, Probe, Release, Released
from gpu_turnstile.gateway.server import Gateway, Options, Table
from gpu_turnstile.gateway.upstream import Upstream
from gpu_turnstile.gpu.base import Holder, Reading
from gpu_turnstile.gpu.gauge import Gauge
from gpu_turnstile.gpu.none import NoCard
from gpu_turnstile.presets.store import PresetStore
from gpu_turnstile.runtimes.base import StartFailed
from gpu_turnstile.seats import Limits, Seat
from gpu_turnstile.settings import Settings

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 15))


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that happens on this loop; `run` bounds it."""
    while not condition():  # noqa: ASYNC110 (there is no event for every condition)
        await asyncio.sleep(0.001)


class FakeEngine:
    kind: ClassVar[str] = "fake"
    mode: ClassVar[Mode] = Mode.LLM

    def __init__(self, url: str = "http://127.0.0.1:1") -> None:
        self.url = url
        self.held = False

    async def probe(self) -> Probe:
        return Probe(Health.READY)

    async def loaded(self) -> tuple[Loaded, ...] | None:
        return (Loaded("m"),) if self.held else ()

    async def busy(self) -> bool | None:
        return False

    async def release(self) -> Release:
        return Release(Released.EMPTY)


class FakeRuntime:
    kind: ClassVar[str] = "process"
    owned: ClassVar[bool] = True

    def __init__(self) -> None:
        self.on_exit: Callable[[str], None] | None = None
        self.running = False
        self.broken = ""
        self.may_stop = asyncio.Event()
        self.may_stop.set()

    async def start(self) -> None:
        if self.broken:
            raise StartFailed(self.broken)
        self.running = True

    async def stop(self) -> None:
        await self.may_stop.wait()
        self.running = False

    async def alive(self) -> bool:
        return self.running

    async def adopt(self) -> bool:
        return self.running

    def output(self) -> tuple[str, ...]:
        return ()


class ExternalFake(FakeRuntime):
    kind: ClassVar[str] = "external"
    owned: ClassVar[bool] = False


class SmallCard:
    kind: ClassVar[str] = "sim"
    name = "a small card"

    def read(self) -> Reading | None:
        return Reading(total=32 << 30, used=8 << 30, holders=(Holder(4711, "llama-server", 7 << 30),))

    def close(self) -> None:
        """Nothing is open."""


LLAMA = 'engine = "llama-server"\n{top}\n[model]\npath = "/models/{stem}.gguf"\n[runtime]\nkind = "process"\n{runtime}'
LLAMA_RUNTIME = 'command = ["llama-server"]\ncontext = 4096\nvram_gb = 21.5\n'
COMFY = 'engine = "comfyui"\n[runtime]\nkind = "external"\nurl = "http://127.0.0.1:8189"\n'


@dataclass
class Stage:
    """What a test may touch."""

    house: House
    http: httpx.AsyncClient
    app: Any
    seats: dict[str, Seat]

    def take(self, name: str, client: str = "somebody") -> Ticket:
        return self.house.arbiter.acquire((name,), client=client, on_answer=lambda t: None, on_cut=lambda why: None)

    async def settled(self) -> None:
        """Wait until no swap is under way."""
        task = self.house.arbiter._swap
        if task is not None:
            await asyncio.wait([task])

    async def get(self, path: str) -> Any:
        reply = await self.http.get(path)
        assert reply.status_code == 200, reply.text
        return reply.json()


def seat(name: str, mode: Mode = Mode.LLM, **tenant: Any) -> Seat:
    runtime = tenant.pop("runtime", None) or FakeRuntime()
    engine = FakeEngine(tenant.pop("url", f"http://127.0.0.1/{name}"))
    exclusive = mode is Mode.COMFYUI
    return Seat(
        Tenant(name, mode, exclusive=exclusive, rank=int(exclusive), **tenant),
        engine,
        runtime,
        Gauge(NoCard()),
        Limits(5.0, 1.0),
    )


def presets(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    first = LLAMA.format(top='aliases = ["gpt-4o"]\ncapabilities = ["vision"]', stem="one-Q4", runtime=LLAMA_RUNTIME)
    (folder / "one.toml").write_text(first)
    (folder / "two.toml").write_text(LLAMA.format(top="", stem="two-Q4", runtime=LLAMA_RUNTIME))
    (folder / "pictures.toml").write_text(COMFY)
    return folder


@asynccontextmanager
async def stage(tmp: Path, *, refresh: Callable[[], Awaitable[None]] | None = None, **house: Any) -> Any:
    """Presets `one` and `two` (language models) and `pictures` (ComfyUI, leaves at once when idle)."""
    seats = {s.tenant.name: s for s in (seat("one"), seat("two"), seat("pictures", Mode.COMFYUI, linger=0.0))}
    arbiter = Arbiter(seats.values(), Rules(order=Order.ARRIVAL))
    table = Table(Directory(names=("one", "two"), aliases={"gpt-4o": "one"}), comfyui="pictures")
    gateway = Gateway(arbiter, table, Upstream("control", "unix:/nowhere"), Options(), lambda ticket, job: None)
    store = PresetStore(presets(tmp / "presets"))
    store.refresh()

    async def reread() -> None:
        store.refresh()

    async def register(given: dict[str, Any]) -> Any:
        return store.register(given)

    async def remove(name: str) -> bool:
        return store.remove(name)

    built = House(
        settings=house.pop("settings", Settings()),
        store=store,
        arbiter=arbiter,
        gateway=gateway,
        state_dir=tmp / "state",
        refresh=refresh or reread,
        register=register,
        remove=remove,
        **house,
    )
    app = create_app(built)
    await arbiter.start()
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gate") as http:
        yield Stage(built, http, app, seats)
    app.state.feed.close()
    await arbiter.shutdown(0.0)
