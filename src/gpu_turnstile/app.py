"""The composition root: builds every room from the settings, starts them in order, ends them in the other one.

Nothing is decided here. Presets and upstreams become seats; seats, scheduler and gateway are wired; the control API
is put behind the gateway as one more upstream.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import IO, Any

import httpx
import structlog

from gpu_turnstile import __version__, logs, wiring
from gpu_turnstile.arbiter import Arbiter, LeaseRow
from gpu_turnstile.bypass import BypassWatch
from gpu_turnstile.contexts.book import Book
from gpu_turnstile.control.app import create_app
from gpu_turnstile.control.house import House
from gpu_turnstile.control.serve import serve_control
from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Health
from gpu_turnstile.gateway.paths import Site
from gpu_turnstile.gateway.server import Gateway, Table
from gpu_turnstile.gateway.upstream import Upstream
from gpu_turnstile.gpu.gauge import Gauge
from gpu_turnstile.gpu.select import open_card
from gpu_turnstile.jobs import JobBook
from gpu_turnstile.journal.active import Journal, load
from gpu_turnstile.journal.history import History
from gpu_turnstile.journal.lookout import Lookout
from gpu_turnstile.prefetch import Prefetcher
from gpu_turnstile.presets.errors import PresetError
from gpu_turnstile.presets.files import model_files
from gpu_turnstile.presets.learned import Learned
from gpu_turnstile.presets.schema import Preset
from gpu_turnstile.presets.store import PresetStore
from gpu_turnstile.presets.values import Address
from gpu_turnstile.presets.values import address as address_of
from gpu_turnstile.runtimes.pids import pids_of
from gpu_turnstile.seating import COMFYUI, OLLAMA, Seating, StartError
from gpu_turnstile.seats import GB
from gpu_turnstile.settings import Settings
from gpu_turnstile.sleepers import Dorm
from gpu_turnstile.warm import Warmer
from gpu_turnstile.watchdog import Watchdog

log = structlog.get_logger("app")

SITES = {"comfyui": Site.COMFYUI, "a1111": Site.A1111, "invokeai": Site.INVOKEAI}
PRESETS_EVERY = 2.0  # seconds between two looks at the folder of presets
SOCKET_PATH_LIMIT = 100  # bytes; the kernel takes 108


class App:
    """One gate. `start`, then `stop`; `addresses` tells where it listens."""

    def __init__(self, settings: Settings, presets: Path, state_dir: Path) -> None:
        self.settings = settings
        self.learned = Learned(state_dir / "learned.json")
        self.store = PresetStore(presets, learned=self.learned)
        self.state_dir = state_dir
        self._refreshing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.preset_ports: dict[str, int] = {}  # of presets with a listener of their own
        self.addresses: dict[Site, tuple[str, int]] = {}
        self._gauge = Gauge(_card(settings.turnstile_gpu))
        self.prefetcher = Prefetcher()

    async def start(self) -> None:
        """Raises StartError; then nothing is left running."""
        self._lock = _lock_folder(self.state_dir)
        try:
            await self._start()
        except BaseException:
            self._lock.close()
            raise

    async def _start(self) -> None:
        settings = self.settings
        self._http = httpx.AsyncClient(trust_env=False)
        await asyncio.to_thread(self.store.refresh)
        if self.store.error is not None:
            raise StartError(str(self.store.error))
        timing = wiring.timing(settings)
        self.dorm = Dorm(int(settings.llmc_sleep_ram_gb * GB), self._tell)
        self.seating = Seating(settings, self.store, self.state_dir, self._http, self._gauge, timing, self.dorm)
        await self.seating.end_forgotten()
        await self.seating.find_containers()
        await asyncio.to_thread(self.seating.open_contexts, self._tell)
        self.journal = Journal(self.state_dir)
        self.history = History(self.state_dir)
        self.arbiter = Arbiter(
            self.seating.seats(),
            wiring.rules(settings, await self._gauge.read()),
            remember=self.journal.remember,
            remembered=load(self.state_dir),
            durable=self.journal.flush,
            lock_ttl=settings.llmc_lock_ttl_s,
            fail_closed=settings.llmc_vram_unknown == "refuse",
        )
        self.dorm.know(seat.bed for seat in self.arbiter.seats.values())
        self.jobs = JobBook(self.arbiter, timing)
        self.bypass = BypassWatch(
            self.arbiter,
            self.jobs,
            settings.turnstile_bypass_poll,
            wait=settings.turnstile_bypass == "wait",
        )
        self.arbiter.watch(self.history.take)
        self.arbiter.on_lease_end = self._lease_ended
        self.lookout = Lookout(
            self.history, read=self._gauge.read, ours=self._engine_pids, leases=self.arbiter.open_leases
        )
        self.control = Upstream("control", "unix:")
        self.gateway = Gateway(self.arbiter, self._table(), self.control, wiring.options(settings), self.jobs.follow)
        self.watchdog = Watchdog(self.arbiter, self.gateway.quiet, settings.llmc_watchdog_s)
        self._rounds = (self.bypass.rounds, self.lookout.rounds, self.watchdog.rounds)
        self.arbiter.watch(self._on_note)
        if settings.warm_model and self.seating.has_external(OLLAMA):
            self._warmer = Warmer(self.arbiter, OLLAMA, settings.warm_model)
        self.house = House(
            settings=settings,
            store=self.store,
            arbiter=self.arbiter,
            gateway=self.gateway,
            state_dir=self.state_dir,
            started=time.time(),
            jobs=self.jobs.view,
            bypass=self.bypass.view,
            image_jobs=self.jobs.ends,
            gauge=self._gauge,
            history=self.history,
            lookout=self.lookout,
            contexts=self.contexts,
            dorm=self.dorm,
            refresh=self.refresh,
            register=self.register,
            remove=self.remove,
            http=self._http,
            suspects=self.watchdog.view,
            restarts=lambda: self.watchdog.restarts,
        )
        try:
            self._serving = await serve_control(create_app(self.house), _private_place(self.state_dir))
        except OSError as error:
            raise StartError(
                f"the control API cannot start: {error.filename or ''} {error.strerror or error}"
            ) from None
        self.gateway.control = Upstream("control", self._serving.url, idle_limit=30.0)
        await self._probe_externals()
        self.history.start()
        await self.arbiter.start()
        await self.bypass.take_over()
        for rounds in self._rounds:
            rounds.start()
        self._start_task(self._watch_presets())
        try:
            await self._listen()
        except StartError:
            await self.stop()
            raise

    @property
    def contexts(self) -> Book | None:
        """Where conversations are kept over their engine's absence; None = they are not."""
        return self.seating.contexts

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        self.arbiter.tell(kind, fields)

    def _lease_ended(self, row: LeaseRow) -> None:
        self.history.lease(row)
        if self.contexts is not None:
            self.contexts.answered(row[1])

    async def _probe_externals(self) -> None:
        """Once at the start; an engine that does not answer is a line in the log, no reason not to start."""
        for seat in self.seating.externals:
            probe = await seat.engine.probe()
            if probe.health is not Health.READY:
                log.warning(
                    "not_ready", engine=seat.tenant.name, url=seat.engine.url, reason=probe.detail or probe.health
                )

    async def _listen(self) -> None:
        """The two listeners of the turnstile document, and those that presets of external engines ask for."""
        for site, name in ((Site.LLM, "LISTEN_OLLAMA"), (Site.COMFYUI, "LISTEN_COMFY")):
            address = getattr(self.settings, name.lower())
            if address is not None:
                self.addresses[site] = (address.host, await self._open_listener(name, address, site, None))
        for preset in self.store.catalogue.presets.values():
            address = address_of(preset.runtime.listen or "off")
            if address is not None:
                where = f"preset {preset.name!r}"
                port = await self._open_listener(where, address, SITES.get(preset.engine, Site.LLM), preset.name)
                self.preset_ports[preset.name] = port

    async def _open_listener(self, what: str, address: Address, site: Site, bound: str | None) -> int:
        try:
            port = await self.gateway.listen(site, address.host, address.port, bound)
        except OSError as error:
            raise StartError(f"{what}: cannot listen on {address}: {error.strerror or error}") from None
        if not self.settings.turnstile_api_keys and address.host not in ("127.0.0.1", "::1", "localhost"):
            log.warning("open_listener", address=str(address), advice="reachable from other machines without keys")
        return port

    def hurry(self) -> None:
        """Somebody asked twice: let nothing run on."""
        self.arbiter.hurry()

    async def stop(self) -> None:
        self.gateway.stop_listening()
        await self._end_tasks()
        self.prefetcher.cancel()
        for rounds in self._rounds:
            await rounds.stop()
        self.dorm.closed = True
        await self.arbiter.shutdown(self.settings.shutdown_timeout)
        await self.dorm.close()
        await self._serving.stop()
        await self.gateway.close()
        if self.contexts is not None:
            await self.contexts.close()
        self.journal.close()
        await asyncio.to_thread(self.history.close)
        await self.seating.close()
        await self._http.aclose()
        self._gauge.card.close()
        self._lock.close()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that goes on beside; it ends with the gate. What goes wrong in it is a line in the log."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task failed", exc_info=task.exception())

    async def _end_tasks(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def port(self, site: str) -> int:
        """The port of the listener for `llm` or `comfyui`."""
        return self.addresses[Site(site)][1]

    # -------------------------------------------------------------------------------------------- wiring

    def look_again(self) -> None:
        """Somebody sent SIGHUP, as one does after an edit, or by closing a terminal: no reason to end."""
        if self.addresses:  # it has started
            self._looking = asyncio.ensure_future(self.refresh())  # a task nobody holds may be collected

    async def refresh(self) -> None:
        """Look at the presets' folder; a new catalogue goes to the arbiter and the gateway."""
        async with self._refreshing:
            said = self.store.error
            if await asyncio.to_thread(self.store.refresh):
                self._retell()
            self._say_error(said)

    def _say_error(self, said: PresetError | None) -> None:
        """Once, when it begins and when it has ended."""
        error = self.store.error
        if str(error) == str(said):
            return
        if error is not None:
            log.warning("presets_not_reloaded", reason=str(error), consequence="the last good state stays in force")
        else:
            log.warning("presets_good_again", presets=len(self.store.catalogue.presets))

    async def register(self, given: dict[str, Any]) -> Preset:
        """Add an ephemeral preset. Raises PresetError."""
        async with self._refreshing:
            preset = await asyncio.to_thread(self.store.register, given)
            self._retell()
        return preset

    async def remove(self, name: str) -> bool:
        """Forget an ephemeral preset; on the card, it drains and leaves. False = there is none of that name."""
        async with self._refreshing:
            found = await asyncio.to_thread(self.store.remove, name)
            self._retell()
        return found

    async def _learn(self, name: str) -> None:
        """A preset was loaded: what it took is what it will take the next time.

        Not so an image server: it loads its models with its first job.
        """
        seat, preset = self.arbiter.seat(name), self.store.catalogue.presets.get(name)
        if seat is None or preset is None or not seat.owned or not seat.held or preset.mode is Mode.COMFYUI:
            return
        async with self._refreshing:
            if await asyncio.to_thread(self.learned.note, name, preset.revision, seat.held):
                await asyncio.to_thread(self.store.size_up)
                self._retell()

    async def _watch_presets(self) -> None:
        """So that an edited file takes effect without anybody asking for a listing."""
        while True:
            await asyncio.sleep(PRESETS_EVERY)
            await self.refresh()

    def _retell(self) -> None:
        self.arbiter.presets_changed(self.seating.seats())
        self.dorm.know(seat.bed for seat in self.arbiter.seats.values())
        self._start_task(self.dorm.sweep())
        self.gateway.table = self._table()

    async def _engine_pids(self) -> frozenset[int]:
        """Of every engine, also of one whose preset is gone and that has not left the card yet."""
        snapshot = self.arbiter.snapshot()
        names = {*self.arbiter.seats, *snapshot.residents, *snapshot.stuck}
        return await pids_of(seat.runtime for name in names if (seat := self.arbiter.seat(name)) is not None)

    def _table(self) -> Table:
        """Which tenant serves which site, and what a request can name."""
        presets = self.store.catalogue.presets.values()
        external = OLLAMA if self.seating.has_external(OLLAMA) else None
        by_mode = {preset.mode: preset.name for preset in reversed(list(presets))}
        comfy = COMFYUI if self.seating.has_external(COMFYUI) else None
        return Table(
            directory=self.store.catalogue.directory(external=external, unknown=self.settings.llmc_unknown_model),
            external=external,
            comfyui=by_mode.get(Mode.COMFYUI, comfy),
            train=by_mode.get(Mode.TRAIN),
            listing_is_ours=any(preset.mode is Mode.LLM for preset in presets),
            served={preset.name: preset.served_as for preset in presets if preset.served_as is not None},
        )

    def _on_note(self, kind: str, fields: dict[str, object]) -> None:
        if kind == "evicting":
            self.gateway.close_idle(str(fields["tenant"]))
        elif kind == "drain" and self.settings.llmc_prefetch:
            preset = self.store.catalogue.presets.get(str(fields["target"]))
            if preset is not None and preset.runtime.kind != "external":
                self.prefetcher.begin(model_files(preset))
        elif kind in ("swapped", "swap_failed"):
            self.prefetcher.cancel()
        elif kind == "admitted":
            self._start_task(self._learn(str(fields["tenant"])))
        logs.narrate(kind, fields)


def _card(spec: str):  # type: ignore[no-untyped-def]
    try:
        return open_card(spec)
    except ValueError as error:
        raise StartError(f"TURNSTILE_GPU: {error}") from None


def _private_place(state_dir: Path) -> Path | int:
    """Where the control API listens: a socket file in the state folder, or any loopback port."""
    if not hasattr(socket, "AF_UNIX"):
        return 0
    path = state_dir / "control.sock"
    if len(str(path).encode()) < SOCKET_PATH_LIMIT:
        return path
    return Path(tempfile.mkdtemp(prefix="turnstile-")) / "control.sock"


def _lock_folder(state_dir: Path) -> IO[str]:
    """One gate for each state folder: two would end each other's engines. Held as long as the file is open."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.fdopen(os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+")
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise StartError(
                f"another gate is running with the state folder {state_dir} (TURNSTILE_STATE_DIR)"
            ) from None
    return file


async def _serve(settings: Settings, presets: Path, state_dir: Path) -> int:
    app = App(settings, presets, state_dir)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: app.hurry() if ended.is_set() else ended.set())
    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, app.look_again)
    gc.collect()
    await app.start()
    # What is there for good, 90,000 objects of libraries, is never looked through again: a full collection would
    # stop every stream for 0.1 to 0.2 s.
    gc.freeze()
    logs.announce(settings, presets, state_dir)
    log.warning("listening", version=__version__, **{s.value: f"{h or '*'}:{p}" for s, (h, p) in app.addresses.items()})
    await ended.wait()
    log.warning("stopping", limit_s=settings.shutdown_timeout)
    await app.stop()
    return 0


def run(settings: Settings, presets: Path, state_dir: Path) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code. What cannot start says so in one line and returns 2."""
    logs.configure(settings.loglevel, settings.log_format, settings.log_file, color=not settings.no_color)
    try:
        if sys.platform == "win32":
            return asyncio.run(_serve(settings, presets, state_dir))
        import uvloop

        return uvloop.run(_serve(settings, presets, state_dir))
    except StartError as error:
        print(f"turnstile: {error}", file=sys.stderr)
        return 2
