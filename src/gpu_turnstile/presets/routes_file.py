"""`routes.toml`: ordered chains of presets that a client may name instead of one preset.

    auto = ["qwen3-coder", "qwen3-small"]     # model = "auto"; also the default of requests that name no model

    [route]
    vision = ["qwen3-vl"]                     # model = "auto:vision"
    guest = []                                # whatever is on the card, never a swap

An entry is a preset's name, alias or artifact stem. One that no preset answers to is no error here (the preset may
come later) but fails the requests of its route. The file also says which preset is preferred for a capability: the
one it mentions first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from gpu_turnstile.core.routes import LATEST, ROUTE
from gpu_turnstile.presets.errors import validate
from gpu_turnstile.presets.schema import Aliases, Strict, check_name

FILE_NAME = "routes.toml"


def _route_name(name: str) -> str:
    if name == LATEST.lstrip(":"):
        raise ValueError(f'"{name}" cannot be a route: clients of Ollama add it to every name')
    return check_name(name)


RouteName = Annotated[str, AfterValidator(_route_name)]


class RoutesFile(Strict):
    """The file as it is written."""

    auto: Aliases | None = None
    route: dict[RouteName, Aliases] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Routes:
    """`chains`: route to entries as written, the default route under `auto`, in the order of the file."""

    chains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def entries(self) -> tuple[str, ...]:
        """Everything that is mentioned, in the order of its first mention."""
        return tuple(dict.fromkeys(entry for chain in self.chains.values() for entry in chain))


def parse_routes(text: str, data: dict[str, Any], shown: str) -> Routes:
    """Raises PresetError; `shown` is what the file is called in it."""
    content = validate(RoutesFile, data, text, shown)
    default = {} if content.auto is None else {ROUTE: content.auto}
    return Routes(default | content.route)
