"""Which models the simulated Ollama holds, for how long, and how they leave.

The rules are Ollama's scheduler's: a model is loaded for the request that names it, its own others are put out to make
room, it stays for `keep_alive` after its last answer, and "unload" is only a promise: the runner goes when its
last answer is out, and is listed until it has gone. Invariant: what is listed is on the card, and what was
listed is given back to it (late or never, if a fault says so).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gpu_turnstile.sim.base import Sim, pause, until
from gpu_turnstile.sim.card import GB
from gpu_turnstile.sim.faults import OllamaFaults

FOREVER_S = 292 * 365.25 * 86400  # what Ollama makes of a negative keep_alive
_UNLOAD_S = 0.02


class LoadError(Exception):
    """The model could not be loaded."""


@dataclass(frozen=True, slots=True)
class SimModel:
    """`gb`: what it needs on the card. `embedding`: it refuses to generate, as bge-m3 does. `context`: tokens."""

    name: str
    gb: float = 8.0
    embedding: bool = False
    context: int = 8192

    @property
    def size(self) -> int:
        return int(self.gb * GB)


@dataclass(eq=False, slots=True)
class Runner:
    """One loaded model. `vram`: bytes it got (less than its size = partly on the CPU). Times: wall clock."""

    model: SimModel
    seats: asyncio.Semaphore
    keep_alive: float
    vram: int = 0
    refs: int = 0
    expires_at: float = 0.0
    last_used: float = 0.0
    unloading: bool = False
    failed: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    def touch(self) -> None:
        self.last_used = time.time()
        self.expires_at = self.last_used + (self.keep_alive if self.keep_alive >= 0 else FOREVER_S)


class Runners:
    """`load_s`: seconds a load takes. `max_loaded`, `parallel`: as OLLAMA_MAX_LOADED_MODELS, OLLAMA_NUM_PARALLEL."""

    def __init__(self, sim: Sim[OllamaFaults], load_s: float, max_loaded: int, parallel: int) -> None:
        self._sim = sim
        self._load_s = load_s
        self._max_loaded = max_loaded
        self._parallel = parallel
        self._runners: dict[str, Runner] = {}
        self._one_load = asyncio.Lock()
        self._changed = asyncio.Event()

    def listed(self) -> list[Runner]:
        return list(self._runners.values())

    @asynccontextmanager
    async def use(self, model: SimModel, keep_alive: float) -> AsyncIterator[Runner]:
        """A seat at the model, loaded if need be. Raises LoadError."""
        runner = await self._join(model, keep_alive)
        try:
            await runner.ready.wait()
            if runner.failed:
                raise LoadError(f"llama runner process has terminated: error loading model {model.name}")
            runner.touch()
            async with runner.seats:
                yield runner
        finally:
            runner.refs -= 1
            if runner.refs == 0 and not runner.failed:
                self._rest(runner)

    def promise_unload(self, model: SimModel) -> None:
        """keep_alive 0 without a prompt: it goes as soon as nobody uses it."""
        runner = self._runners.get(model.name)
        if runner is None or runner.unloading:
            return
        runner.keep_alive = 0.0
        runner.touch()
        if runner.refs == 0 and runner.ready.is_set():
            self._unload(runner)

    def wipe(self) -> None:
        for runner in self._runners.values():
            if runner.timer is not None:
                runner.timer.cancel()
        self._runners.clear()
        self._one_load = asyncio.Lock()

    # ------------------------------------------------------------------------------------ coming

    async def _join(self, model: SimModel, keep_alive: float) -> Runner:
        while True:
            runner = self._runners.get(model.name)
            if runner is None:
                await self._load(model, keep_alive)
            elif runner.unloading:
                await runner.gone.wait()
            else:
                runner.refs += 1
                runner.keep_alive = keep_alive
                if runner.timer is not None:
                    runner.timer.cancel()
                return runner

    async def _load(self, model: SimModel, keep_alive: float) -> None:
        async with self._one_load:
            while model.name not in self._runners and len(self._runners) >= self._max_loaded:
                await self._make_room()
            if model.name not in self._runners:
                runner = Runner(model, asyncio.Semaphore(self._parallel), keep_alive)
                self._runners[model.name] = runner
                self._sim.spawn(self._loading(runner))

    async def _make_room(self) -> None:
        idle = [r for r in self._runners.values() if r.refs == 0 and r.ready.is_set() and not r.unloading]
        if idle:
            self._unload(min(idle, key=lambda runner: runner.last_used))
        self._changed.clear()
        await self._changed.wait()

    async def _loading(self, runner: Runner) -> None:
        sim, model = self._sim, runner.model
        sim.counters["loads"] += 1
        runner.touch()
        runner.vram = sim.card.hold(sim.name, model.size, part=model.name)
        await pause(self._load_s)
        if sim.faults.load_error:
            runner.failed = True
            sim.card.free(sim.name, part=model.name)
            del self._runners[model.name]
            runner.gone.set()
        runner.ready.set()
        self._changed.set()
        if runner.refs == 0 and not runner.failed:
            self._rest(runner)

    # ------------------------------------------------------------------------------------ going

    def _rest(self, runner: Runner) -> None:
        """Nobody uses it now: the time it may stay begins."""
        if runner.unloading or runner.model.name not in self._runners or not runner.ready.is_set():
            return
        runner.touch()
        self._changed.set()
        if runner.keep_alive == 0:
            self._unload(runner)
        elif runner.keep_alive > 0:
            loop = asyncio.get_running_loop()
            runner.timer = loop.call_later(runner.keep_alive, self._expired, runner)

    def _expired(self, runner: Runner) -> None:
        if runner.refs == 0 and not runner.unloading:
            self._unload(runner)

    def _unload(self, runner: Runner) -> None:
        runner.unloading = True
        runner.expires_at = min(runner.expires_at, time.time())
        if runner.timer is not None:
            runner.timer.cancel()
        self._sim.spawn(self._unloading(runner))

    async def _unloading(self, runner: Runner) -> None:
        sim, since = self._sim, time.monotonic()
        sim.counters["unloads"] += 1
        await pause(_UNLOAD_S)
        await until(lambda: 0 <= sim.faults.unload_s <= time.monotonic() - since)
        faults = sim.faults
        name = runner.model.name
        sim.card.free(sim.name, part=name, after=faults.memory_late_s, leak=faults.memory_leak)
        del self._runners[name]
        runner.gone.set()
        self._changed.set()
