"""A workload as a TOML file, strict like a preset: an unknown key is an error with its line and the key that was meant.

hours = 6                   # of simulated time
seed = 1                    # of everything that is left to chance

[preset.coder]
swap_s = 8                  # stop of whoever is there, load, until it serves
restore_s = 2               # putting a saved context back, where contexts survive
exclusive = false           # one job at a time (an image server)
drain_grace_s = 60          # LLMC_DRAIN_GRACE_S
idle_unload_s = 300         # left out: it stays

[client.agent-1]
preset = "coder"
work_s = [8, 16]            # what a request takes; one number, or from … to …
think_s = [1, 5]            # a loop: seconds from an answer to the next request. Or:
every_s = 600               # a visit every so often, by chance …
burst = 4                   # … of so many requests at once
context_s = 60              # reading its conversation again after the engine has lost it
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gpu_turnstile.presets.errors import Misfit, PresetError, find_line, nearest, read_toml, validate
from gpu_turnstile.simulate.workload import Client, Preset, Range, Workload

WAR = "war.toml"
LONGEST = 24.0 * 31  # hours
Seconds = Annotated[float, Field(ge=0.0, le=LONGEST * 3600.0)]


def _range(given: Any) -> Any:
    """One number, or a list of two."""
    numbers = given if isinstance(given, list) else [given, given]
    if len(numbers) != 2 or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        raise ValueError("must be a number, or two in [ ]")
    low, high = (float(number) for number in numbers)
    if not 0.0 <= low <= high <= LONGEST * 3600.0:
        raise ValueError("must not be negative, and the first of two is the smaller one")
    return (low, high)


Span = Annotated[Range, BeforeValidator(_range)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Preset(_Strict):
    swap_s: Seconds = 8.0
    restore_s: Seconds = 2.0
    exclusive: bool = False
    drain_grace_s: Seconds = 60.0
    idle_unload_s: Seconds | None = None


class _Client(_Strict):
    preset: str
    work_s: Span
    think_s: Span | None = None
    every_s: Annotated[float, Field(ge=1.0, le=LONGEST * 3600.0)] | None = None
    burst: Annotated[int, Field(ge=1, le=1000)] = 1
    context_s: Seconds = 0.0

    @model_validator(mode="after")
    def _either(self) -> _Client:
        if (self.think_s is None) == (self.every_s is None):
            raise Misfit("preset", 'the client needs either "think_s" (a loop) or "every_s" (visits)')
        if self.think_s is not None and self.work_s[1] + self.think_s[0] <= 0.0:
            raise Misfit("work_s", "a loop that takes no time never ends")
        if self.think_s is not None and self.burst != 1:
            raise Misfit("burst", "only visits (every_s) come in bursts")
        return self


class _File(_Strict):
    hours: Annotated[float, Field(gt=0.0, le=LONGEST)] = 6.0
    seed: int = 1
    preset: dict[str, _Preset]
    client: dict[str, _Client]


def load(path: Path) -> Workload:
    """Raises PresetError, one line for a person."""
    text, data = read_toml(path, str(path))
    return _workload(path.stem, text, data, str(path))


def war() -> Workload:
    """The built-in one."""
    with resources.as_file(resources.files("gpu_turnstile.simulate") / WAR) as path:
        text, data = read_toml(path, WAR)
    return _workload("war", text, data, WAR)


def _workload(name: str, text: str, data: dict[str, Any], shown: str) -> Workload:
    file = validate(_File, data, text, shown)
    for client, given in file.client.items():
        if given.preset not in file.preset:
            raise PresetError(
                shown,
                f"client.{client}.preset: there is no [preset.{given.preset}] in this file",
                line=find_line(text, ("client", client, "preset")),
                key=f"client.{client}.preset",
                nearest=nearest(given.preset, file.preset),
            )
    return Workload(
        name,
        tuple(
            Preset(n, p.swap_s, p.restore_s, p.exclusive, p.drain_grace_s, p.idle_unload_s)
            for n, p in file.preset.items()
        ),
        tuple(
            Client(n, c.preset, c.work_s, c.think_s, c.every_s, c.burst, c.context_s) for n, c in file.client.items()
        ),
        file.hours * 3600.0,
        file.seed,
    )
