"""What a simulation plays: presets with their costs, and clients with their habits. Pure values; all times in seconds.

A client asks for one preset. It is either a loop, which thinks for a while after each answer and asks again (an agent,
a script), or it comes by itself at certain times (a person, a batch of image jobs), whatever became of what it asked
before. Every job of a client is the same in every run of the same seed, whatever the scheduler does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from gpu_turnstile.core.model import Mode, Tenant

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Preset:
    """`swap`: seconds until it serves, with the stop of whoever has to leave for it. `restore`: seconds it takes to
    put back one client's saved context. `idle_unload`: seconds it stays with nothing to do, None = for ever.
    """

    name: str
    swap: float = 8.0
    restore: float = 2.0
    exclusive: bool = False
    drain_grace: float | None = 60.0
    idle_unload: float | None = None

    def tenant(self) -> Tenant:
        return Tenant(
            self.name,
            Mode.COMFYUI if self.exclusive else Mode.LLM,
            exclusive=self.exclusive,
            drain_grace=self.drain_grace,
            linger=self.idle_unload,
        )


@dataclass(frozen=True, slots=True)
class Job:
    """`at`: when it is asked for, or None: `pause` after the answer to the one before. `work`: what it takes."""

    work: float
    at: float | None = None
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Client:
    """`context`: seconds to read its conversation again when the engine has lost it. `jobs`: recorded ones."""

    name: str
    preset: str
    work: Range = (10.0, 10.0)
    think: Range | None = None  # a loop
    every: float | None = None  # mean seconds between two visits, which come by chance
    burst: int = 1  # jobs in one visit
    context: float = 0.0
    jobs: tuple[Job, ...] = ()

    def play(self, seed: int, until: float) -> Iterator[Job]:
        """Its jobs, in order."""
        rnd = Random(f"{seed}/{self.name}")
        if self.jobs:
            yield from self.jobs
        elif self.think is not None:
            yield Job(rnd.uniform(*self.work), at=rnd.uniform(*self.think))
            while True:
                pause = rnd.uniform(*self.think)
                yield Job(rnd.uniform(*self.work), pause=pause)
        elif self.every is not None:
            at = rnd.expovariate(1 / self.every)
            while at < until:
                for _ in range(self.burst):
                    yield Job(rnd.uniform(*self.work), at=at)
                at += rnd.expovariate(1 / self.every)

    @property
    def is_loop(self) -> bool:
        return self.think is not None or any(job.at is None for job in self.jobs)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    presets: tuple[Preset, ...]
    clients: tuple[Client, ...]
    seconds: float
    seed: int = 1
    notes: tuple[str, ...] = field(default=())  # what a person should know about where it comes from
