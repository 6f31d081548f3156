"""Prefetching reads what fits and no more, can be stopped at once, and never disturbs anybody."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpu_turnstile import prefetch as prefetch_module
from gpu_turnstile.prefetch import PIECE, SHARE, STEP, Prefetcher

MUCH = 1 << 40
DROP = Path("/proc/sys/vm/drop_caches")


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model.gguf"
    with file.open("wb") as stream:
        stream.truncate(4 * PIECE)  # holes are read like anything else
    return file


@pytest.fixture
def nothing_cached(monkeypatch):
    monkeypatch.setattr(prefetch_module, "_is_cached", lambda file, offset, count: False)


def prefetched(*paths, available=lambda: MUCH):
    prefetcher = Prefetcher(available)
    prefetcher.begin(paths)
    assert prefetcher.wait(10)
    return prefetcher.progress


def test_all_files_are_read_and_what_cannot_be_read_is_passed_over(model, tmp_path, nothing_cached):
    fifo, odd = tmp_path / "fifo", tmp_path / "odd"
    os.mkfifo(fifo)
    odd.write_bytes(b"x" * (PIECE + 5))
    progress = prefetched(tmp_path / "none", tmp_path, fifo, odd, model)
    assert progress.read == PIECE + 5 + 4 * PIECE
    assert progress.left == 0


def test_no_more_is_read_than_most_of_the_available_memory(model, tmp_path, nothing_cached):
    second = tmp_path / "second"
    second.write_bytes(b"x" * STEP)
    budget = int(3 * PIECE * SHARE)
    progress = prefetched(model, second, available=lambda: 3 * PIECE)
    assert progress.read == budget
    assert progress.left == 4 * PIECE - budget + STEP


def test_it_ends_when_others_take_the_memory_meanwhile(model, nothing_cached):
    answers = iter([MUCH, MUCH, MUCH])
    progress = prefetched(model, available=lambda: next(answers, 0))
    assert progress.read == 2 * PIECE
    assert progress.left == 2 * PIECE


def test_it_is_stopped_within_a_tenth_of_a_second_and_stays_stopped(model, nothing_cached, monkeypatch):
    read = os.preadv

    def slow(*arguments):
        time.sleep(0.05)  # a disk of 20 MB/s
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    prefetcher = Prefetcher(lambda: MUCH)
    prefetcher.begin([model])
    reading, progress = prefetcher._reading, prefetcher.progress
    while not progress.read:
        time.sleep(0.001)
    began = time.monotonic()
    prefetcher.cancel()
    reading.join(5)
    assert time.monotonic() - began < 0.1
    assert progress.done
    assert progress.read < 4 * PIECE
    prefetcher.cancel()


def test_a_new_beginning_ends_the_reading_before(model, tmp_path, nothing_cached):
    prefetcher = Prefetcher(lambda: MUCH)
    prefetcher.begin([model] * 200)
    first, old = prefetcher._reading, prefetcher.progress
    prefetcher.begin([model])
    first.join(5)
    assert prefetcher.wait(5)
    assert old.read < 800 * PIECE
    assert prefetcher.progress.read == 4 * PIECE


def test_what_is_cached_is_not_read_again(tmp_path):
    file = tmp_path / "warm"
    file.write_bytes(os.urandom(PIECE))
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(16)], 0, os.RWF_NOWAIT)
    except (OSError, AttributeError):
        pytest.skip("this file system does not tell what is cached")
    finally:
        os.close(descriptor)
    progress = prefetched(file)
    assert (progress.read, progress.cached) == (0, PIECE)


@pytest.mark.skipif(not os.access(DROP, os.W_OK), reason="only root can empty the page cache")
def test_what_was_prefetched_is_in_the_cache(tmp_path):
    file = tmp_path / "cold"
    file.write_bytes(os.urandom(3 * PIECE))
    os.sync()
    DROP.write_text("1")
    first, again = prefetched(file), prefetched(file)
    assert first.read > 0
    assert (again.read, again.cached) == (0, 3 * PIECE)


def test_it_is_polite_for_its_own_thread_only(model, nothing_cached):
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    prefetched(model)
    assert os.getpriority(os.PRIO_PROCESS, 0) == nice
