"""The rules of the house: who may import whom. An import that breaks one is a defect."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "gpu_turnstile"
PACKAGE = "gpu_turnstile"

# room -> the project's own modules it may import, as prefixes below the package; "" is the package itself (version).
MAY_IMPORT = {
    "core": ("core",),
    "contexts": ("contexts", "engines.base"),
    "engines": ("core.model", "engines"),
    "runtimes": ("runtimes",),
    "gpu": ("gpu", "sim.card"),
    "presets": ("core.model", "core.routes", "presets", "runtimes.units"),
    "journal": ("journal", "rounds"),
    "gateway": ("", "core.model", "core.routes", "arbiter", "gateway"),
    "control": (
        "",
        "core.model",
        "core.locks",
        "core.routes",
        "core.budget",
        "arbiter",
        "gateway",
        "control",
        "presets",
        "settings",
        "tally",
        "gpu",
        "engines.base",
        "seats",
        "sleepers",
        "contention",
        "contexts",
        "journal",
    ),
    "sim": ("", "sim", "gpu.base"),
    "demo": ("demo", "sim"),
    "seats": ("contexts.keeper", "core.model", "engines.base", "gpu", "runtimes.base", "sleepers"),
    "sleepers": ("engines.base", "gpu", "runtimes.base"),
    "arbiter": ("core", "seats", "swaps", "tally"),
    "swaps": ("core.model", "core.policy", "engines.base", "seats", "tally"),
    "jobs": ("arbiter", "engines"),
    "bypass": ("arbiter", "engines", "jobs", "rounds", "seats"),
    "watchdog": ("arbiter", "core.model", "engines.base", "rounds", "seats"),
    "warm": ("arbiter", "core.model", "engines"),
    "settings": ("core.policy", "core.routes", "presets.values"),
    "simulate": ("core", "journal.schema", "presets.errors", "simulate"),
    "contention": ("journal.schema",),
    "tally": (),
    "prefetch": (),
    "rounds": (),
}


def rooms() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        found.append((relative.parts[0].removesuffix(".py"), path))
    return found


def imports(path: Path) -> set[str]:
    """Modules a file imports, also inside functions; type-checking imports count too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_its_place_in_the_house_allows(room):
    allowed = MAY_IMPORT[room]
    wrong = []
    for name, path in rooms():
        if name != room:
            continue
        for module in imports(path):
            if module.split(".")[0] != PACKAGE:
                continue
            below = module.removeprefix(PACKAGE + ".")
            own = "__version__" if "" in allowed else None
            if below != own and not any(below == a or below.startswith(a + ".") for a in allowed if a):
                wrong.append(f"{path.relative_to(SOURCE)} imports {module}")
    assert not wrong


def test_the_core_uses_the_standard_library_only_and_none_of_its_clocks_or_io():
    forbidden = {
        "asyncio",
        "time",
        "datetime",
        "random",
        "logging",
        "os",
        "socket",
        "pathlib",
        "threading",
        "subprocess",
    }
    for name, path in rooms():
        if name != "core":
            continue
        for module in imports(path):
            top = module.split(".")[0]
            assert top == PACKAGE or top in sys.stdlib_module_names, f"{path.name} imports {module}"
            assert top not in forbidden, f"{path.name} imports {module}"


def test_only_the_arbiter_knows_the_scheduler_and_who_plays_the_world_for_it():
    users = {name for name, path in rooms() if any(m.startswith(f"{PACKAGE}.core.scheduler") for m in imports(path))}
    assert users <= {"arbiter", "core", "simulate"}


def test_only_the_arbiter_feeds_it():
    feeders = [path for _, path in rooms() if "_scheduler.handle(" in path.read_text(encoding="utf-8")]
    assert [path.name for path in feeders] == ["arbiter.py"]


def test_there_is_a_rule_for_every_room_that_is_not_a_root():
    roots = {"__init__", "__main__", "app", "seating", "wiring", "cli", "client", "logs"}  # they put rooms together
    assert {name for name, _ in rooms()} - roots <= set(MAY_IMPORT)
