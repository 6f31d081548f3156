"""A folder of presets: all or nothing, live, and a word means one preset."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpu_turnstile.core.model import Mode
from gpu_turnstile.core.routes import Resolved, resolve
from gpu_turnstile.presets import store as store_module
from gpu_turnstile.presets.store import PresetStore
from tests.presets.build import llama, write

COMFY = 'engine = "comfyui"\ncapabilities = ["images"]\nruntime = { kind = "external", url = "http://127.0.0.1:1" }'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "presets"
    path.mkdir()
    return path


@pytest.fixture
def store(folder: Path) -> PresetStore:
    """A store for which every file is old enough to be trusted."""
    return PresetStore(folder, clock=lambda: 0)


def complaint(store: PresetStore) -> str:
    assert not store.refresh()
    assert store.error is not None
    assert "\n" not in str(store.error)
    return str(store.error)


# ---------------------------------------------------------------------------------------------------- what is in there


def test_a_folder_becomes_a_catalogue(store: PresetStore, folder: Path) -> None:
    write(folder, coder=llama("Q-Coder", 'aliases = ["gpt-4o"]\ncapabilities = ["tools"]'), comfy=COMFY)
    (folder / "notes.txt").write_text("not a preset")
    (folder / ".coder.toml").write_text("an editor's leftover")
    assert store.refresh()
    assert store.error is None
    assert list(store.catalogue.presets) == ["coder", "comfy"]
    assert store.catalogue.aliases == {"gpt-4o": "coder"}
    assert store.catalogue.stems == {"Q-Coder": "coder"}
    for word in ("coder", "coder:latest", "gpt-4o", "gpt-4o:latest", "Q-Coder"):
        preset = store.catalogue.find(word)
        assert preset is not None
        assert preset.name == "coder"
    assert store.catalogue.find("") is None


def test_a_directory_names_the_presets_of_one_mode(store: PresetStore, folder: Path) -> None:
    write(folder, coder=llama("Q", 'capabilities = ["tools"]'), comfy=COMFY)
    store.refresh()
    chat = store.catalogue.directory(external="ollama")
    assert (chat.names, dict(chat.capabilities), chat.external) == (("coder",), {"tools": ("coder",)}, "ollama")
    assert store.catalogue.directory(mode=Mode.COMFYUI).names == ("comfy",)


def test_a_capability_prefers_the_order_of_the_routes_and_then_the_names(store: PresetStore, folder: Path) -> None:
    for name in "abcd":
        write(folder, **{name: llama(name.upper(), 'capabilities = ["x"]')})
    write(folder, routes='auto = ["C"]\nroute.other = ["b", "c"]')
    store.refresh()
    assert store.catalogue.directory().capabilities == {"x": ("c", "b", "a", "d")}
    assert resolve(store.catalogue.directory(), "auto:other") == Resolved(("b", "c"), True, "auto:other")


def test_a_missing_folder_is_an_empty_catalogue_and_a_note(tmp_path: Path) -> None:
    store = PresetStore(tmp_path / "none")
    store.refresh()
    assert store.error is None
    assert not store.catalogue.presets
    assert "none" in store.catalogue.notes[0]


def test_a_route_to_nobody_is_a_note_because_the_preset_may_come_later(store: PresetStore, folder: Path) -> None:
    write(folder, a=llama("A"), routes='auto = ["a"]\n[route]\nx = ["a", "gone"]')
    store.refresh()
    assert store.error is None
    (note,) = store.catalogue.notes
    assert "routes.toml:3" in note
    assert '"gone"' in note


# -------------------------------------------------------------------------------------------- a word means one preset

CLAIMS = {
    "one artifact": (llama("M"), llama("M")),
    "one artifact in two folders": (llama("M"), llama("x/M")),
    "one alias": (llama("A", 'aliases = ["x"]'), llama("B", 'aliases = ["x"]')),
    "one alias with and without the tag": (llama("A", 'aliases = ["x"]'), llama("B", 'aliases = ["x:latest"]')),
    "an alias that is a name": (llama("A"), llama("B", 'aliases = ["a"]')),
    "an alias that is a stem": (llama("A"), llama("B", 'aliases = ["A"]')),
    "a name that is a stem": (llama("b"), llama("B")),
}


@pytest.mark.parametrize(("one", "other"), CLAIMS.values(), ids=CLAIMS)
def test_two_presets_cannot_share(one: str, other: str, store: PresetStore, folder: Path) -> None:
    write(folder, a=one, b=other)
    message = complaint(store)
    assert "a.toml" in message
    assert "b.toml" in message


def test_a_preset_may_be_called_like_its_own_artifact(store: PresetStore, folder: Path) -> None:
    write(folder, M=llama("M", 'aliases = ["M:latest"]'))
    assert store.refresh()


# ------------------------------------------------------------------------------------------------------- all or nothing

BAD = {
    "a syntax error": (b'engine = "llama-server"\n[model', ":2: is not valid TOML"),
    "a key twice": (b"engine = 1\nengine = 2", ":2: is not valid TOML"),
    "an end too soon": (b'engine = "x"\naliases = [', ":2: is not valid TOML"),
    "not UTF-8": (b'engine = "\xff"', "UTF-8"),
    "an unknown key": (b'engine = "ollama"\nfoo = 1\nruntime.kind = "docker"', ':2: unknown key "foo"'),
    "nothing at all": (b"", '"engine" is missing'),
    "a bomb of brackets": (b"a = " + b"[" * 5_000, "bad.toml"),
}


@pytest.mark.parametrize(("content", "part"), BAD.values(), ids=BAD)
def test_one_bad_file_fails_the_reload_and_the_last_good_state_stays(
    content: bytes, part: str, store: PresetStore, folder: Path
) -> None:
    write(folder, good=llama("A"))
    assert store.refresh()
    before = store.catalogue
    (folder / "bad.toml").write_bytes(content)
    write(folder, later=llama("B"))
    assert part in complaint(store)
    assert store.catalogue is before
    (folder / "bad.toml").unlink()
    assert store.refresh()
    assert store.error is None
    assert list(store.catalogue.presets) == ["good", "later"]


def test_the_first_load_of_a_bad_folder_is_an_error_too(store: PresetStore, folder: Path) -> None:
    write(folder, bad="x = 1")
    assert "bad.toml" in complaint(store)
    assert not store.catalogue.presets


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("auto = 1", ":1: auto: must be a list"),
        ("automatic = []", 'did you mean "auto"'),
        ("[route]\nauto = []", "route.auto"),
        ("[route]\nlatest = []", "latest"),
        ("[route]\nx = ['auto']", "auto"),
        ("[route]\nx = ['a', 'a']", "twice"),
        ("[routes]\nx = []", 'did you mean "route"'),
    ],
)
def test_a_bad_routes_file_fails_the_reload(text: str, part: str, store: PresetStore, folder: Path) -> None:
    write(folder, routes=text)
    message = complaint(store)
    assert "routes.toml" in message
    assert part in message


def test_a_link_to_nowhere_is_an_error(store: PresetStore, folder: Path) -> None:
    (folder / "lost.toml").symlink_to(folder / "gone")
    assert "lost.toml: cannot be read" in complaint(store)


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "presets").touch()
    assert "cannot be read" in complaint(PresetStore(tmp_path / "presets"))


def test_a_folder_that_vanishes_takes_nobody_off_the_card(store: PresetStore, folder: Path) -> None:
    write(folder, a=llama("A"))
    store.refresh()
    shutil.move(folder, folder.parent / "elsewhere")
    assert "is gone" in complaint(store)
    assert list(store.catalogue.presets) == ["a"]
    shutil.move(folder.parent / "elsewhere", folder)
    assert not store.refresh()
    assert store.error is None


def test_an_error_is_looked_at_again_because_its_cure_may_not_show(
    store: PresetStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "lost.toml").symlink_to(folder.parent / "target")
    complaint(store)
    monkeypatch.setattr(store_module, "_scan", lambda _: (("lost.toml", 0, 0, 0),))
    (folder.parent / "target").write_text(llama("A"))
    assert store.refresh()


# ---------------------------------------------------------------------------------------------------------- live reload


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """One entry for every time the files were really read."""
    seen: list[Path] = []
    real = store_module.load

    def counting(folder: Path, files: list[str]) -> store_module.Catalogue:
        seen.append(folder)
        return real(folder, files)

    monkeypatch.setattr(store_module, "load", counting)
    return seen


def test_an_unchanged_folder_is_not_read_again(store: PresetStore, folder: Path, loads: list[Path]) -> None:
    write(folder, a=llama("A"))
    assert store.refresh()
    assert not store.refresh()
    assert len(loads) == 1


def test_every_kind_of_change_is_seen(store: PresetStore, folder: Path) -> None:
    write(folder, a=llama("A"))
    store.refresh()
    write(folder, b=llama("B"))
    assert store.refresh()
    write(folder, b=llama("BB"))
    assert store.refresh()
    write(folder, swap=llama("CC"))
    os.utime(folder / "swap.toml", ns=(0, (folder / "b.toml").stat().st_mtime_ns))
    (folder / "swap.toml").rename(folder / "b.toml")  # same size, same time: only the inode tells
    assert store.refresh()
    assert store.catalogue.presets["b"].stem == "CC"
    (folder / "b.toml").unlink()
    assert store.refresh()
    assert list(store.catalogue.presets) == ["a"]


def test_a_touched_file_with_the_same_content_is_no_new_catalogue(
    store: PresetStore, folder: Path, loads: list[Path]
) -> None:
    write(folder, a=llama("A"))
    store.refresh()
    before = store.catalogue
    os.utime(folder / "a.toml", ns=(0, 10**15))
    assert not store.refresh()
    assert len(loads) == 2
    assert store.catalogue is before


def test_a_file_written_a_moment_ago_is_read_again_because_coarse_clocks_hide_a_second_change(
    folder: Path, loads: list[Path]
) -> None:
    write(folder, a=llama("A"))
    os.utime(folder / "a.toml", ns=(0, 10**18))
    now = 10**18 + 10**9
    store = PresetStore(folder, clock=lambda: now)
    store.refresh()
    (folder / "a.toml").write_text(llama("B"))  # the same size, and the clock has not moved on
    os.utime(folder / "a.toml", ns=(0, 10**18))
    assert store.refresh()
    now += 10**10
    store.refresh()
    store.refresh()
    assert len(loads) == 3
