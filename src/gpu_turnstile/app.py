"""The composition root: builds every room from the settings, starts them in order, ends them in the other one.

Nothing is decided here. Presets and upstreams become seats; seats, scheduler and gateway are wired; the control API
is put behind the gateway as one more upstream.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import httpx
import structlog

from gpu_turnstile import __version__, logs
from gpu_turnstile.arbiter import Arbiter, LeaseRow
from gpu_turnstile.bypass import BypassWatch
from gpu_turnstile.contexts.book import Book
from gpu_turnstile.contexts.book import Rules as ContextRules
from gpu_turnstile.contexts.fingerprint import flag_value
from gpu_turnstile.contexts.identity import facts
from gpu_turnstile.contexts.keeper import Keeper
from gpu_turnstile.contexts.store import Store, StoreError
from gpu_turnstile.control.app import create_app
from gpu_turnstile.control.house import House
from gpu_turnstile.control.serve import serve_control
from gpu_turnstile.core.budget import capacity
from gpu_turnstile.core.model import Mode, Sized, Tenant
from gpu_turnstile.core.policy import Rules
from gpu_turnstile.engines.base import Health, Timing
from gpu_turnstile.engines.comfyui import ComfyUI
from gpu_turnstile.engines.llama_server import LlamaServer
from gpu_turnstile.engines.ollama import Ollama
from gpu_turnstile.engines.registry import ENGINES
from gpu_turnstile.gateway.paths import Site
from gpu_turnstile.gateway.server import Gateway, Options, Table
from gpu_turnstile.gateway.upstream import Upstream
from gpu_turnstile.gpu.base import Reading
from gpu_turnstile.gpu.gauge import Gauge
from gpu_turnstile.gpu.select import open_card
from gpu_turnstile.jobs import JobBook
from gpu_turnstile.journal.active import Journal, load
from gpu_turnstile.journal.history import History, Lookout
from gpu_turnstile.prefetch import Prefetcher
from gpu_turnstile.presets.errors import PresetError
from gpu_turnstile.presets.files import model_files
from gpu_turnstile.presets.learned import Learned
from gpu_turnstile.presets.schema import Preset
from gpu_turnstile.presets.store import PresetStore
from gpu_turnstile.presets.values import Address
from gpu_turnstile.presets.values import address as address_of
from gpu_turnstile.runtimes import records
from gpu_turnstile.runtimes.base import Runtime, StopFailed
from gpu_turnstile.runtimes.docker import DockerRuntime
from gpu_turnstile.runtimes.docker_config import container_config
from gpu_turnstile.runtimes.docker_errors import DockerAway, DockerError
from gpu_turnstile.runtimes.docker_host import DockerHost, gate_id, socket_path
from gpu_turnstile.runtimes.external import ExternalRuntime
from gpu_turnstile.runtimes.pids import pids_of
from gpu_turnstile.runtimes.process import ProcessRuntime, end_forgotten
from gpu_turnstile.runtimes.systemd import SystemdRuntime
from gpu_turnstile.seats import GB, Limits, Seat
from gpu_turnstile.settings import Settings
from gpu_turnstile.warm import Warmer
from gpu_turnstile.watchdog import Watchdog

log = structlog.get_logger("app")

OLLAMA, COMFYUI = "ollama", "comfyui"  # the names of the tenants that somebody else runs
IMAGE_RANK = 1
SITES = {"comfyui": Site.COMFYUI, "a1111": Site.A1111, "invokeai": Site.INVOKEAI}
STOP_GRACE = {"process": 10.0, "docker": 10.0, "systemd": 90.0, "external": 0.0}  # seconds, where a preset says nothing
PRESETS_EVERY = 2.0  # seconds between two looks at the folder of presets
IN_A_CONTAINER = Path("/.dockerenv")  # its paths are not the Docker host's
SOCKET_PATH_LIMIT = 100  # bytes; the kernel takes 108


class StartError(Exception):
    """The gate cannot start. The text is one line for a person."""


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
        self._limits = Limits(settings.llmc_health_timeout, settings.unload_timeout)
        self._timing = _timing(settings)
        self._ports: dict[str, int] = {}  # of engines whose preset names none
        self._docker: DockerHost | None = None
        self.contexts: Book | None = None  # None = conversations are not saved
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
        await self._end_forgotten()
        await self._find_containers()
        self._externals = list(self._external_seats())
        self.contexts = await asyncio.to_thread(self._open_contexts)
        self.journal = Journal(self.state_dir)
        self.history = History(self.state_dir)
        self.arbiter = Arbiter(
            self._seats(),
            _rules(settings, await self._gauge.read()),
            remember=self.journal.remember,
            remembered=load(self.state_dir),
            durable=self.journal.flush,
            lock_ttl=settings.llmc_lock_ttl_s,
            fail_closed=settings.llmc_vram_unknown == "refuse",
        )
        self.jobs = JobBook(self.arbiter, self._timing)
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
        self.gateway = Gateway(self.arbiter, self._table(), self.control, _options(settings), self.jobs.follow)
        self.watchdog = Watchdog(self.arbiter, self.gateway.quiet, settings.llmc_watchdog_s)
        self.arbiter.watch(self._on_note)
        if settings.warm_model and self._has_external(OLLAMA):
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
        self.bypass.start()
        self.lookout.start()
        self.watchdog.start()
        self._start_task(self._watch_presets())
        try:
            await self._listen()
        except StartError:
            await self.stop()
            raise

    def _open_contexts(self) -> Book | None:
        """The folder of saved conversations. One that cannot be used costs them, not the start. For a thread."""
        settings = self.settings
        folder = Path(settings.llmc_context_dir or self.state_dir / "contexts").expanduser().absolute()
        store = Store(folder, int(settings.llmc_context_limit_gb * GB), settings.llmc_context_max_age_s)
        if not settings.llmc_context_save and not folder.exists():
            return None
        try:
            store.open_folder()
        except StoreError as error:
            log.warning("contexts_not_saved", reason=str(error))
            return None
        if not settings.llmc_context_save:
            store.drop()
            store.close()
            return None
        rules = ContextRules(settings.llmc_context_min_tokens, settings.llmc_context_budget_s)
        return Book(store, rules, lambda kind, fields: self.arbiter.tell(kind, fields))

    def _lease_ended(self, row: LeaseRow) -> None:
        self.history.lease(row)
        if self.contexts is not None:
            self.contexts.answered(row[1])

    async def _find_containers(self) -> None:
        """What an earlier gate left under Docker: kept where its preset is the same, ended where it is no more."""
        presets = self.store.catalogue.presets.values()
        if not any(preset.runtime.kind == "docker" for preset in presets):
            return
        host = self._docker_host()
        try:
            self._ports.update(await host.ports())
            swept = await host.sweep([preset.name for preset in presets if preset.runtime.kind == "docker"])
            if swept:
                log.info("containers_ended", presets=swept, reason="their presets are no more")
        except (DockerAway, DockerError, StopFailed) as error:
            log.warning("docker_trouble", reason=str(error))

    async def _end_forgotten(self) -> None:
        """Processes an earlier gate left whose presets are no more."""
        kept = {self._record(preset) for preset in self.store.catalogue.presets.values()}
        try:
            await end_forgotten(self.state_dir / "engines", kept)
        except StopFailed as error:
            log.warning("left_behind", reason=str(error), consequence="it may still hold the card")

    def _docker_host(self) -> DockerHost:
        if self._docker is None:
            try:
                self._docker = DockerHost(socket_path(os.environ), gate_id(self.state_dir))
            except ValueError as error:
                raise StartError(str(error)) from None
        return self._docker

    async def _probe_externals(self) -> None:
        """Once at the start; an engine that does not answer is a line in the log, no reason not to start."""
        for seat in self._externals:
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
        await self.bypass.stop()
        await self.lookout.stop()
        await self.watchdog.stop()
        await self.arbiter.shutdown(self.settings.shutdown_timeout)
        await self._serving.stop()
        await self.gateway.close()
        if self.contexts is not None:
            await self.contexts.close()
        self.journal.close()
        await asyncio.to_thread(self.history.close)
        if self._docker is not None:
            await self._docker.close()
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
        """A preset was loaded: what it took is what it will take the next time."""
        seat, preset = self.arbiter.seat(name), self.store.catalogue.presets.get(name)
        if seat is None or preset is None or not seat.owned or not seat.held:
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
        self.arbiter.presets_changed(self._seats())
        self.gateway.table = self._table()

    def _seats(self) -> list[Seat]:
        owned = [self._preset_seat(preset) for preset in self.store.catalogue.presets.values()]
        names = {seat.tenant.name for seat in owned}
        return owned + [seat for seat in self._externals if seat.tenant.name not in names]

    def _external_seats(self) -> Iterable[Seat]:
        """The Ollama and the ComfyUI of the turnstile document; its defaults only where there are no presets."""
        settings, presets = self.settings, self.store.catalogue.presets
        grace = settings.turnstile_drain_grace
        if settings.ollama_url and (not presets or settings.source("OLLAMA_URL") != "default"):
            tenant = Tenant(OLLAMA, Mode.LLM, drain_grace=grace)
            yield self._seat(
                tenant, Ollama(settings.ollama_url, self._http, self._timing), ExternalRuntime(settings.ollama_url)
            )
        if settings.comfy_url and (not presets or settings.source("COMFY_URL") != "default"):
            tenant = self._image_tenant(COMFYUI)
            yield self._seat(
                tenant, ComfyUI(settings.comfy_url, self._http, self._timing), ExternalRuntime(settings.comfy_url)
            )

    def _image_tenant(self, name: str) -> Tenant:
        """An image server that somebody else runs: one job at a time, before LLM requests, and gone when it is done."""
        settings = self.settings
        return Tenant(
            name,
            Mode.COMFYUI,
            exclusive=True,
            rank=IMAGE_RANK,
            drain_grace=settings.turnstile_drain_grace,
            linger=0.0,
            single=settings.turnstile_image_batch_max_wait == 0,
        )

    def _preset_seat(self, preset: Preset) -> Seat:
        runtime = preset.runtime
        engine_class = ENGINES.get(preset.engine)
        if engine_class is None:
            raise StartError(f"preset {preset.name!r}: the engine {preset.engine!r} is not built yet")
        port = self._port_of(preset)
        engine = engine_class(runtime.url or f"http://127.0.0.1:{port}", self._http, self._timing)
        for attribute, value in (("health_path", preset.health_path), ("api_key", runtime.api_key)):
            if hasattr(engine, attribute):
                setattr(engine, attribute, value)
        folder = self._context_folder(preset)
        seat = self._seat(self._preset_tenant(preset), engine, self._runtime(preset, port, folder))
        if self.contexts is not None and folder is not None and isinstance(engine, LlamaServer):
            seat.keeper = self._keeper(preset, port, engine, self.contexts)
        return seat

    def _context_folder(self, preset: Preset) -> Path | None:
        """Where the engine may put its slots; None = they are not saved."""
        if self.contexts is None:
            return None
        why = preset.why_no_contexts
        if why is None and preset.runtime.kind == "docker" and IN_A_CONTAINER.exists():
            why = None if self.settings.llmc_context_dir else "the gate is in a container: set LLMC_CONTEXT_DIR"
        shelf = self.contexts.store.shelf(preset.name)
        if why is None:
            try:
                shelf.make()
            except OSError as error:
                why = f"{shelf.folder}: {error.strerror or error}"
        if why is not None and preset.engine == LlamaServer.kind:
            log.info("contexts_not_saved", preset=preset.name, reason=why)
        return shelf.folder if why is None else None

    def _keeper(self, preset: Preset, port: int, engine: LlamaServer, book: Book) -> Keeper:
        argv, env = preset.argv(port), preset.environment(port)
        engine.api_key = flag_value(argv, "--api-key") or env.get("LLAMA_API_KEY")
        program = preset.runtime.command or (preset.runtime.image or "",)
        return Keeper(preset.name, engine, book, lambda: facts(argv, env, program, model_files(preset)))

    def _preset_tenant(self, preset: Preset) -> Tenant:
        settings, runtime = self.settings, preset.runtime
        size = self.store.facts[preset.name].size
        external = runtime.kind == "external"
        if external and preset.mode is Mode.COMFYUI:
            tenant = self._image_tenant(preset.name)
        else:
            grace = settings.turnstile_drain_grace if external else settings.llmc_drain_grace_s
            tenant = Tenant(
                preset.name,
                preset.mode,
                exclusive=preset.mode is Mode.COMFYUI,
                drain_grace=grace,
                linger=settings.llmc_idle_unload_s or None,
            )
        return replace(
            tenant,
            revision=preset.revision,
            footprint=size.gb if size is not None else 0.0,
            sized=size.how if size is not None else Sized.DECLARED,
            drain_grace=tenant.drain_grace if runtime.drain_grace_s is None else runtime.drain_grace_s,
            linger=tenant.linger if runtime.idle_unload_s is None else runtime.idle_unload_s,
        )

    def _port_of(self, preset: Preset) -> int:
        """Where the engine listens on this machine. For Docker, the preset's `port` is the one inside."""
        if preset.runtime.port and preset.runtime.kind != "docker":
            return preset.runtime.port
        if preset.name not in self._ports:
            self._ports[preset.name] = records.living_port(self._record(preset)) or _free_port()
        return self._ports[preset.name]

    def _record(self, preset: Preset) -> Path:
        """The file that says which process serves a preset, for a gate that finds it running."""
        return self.state_dir / "engines" / f"{preset.name}.json"

    def _runtime(self, preset: Preset, port: int, contexts: Path | None) -> Runtime:
        runtime, name = preset.runtime, preset.name
        grace = STOP_GRACE[runtime.kind] if runtime.stop_grace_s is None else runtime.stop_grace_s
        match runtime.kind:
            case "external":
                return ExternalRuntime(runtime.url or "")
            case "docker":
                config = container_config(preset, port, str(contexts) if contexts else None)
                return DockerRuntime(
                    self._docker_host(),
                    name,
                    config,
                    grace=grace,
                    on_progress=lambda line: log.info("pulling", preset=name, progress=line),
                )
            case "systemd":
                return SystemdRuntime(runtime.unit or "", user=runtime.user, grace=grace)
            case _:
                argv = preset.argv(port, slot_folder=str(contexts) if contexts else None)
                env = preset.environment(port, contexts is not None)
                return ProcessRuntime(
                    argv, env=env, cwd=runtime.cwd, grace=grace, record=self._record(preset), port=port
                )

    def _seat(self, tenant: Tenant, engine: object, runtime: Runtime) -> Seat:
        return Seat(tenant, engine, runtime, self._gauge, self._limits)  # type: ignore[arg-type]

    async def _engine_pids(self) -> frozenset[int]:
        """Of every engine, also of one whose preset is gone and that has not left the card yet."""
        snapshot = self.arbiter.snapshot()
        names = {*self.arbiter.seats, *snapshot.residents, *snapshot.stuck}
        return await pids_of(seat.runtime for name in names if (seat := self.arbiter.seat(name)) is not None)

    def _has_external(self, name: str) -> bool:
        return any(seat.tenant.name == name for seat in self._externals)

    def _table(self) -> Table:
        """Which tenant serves which site, and what a request can name."""
        presets = self.store.catalogue.presets.values()
        external = OLLAMA if self._has_external(OLLAMA) else None
        by_mode = {preset.mode: preset.name for preset in reversed(list(presets))}
        comfy = COMFYUI if self._has_external(COMFYUI) else None
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


def _rules(settings: Settings, reading: Reading | None) -> Rules:
    """The card's own size counts where it can be read and nobody said otherwise."""
    limit = settings.llmc_vram_limit_gb
    if reading is not None:
        total = reading.total / GB
        limit = total if settings.source("LLMC_VRAM_LIMIT_GB") == "default" else min(limit, total)
    reserve = min(settings.llmc_vram_reserve_gb, limit / 2)
    return Rules(
        patience=settings.turnstile_image_batch_max_wait or None,  # 0: the document's letter, see `single`
        colocate=settings.turnstile_colocate,
        capacity=capacity(limit, reserve),
        retry_after=settings.busy_retry_after,
        rollback=settings.llmc_rollback,
        home=settings.llmc_idle_restore,
        home_after=settings.llmc_idle_restore_s,
    )


def _timing(settings: Settings) -> Timing:
    return Timing(
        unload_timeout=settings.unload_timeout,
        unload_poll=settings.unload_poll_interval,
        history_poll=settings.history_poll_interval,
        job_timeout=settings.job_timeout,
        free_timeout=settings.free_timeout,
        warm_timeout=settings.warm_timeout,
        call_timeout=settings.probe_timeout,
        idle_timeout=settings.job_timeout,
    )


def _options(settings: Settings) -> Options:
    return Options(
        body_limit=settings.turnstile_body_limit,
        head_limit=settings.turnstile_head_limit,
        max_headers=settings.turnstile_max_headers,
        prompt_capture_limit=settings.prompt_capture_limit,
        llm_wait=0 if settings.llm_busy_mode == "reject" else settings.llm_wait_timeout,
        busy_status=settings.llm_busy_status if settings.llm_busy_mode == "reject" else 503,
        backoff_initial=settings.backoff_initial,
        backoff_max=settings.backoff_max,
        upstream_idle=settings.turnstile_upstream_idle,
        connect_timeout=settings.turnstile_connect_timeout,
        head_timeout=settings.turnstile_head_timeout,
        idle_timeout=settings.turnstile_idle_timeout,
        body_timeout=settings.turnstile_body_timeout,
        max_connections=settings.turnstile_max_connections,
        keepalive_interval=settings.turnstile_keepalive_interval,
        allowed_hosts=settings.turnstile_allowed_hosts,
        allowed_origins=settings.turnstile_allowed_origins,
        api_keys={key.key: key.name for key in settings.turnstile_api_keys},
        log_requests=settings.loglevel in ("info", "debug"),
    )


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _serve(settings: Settings, presets: Path, state_dir: Path) -> int:
    app = App(settings, presets, state_dir)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: app.hurry() if ended.is_set() else ended.set())
    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, app.look_again)
    await app.start()
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
