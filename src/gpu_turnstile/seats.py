"""A seat: one tenant with the engine and the runtime that make it real, and the two things that can be done to it.

`admit` brings it on the card and returns when it answers; `evict` takes it off and returns when its memory is back,
or says how far it got. One that can sleep is laid down and woken instead, where that is
safe and quicker. Seats decide nothing; the arbiter calls them one at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from gpu_turnstile.contexts.keeper import Keeper
from gpu_turnstile.core.model import Mode, Tenant
from gpu_turnstile.engines.base import Engine, Health, Released
from gpu_turnstile.gpu.base import Reading
from gpu_turnstile.gpu.gauge import Gauge
from gpu_turnstile.gpu.settle import CONTEXT, STILL_WITHIN, VISIBLE_FALL, Settled, SettleState, wait_free, wait_still
from gpu_turnstile.runtimes.base import Runtime, StartFailed, StopFailed
from gpu_turnstile.sleepers import Bed, Dorm, State

log = structlog.get_logger("seats")

GB = 1 << 30
FIRST_PROBE = 0.005  # seconds until the first look whether it is ready, and between two looks at the beginning …
PROBE_SHARE = 0.01  # … later, the share of its loading time so far that a pause may add to it …
SLOWEST_PROBE = 0.025  # … up to this: a look costs half a millisecond
RELEASE_TRIES = 3  # how often an engine somebody else runs is asked to let go, if that goes wrong
RELEASE_PAUSE = 0.1  # seconds between them
SETTLE_POLL = 0.01  # seconds between two looks at the card
OUTPUT_SHOWN = 5  # lines of an engine's output that go into an error


class AdmitFailed(Exception):
    """The engine did not come up. The text is for the clients that waited for it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. `ready`: from start to the first good answer; `free`: from the end of an engine to its memory back."""

    ready: float = 900.0
    free: float = 60.0


@dataclass(frozen=True, slots=True)
class Evicted:
    """`gone`: it holds nothing any more, as far as can be known. `sure`: its memory was seen to be back.

    `clean`: nothing went wrong, also where nothing could be seen.
    """

    gone: bool
    sure: bool
    detail: str
    seconds: float
    clean: bool = True


class Seat:
    """`keeper` carries its conversations over its absences; None = they end with its process.

    `bed`: where it sleeps instead of being stopped; None = it does not. `dorm`: where others do.
    """

    def __init__(
        self,
        tenant: Tenant,
        engine: Engine,
        runtime: Runtime,
        gauge: Gauge,
        limits: Limits,
        keeper: Keeper | None = None,
    ) -> None:
        self.tenant = tenant
        self.engine = engine
        self.runtime = runtime
        self.keeper = keeper
        self.bed: Bed | None = None
        self.dorm: Dorm | None = None
        self.on_lost: Callable[[str], None] | None = None  # it ended without being asked to
        self._gauge = gauge
        self._limits = limits
        self._gone: asyncio.Future[str] | None = None  # set while it is being admitted
        self._held: int | None = None  # bytes the card's use rose by when it came
        self._before: Reading | None = None  # the card when it came
        self._leaving: Reading | None = None  # … and before the first try to evict it, as long as it has not gone
        runtime.on_exit = self._exited

    @property
    def held(self) -> int | None:
        """Bytes it is known to hold on the card; None = not known."""
        return self._held

    @property
    def refill_s(self) -> float:
        """Seconds that reading again costs what was lost when it last left; 0 = nothing, or not known."""
        return 0.0 if self.keeper is None else self.keeper.refill_s

    @property
    def owned(self) -> bool:
        return self.runtime.owned

    @property
    def asleep(self) -> bool:
        return self.bed is not None and self.bed.state is State.ASLEEP

    @property
    def serves(self) -> bool:
        """Whether its process, if it runs, may be asked for work: it neither sleeps nor may be half awake."""
        return self.bed is None or self.bed.state is State.UP

    def distrust(self) -> None:
        """Something is wrong with it: it is to be stopped, not put to sleep with that."""
        if self.bed is not None and self.bed.state is State.UP:
            self.bed.state = State.UNSURE

    @property
    def left(self) -> int:
        """Bytes of the card it keeps while it sleeps."""
        return self.bed.left if self.bed is not None and self.asleep else 0

    def _exited(self, reason: str) -> None:
        if self._gone is not None:
            if not self._gone.done():
                self._gone.set_result(reason)
        elif self.bed is not None and self.asleep:
            self.bed.ended(reason)
        elif self.on_lost is not None:
            self.on_lost(reason)

    async def reading(self) -> Reading | None:
        """What the card says now."""
        return await self._gauge.read()

    # --------------------------------------------------------------------------------------------- coming

    async def adopt(self) -> bool:
        """Take over what an earlier gate left running. True: it is there, or could not be ended and may be."""
        if not self.owned:
            return False
        try:
            there = await self.runtime.adopt()
            if there and await self._may_sleep():
                await self.runtime.stop()  # what it will need, and keeps now, was known to the gate that is no more
                return False
        except StopFailed as error:
            log.warning("left_behind", tenant=self.tenant.name, reason=str(error))
            return True
        if there and self.keeper is not None:
            await self.keeper.adopted()
        return there

    async def _may_sleep(self) -> bool:
        """Whether nobody knows that it is awake. One that sleeps listens."""
        if self.bed is None or await self.bed.engine.sleeping() is False:
            return False
        return (await self.engine.probe()).health is not Health.DOWN

    async def loading(self) -> bool:
        """Whether what was adopted does not serve yet and may come up: not if it hangs or says no."""
        if not self.serves or not await self.runtime.alive():
            return False
        return (await self.engine.probe()).health in (Health.LOADING, Health.DOWN)

    async def resume(self) -> None:
        """Wait for what an earlier gate has begun to start. Raises AdmitFailed; then it may still be running."""
        self._gone = gone = asyncio.get_running_loop().create_future()
        try:
            if not await self.runtime.alive():
                raise AdmitFailed(_with_output(f"{self.tenant.name} ended while it was loading", self.runtime.output()))
            if self.keeper is not None:
                self.keeper.resuming()
            await self._until_ready(gone)
            if self.keeper is not None and not await self.keeper.ready():
                raise AdmitFailed(f"{self.tenant.name} broke off over the conversations that it was given back")
        finally:
            self._gone = None

    async def admit(self) -> None:
        """Put it on the card and wait until it answers. Raises AdmitFailed; then nothing of it is left running."""
        before = self._before = await self._gauge.read()
        if not self.owned:  # whoever runs it has it running; the first request finds out whether it does
            await self._make_ready()
            if before is not None and before.used > CONTEXT and await self.engine.busy():
                self._before = None  # it came past the gate, and part of what is used is its own
            return
        if await self._woken():
            return
        if self.dorm is not None and self.dorm.occupied:
            await self.dorm.make_room(self._gauge, int(self.tenant.footprint * GB), None)
            before = self._before = await self._gauge.read()
        try:
            await self._load()
        finally:
            self._gone = None
            after = await self._gauge.read()
            self._held = None if before is None or after is None else max(0, after.used - before.used)

    async def _woken(self) -> bool:
        """Whether it slept and serves again. If it slept, or may, and does not serve, it is gone when this returns."""
        if self.dorm is not None and self.dorm.occupied:
            await self.dorm.sweep()  # one that slept under its name, by settings that have changed
        bed = self.bed
        if bed is None or bed.state is State.UP:
            return False
        before, left = await self._gauge.read(), self.left
        self._gone = gone = asyncio.get_running_loop().create_future()
        try:
            if self.asleep and await bed.wake() is None and not gone.done():
                self._held = bed.size
                return True
            began = time.monotonic()
            await self.runtime.stop()
            bed.stopped(time.monotonic() - began)
        except StopFailed as error:
            raise AdmitFailed(str(error)) from None
        finally:
            self._gone = None
        need = None if before is None else before.free + left - STILL_WITHIN
        settled = await wait_free(self._gauge, need, None, self._limits.free, poll=SETTLE_POLL)
        if settled.state is SettleState.TIMEOUT:
            raise AdmitFailed(f"{self.tenant.name} did not wake, and its memory is not back: {settled.detail}")
        return False

    async def _load(self) -> None:
        """Start it from nothing. After a failure, who sleeps is no reason for the next one."""
        if self.bed is not None:
            self.bed.loading()
        try:
            if self.keeper is None:
                await self._start()
            else:
                await self._start_with_contexts(self.keeper)
        except (StartFailed, AdmitFailed) as error:
            if self.dorm is not None:
                await self.dorm.empty(f"{self.tenant.name} could not be started beside it")
            if isinstance(error, AdmitFailed):
                raise
            raise AdmitFailed(_with_output(error.reason, error.output)) from None
        if self.bed is not None:
            self.bed.loaded()

    async def _start(self) -> asyncio.Future[str]:
        """It runs and answers; the future says why, should it end while it is still being admitted."""
        self._gone = gone = asyncio.get_running_loop().create_future()
        await self.runtime.start()
        await self._until_ready(gone)
        return gone

    async def _start_with_contexts(self, keeper: Keeper) -> None:
        """An engine that ends over what it is given back is started once more and given nothing."""
        await keeper.starting()
        gone = await self._start()
        if await keeper.ready() and not gone.done():
            return
        reason = gone.result() if gone.done() else "the connection broke"
        log.warning("ended_by_a_restore", tenant=self.tenant.name, reason=reason)
        try:
            await self.runtime.stop()
        except StopFailed as error:
            raise AdmitFailed(str(error)) from None
        await self._start()
        await keeper.ready(restore=False)

    async def _make_ready(self) -> None:
        """Some engines do not serve again by themselves after they were made to let go."""
        readied = getattr(self.engine, "admit", None)
        if readied is not None:
            probe = await readied()
            if probe.health is not Health.READY:
                raise AdmitFailed(f"{self.tenant.name} cannot be made ready: {probe.detail or probe.health}")

    async def _until_ready(self, gone: asyncio.Future[str]) -> None:
        began = time.monotonic()
        deadline = began + self._limits.ready
        while True:
            pause = (time.monotonic() - began) * PROBE_SHARE
            await asyncio.wait([gone], timeout=min(max(FIRST_PROBE, pause), SLOWEST_PROBE))
            if gone.done():
                raise AdmitFailed(_with_output(f"{self.tenant.name} {gone.result()}", self.runtime.output()))
            probe = await self.engine.probe()
            if probe.health is Health.READY:
                return
            if time.monotonic() >= deadline:
                why = (
                    f"{self.tenant.name} was not ready within {self._limits.ready:g} s ({probe.detail or probe.health})"
                )
                raise AdmitFailed(_with_output(why, self.runtime.output()))

    # ---------------------------------------------------------------------------------------------- going

    async def evict(self, need: float = 0.0) -> Evicted:
        """Take it off the card, asleep or stopped. Never raises. `need`: GB that whoever comes next needs; 0 = unknown.

        Where it is known what it held, that must come back; only where it is not is it enough that `need` is free.
        """
        began = time.monotonic()
        before = await self._gauge.read()
        if self.owned:
            before = self._leaving = self._leaving or before  # what came back since an earlier try has come back
            slept = await self._lain_down()
            if slept is not None:
                self._held = self._leaving = None
                return Evicted(True, True, slept, time.monotonic() - began)
            if self.keeper is not None and await self.runtime.alive():
                await self.keeper.save()
            stopping = time.monotonic()
            try:
                await self.runtime.stop()
            except StopFailed as error:
                return Evicted(False, False, str(error), time.monotonic() - began, clean=False)
            if self.keeper is not None:
                self.keeper.stopped()
            held, said, left, well = self._known_to_hold(before), "stopped", self._limits.free, True
        else:
            held = await self._holding(before)
            said, well = await self._release(began + self._limits.free)
            left = max(0.0, began + self._limits.free - time.monotonic())
        settled = await self._settle(before, held, need, left)
        if not self.owned and self._before is not None:
            await wait_still(self._gauge, self._before.used + CONTEXT, left, poll=SETTLE_POLL)
        if self.owned and self.bed is not None:
            self.bed.stopped(time.monotonic() - stopping)
        gone = not self.owned or settled.state is not SettleState.TIMEOUT
        if gone:
            self._held = self._leaving = None
        back = settled.state in (SettleState.FREE, SettleState.STABLE)
        clean = (well or (back and bool(held))) and settled.state is not SettleState.TIMEOUT
        return Evicted(gone, back and clean, f"{said}; {settled.detail}", time.monotonic() - began, clean)

    async def _lain_down(self) -> str | None:
        """How it went, if it sleeps now; None = it does not, and is to be stopped."""
        if self.bed is None or not await self.runtime.alive():
            return None
        return await self.bed.sleep(self._held)

    def _known_to_hold(self, before: Reading | None) -> int | None:
        """Bytes an engine of ours held. One that was adopted held unknown ones, but no more than were used at all.

        An image server takes the card with its first job: what it holds is what the use has risen by since it came.
        """
        came = self._before
        if self.tenant.mode is Mode.COMFYUI and self._held is not None and came is not None and before is not None:
            return max(self._held, before.used - came.used)
        if self._held is None and before is not None and before.used < VISIBLE_FALL:
            return 0
        return self._held

    async def _release(self, deadline: float) -> tuple[str, bool]:
        """Ask an engine somebody else runs to let go; again if that went wrong, a few times.

        What it said at last, and whether that was that it will.
        """
        for _ in range(RELEASE_TRIES):
            release = await self.engine.release()
            final = release.outcome in (Released.EMPTY, Released.ACCEPTED, Released.UNSUPPORTED)
            if final or time.monotonic() + RELEASE_PAUSE >= deadline:
                break
            await asyncio.sleep(RELEASE_PAUSE)
        well = release.outcome in (Released.EMPTY, Released.ACCEPTED)
        return release.detail or str(release.outcome), well

    async def _settle(self, before: Reading | None, held: int | None, need: float, limit: float) -> Settled:
        wanted = int(need * GB) if need and held is None else None
        return await wait_free(self._gauge, wanted, before, limit, held_bytes=held, poll=SETTLE_POLL)

    async def _holding(self, now: Reading | None) -> int | None:
        """Bytes an engine somebody else runs holds: by its own word, else what the card's use rose by since it came.

        What is no more than a driver's context does not come back while its process lives, and is not waited for.
        """
        loaded = await self.engine.loaded()
        if loaded is not None and all(model.vram is not None for model in loaded):
            return sum(model.vram or 0 for model in loaded)
        if now is None:
            return None
        held = max(0, now.used - (self._before.used if self._before is not None else 0))
        if held <= CONTEXT:
            return 0
        return held if self._before is not None else None


def _with_output(reason: str, output: tuple[str, ...]) -> str:
    """One text for a person: what happened, and the last lines the engine printed."""
    if not output:
        return reason
    return reason + "; its last words: " + " | ".join(line.strip() for line in output[-OUTPUT_SHOWN:])
