"""Presets and the engines others run, as seats: a tenant with the engine and the runtime that make it real.

Also what an earlier gate left behind of them. Knows files, ports and Docker; starts nothing and decides nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import structlog

from gpu_turnstile.contexts.book import Book
from gpu_turnstile.contexts.book import Rules as ContextRules
from gpu_turnstile.contexts.fingerprint import flag_value
from gpu_turnstile.contexts.identity import facts
from gpu_turnstile.contexts.keeper import Keeper
from gpu_turnstile.contexts.store import Store, StoreError
from gpu_turnstile.core.model import Mode, Sized, Tenant
from gpu_turnstile.engines.base import Timing
from gpu_turnstile.engines.comfyui import ComfyUI
from gpu_turnstile.engines.llama_server import LlamaServer
from gpu_turnstile.engines.ollama import Ollama
from gpu_turnstile.engines.registry import ENGINES
from gpu_turnstile.engines.sglang import SGLang
from gpu_turnstile.engines.vllm import VLLM
from gpu_turnstile.gpu.gauge import Gauge
from gpu_turnstile.presets.files import model_files
from gpu_turnstile.presets.schema import Preset
from gpu_turnstile.presets.store import PresetStore
from gpu_turnstile.runtimes import records
from gpu_turnstile.runtimes.base import Runtime, StopFailed
from gpu_turnstile.runtimes.docker import DockerRuntime
from gpu_turnstile.runtimes.docker_config import container_config
from gpu_turnstile.runtimes.docker_errors import DockerAway, DockerError
from gpu_turnstile.runtimes.docker_host import DockerHost, gate_id, socket_path
from gpu_turnstile.runtimes.external import ExternalRuntime
from gpu_turnstile.runtimes.process import ProcessRuntime, end_forgotten
from gpu_turnstile.runtimes.systemd import SystemdRuntime
from gpu_turnstile.seats import GB, Limits, Seat
from gpu_turnstile.settings import Settings
from gpu_turnstile.sleepers import Bed, Dorm

log = structlog.get_logger("seating")

OLLAMA, COMFYUI = "ollama", "comfyui"  # the names of the tenants that somebody else runs
IMAGE_RANK = 1
STOP_GRACE = {"process": 10.0, "docker": 10.0, "systemd": 90.0, "external": 0.0}  # seconds, where a preset says nothing
IN_A_CONTAINER = Path("/.dockerenv")  # its paths are not the Docker host's


class StartError(Exception):
    """The gate cannot start. The text is one line for a person."""


class Seating:
    """`contexts`: where conversations are kept over their engine's absence; None = they are not."""

    def __init__(
        self,
        settings: Settings,
        store: PresetStore,
        state_dir: Path,
        http: httpx.AsyncClient,
        gauge: Gauge,
        timing: Timing,
        dorm: Dorm,
    ) -> None:
        self.contexts: Book | None = None
        self._settings = settings
        self._store = store
        self._state_dir = state_dir
        self._http = http
        self._gauge = gauge
        self._timing = timing
        self._dorm = dorm
        self._limits = Limits(settings.llmc_health_timeout, settings.unload_timeout)
        self._ports: dict[str, int] = {}  # of engines whose preset names none
        self._docker: DockerHost | None = None
        self.externals = list(self._external_seats())

    async def close(self) -> None:
        if self._docker is not None:
            await self._docker.close()

    def has_external(self, name: str) -> bool:
        return any(seat.tenant.name == name for seat in self.externals)

    def seats(self) -> list[Seat]:
        owned = [self._preset_seat(preset) for preset in self._store.catalogue.presets.values()]
        names = {seat.tenant.name for seat in owned}
        return owned + [seat for seat in self.externals if seat.tenant.name not in names]

    def _external_seats(self) -> Iterable[Seat]:
        """The Ollama and the ComfyUI of the turnstile document; its defaults only where there are no presets."""
        settings, presets = self._settings, self._store.catalogue.presets
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
        settings = self._settings
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
        if runtime.sleep is not None and isinstance(engine, VLLM | SGLang):
            seat.bed = self._bed(preset, port, engine, seat.runtime)
        return seat

    def _context_folder(self, preset: Preset) -> Path | None:
        """Where the engine may put its slots; None = they are not saved."""
        if self.contexts is None:
            return None
        why = preset.why_no_contexts
        if why is None and preset.runtime.kind == "docker" and IN_A_CONTAINER.exists():
            why = None if self._settings.llmc_context_dir else "the gate is in a container: set LLMC_CONTEXT_DIR"
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

    def _bed(self, preset: Preset, port: int, engine: VLLM | SGLang, runtime: Runtime) -> Bed:
        engine.api_key = flag_value(preset.argv(port), "--api-key")
        level, limit = preset.runtime.sleep or 1, self._settings.llmc_sleep_timeout_s
        return Bed(preset.name, engine, runtime, self._gauge, self._dorm, level=level, limit=limit)

    def _preset_tenant(self, preset: Preset) -> Tenant:
        settings, runtime = self._settings, preset.runtime
        size = self._store.facts[preset.name].size
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
        return self._state_dir / "engines" / f"{preset.name}.json"

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
        seat = Seat(tenant, engine, runtime, self._gauge, self._limits)  # type: ignore[arg-type]
        seat.dorm = self._dorm if runtime.owned else None
        return seat

    # ----------------------------------------------------------------------------- what an earlier gate left

    async def find_containers(self) -> None:
        """What an earlier gate left under Docker: kept where its preset is the same, ended where it is no more."""
        presets = self._store.catalogue.presets.values()
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

    async def end_forgotten(self) -> None:
        """Processes an earlier gate left whose presets are no more."""
        kept = {self._record(preset) for preset in self._store.catalogue.presets.values()}
        try:
            await end_forgotten(self._state_dir / "engines", kept)
        except StopFailed as error:
            log.warning("left_behind", reason=str(error), consequence="it may still hold the card")

    def _docker_host(self) -> DockerHost:
        if self._docker is None:
            try:
                self._docker = DockerHost(socket_path(os.environ), gate_id(self._state_dir))
            except ValueError as error:
                raise StartError(str(error)) from None
        return self._docker

    def open_contexts(self, tell: Callable[[str, dict[str, Any]], None]) -> None:
        """The folder of saved conversations. One that cannot be used costs them, not the start. For a thread."""
        settings = self._settings
        folder = Path(settings.llmc_context_dir or self._state_dir / "contexts").expanduser().absolute()
        store = Store(folder, int(settings.llmc_context_limit_gb * GB), settings.llmc_context_max_age_s)
        if not settings.llmc_context_save and not folder.exists():
            return
        try:
            store.open_folder()
        except StoreError as error:
            log.warning("contexts_not_saved", reason=str(error))
            return
        if not settings.llmc_context_save:
            store.drop()
            store.close()
            return
        rules = ContextRules(settings.llmc_context_min_tokens, settings.llmc_context_budget_s)
        self.contexts = Book(store, rules, tell)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
