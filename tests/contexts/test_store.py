"""The folder of saved conversations: private, bounded, and nothing in it is believed that is not whole."""

from __future__ import annotations

import stat

import pytest

from gpu_turnstile.contexts.store import Entry, Shelf, Store, StoreError, checksum


def put(shelf: Shelf, size: int, at: float) -> str:
    file = shelf.new_file()
    shelf.path(file).write_bytes(bytes(size))
    found, digest = checksum(shelf.path(file))
    shelf.index.entries.append(Entry(file, found, digest, size, at, {}))
    shelf.save()
    return file


def open_store(folder, limit=0, max_age=0.0):
    store = Store(folder / "contexts", limit, max_age)
    store.open_folder()
    return store


def test_files_and_folders_are_for_nobody_else(tmp_path):
    (tmp_path / "contexts").mkdir(mode=0o755)
    store = open_store(tmp_path)
    shelf = store.shelf("p")
    file = put(shelf, 10, 0)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (store.folder, shelf.folder)}
    assert modes == {0o700}
    assert {stat.S_IMODE((shelf.folder / name).stat().st_mode) for name in (file, "index.json")} == {0o600}


def test_what_was_saved_is_found_again_and_what_was_under_way_is_swept(tmp_path):
    store = open_store(tmp_path)
    kept = put(store.shelf("p"), 10, 1)
    left = store.shelf("p").new_file()
    store.close()
    again = open_store(tmp_path)
    assert [entry.file for entry in again.shelf("p").index.entries] == [kept]
    assert not again.shelf("p").path(left).exists()


def test_an_entry_whose_file_has_another_size_or_is_a_link_is_forgotten(tmp_path):
    store = open_store(tmp_path)
    short, linked = put(store.shelf("p"), 10, 1), put(store.shelf("p"), 10, 2)
    store.shelf("p").path(short).write_bytes(bytes(9))
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(10))
    store.shelf("p").path(linked).unlink()
    store.shelf("p").path(linked).symlink_to(secret)
    store.close()
    assert not open_store(tmp_path).shelf("p").index.entries
    assert secret.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"entries": 3}', b"\xff"])
def test_an_index_that_makes_no_sense_is_none(tmp_path, content):
    store = open_store(tmp_path)
    put(store.shelf("p"), 10, 1)
    (store.shelf("p").folder / "index.json").write_bytes(content)
    store.close()
    again = open_store(tmp_path)
    assert not again.shelf("p").index.entries
    assert not list(again.shelf("p").folder.glob("ctx-*"))


def test_an_index_cannot_name_files_elsewhere(tmp_path):
    store = open_store(tmp_path)
    other = tmp_path / "other.bin"
    other.write_bytes(bytes(3))
    store.shelf("p").index.entries.append(Entry("../../other.bin", 3, "", 1, 0, {}))
    store.shelf("p").save()
    store.close()
    assert not open_store(tmp_path).shelf("p").index.entries
    assert other.exists()


def test_the_oldest_go_first_when_the_limit_is_reached_whoever_they_belong_to(tmp_path):
    store = open_store(tmp_path, limit=30)
    first, second = put(store.shelf("p"), 10, 1), put(store.shelf("q"), 10, 2)
    third = put(store.shelf("p"), 10, 3)
    assert store.tidy(now=4) == 0
    assert store.tidy(now=4, room=10) == 1
    assert not store.shelf("p").path(first).exists()
    assert store.shelf("q").path(second).exists()
    assert store.shelf("p").path(third).exists()
    assert store.tidy(now=4, room=100) == 2
    assert store.size == 0


def test_what_is_too_old_goes(tmp_path):
    store = open_store(tmp_path, max_age=5)
    put(store.shelf("p"), 10, 1)
    put(store.shelf("p"), 10, 3)
    assert store.tidy(now=7) == 1
    assert [entry.at for entry in store.shelf("p").index.entries] == [3]


def test_dropping_removes_the_files_of_one_preset_or_of_all(tmp_path):
    store = open_store(tmp_path)
    for name in ("p", "q"):
        put(store.shelf(name), 10, 1)
    assert store.drop("p") == (1, 10)
    assert store.drop() == (1, 10)
    assert not list(store.folder.rglob("ctx-*"))


def test_two_gates_do_not_share_a_folder(tmp_path):
    store = open_store(tmp_path)
    with pytest.raises(StoreError, match="another gate"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_a_folder_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "contexts").write_text("a file")
    with pytest.raises(StoreError, match="contexts"):
        open_store(tmp_path)
