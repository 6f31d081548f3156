"""Cards say what their driver says, or nothing; and the setting's word opens the right one."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from gpu_turnstile.gpu import select
from gpu_turnstile.gpu.base import Holder, Reading
from gpu_turnstile.gpu.none import NoCard
from gpu_turnstile.gpu.nvml import NvmlCard
from gpu_turnstile.gpu.select import open_card
from gpu_turnstile.gpu.sysfs import find_cards


class FakeNvml(SimpleNamespace):
    """The calls of the driver's library that a card uses; `broken` is raised by every one."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        super().__init__(opened=0, closed=0, broken=None, cards=2)
        self.compute = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=5)]
        self.graphics = [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=5),
            SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None),
        ]

    def _check(self):
        if self.broken:
            raise self.broken

    def nvmlInit(self):
        self._check()
        self.opened += 1

    def nvmlShutdown(self):
        self.closed += 1

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= self.cards:
            raise self.NVMLError("no such card")
        return index

    def nvmlDeviceGetName(self, handle):
        return f"RTX {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._check()
        return SimpleNamespace(total=100, used=60, free=35)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return self.compute

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        if isinstance(self.graphics, Exception):
            raise self.graphics
        return self.graphics


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_an_nvidia_card_tells_memory_and_holders(nvml):
    card = NvmlCard(1)
    reading = card.read()
    assert (reading.total, reading.used, reading.free) == (100, 65, 35)
    mine, unknown = reading.holders
    assert (mine.pid, mine.used) == (os.getpid(), 5)
    assert "python" in mine.name or "pytest" in mine.name
    assert unknown == Holder(2**22 + 1, "?", None)
    assert card.name == "RTX 1"


def test_a_driver_that_lists_no_processes_still_tells_memory(nvml):
    nvml.graphics = FakeNvml.NVMLError("not supported")
    assert NvmlCard().read() == Reading(100, 65, None)


def test_a_driver_that_fails_makes_the_reading_unknown_and_is_opened_afresh(nvml):
    card = NvmlCard()
    assert card.read() is not None
    nvml.broken = FakeNvml.NVMLError("card lost")
    assert card.read() is None
    assert nvml.closed == 1
    nvml.broken = None
    assert card.read() is not None
    assert nvml.opened == 2
    card.close()
    card.close()
    assert nvml.closed == 2


def amd(root, name, total, used):
    device = root / name / "device"
    device.mkdir(parents=True)
    (device / "mem_info_vram_total").write_text(f"{total}\n")
    (device / "mem_info_vram_used").write_text(f"{used}\n")


def test_the_largest_amd_card_comes_first(tmp_path):
    amd(tmp_path, "card0", 512, 100)
    amd(tmp_path, "card1", 16000, 4000)
    (tmp_path / "card1-DP-1").mkdir()
    cards = find_cards(tmp_path)
    assert [card.read() for card in cards] == [Reading(16000, 4000), Reading(512, 100)]
    assert cards[0].name == "AMD card1"


@pytest.mark.parametrize("damage", ["[N/A]", "", None])
def test_an_amd_card_that_cannot_be_read_is_unknown(tmp_path, damage):
    amd(tmp_path, "card0", 512, 100)
    [card] = find_cards(tmp_path)
    used = tmp_path / "card0" / "device" / "mem_info_vram_used"
    used.unlink() if damage is None else used.write_text(damage)
    assert card.read() is None


@pytest.fixture
def no_amd(monkeypatch):
    monkeypatch.setattr(select, "find_cards", list)


def test_auto_takes_nvidia_then_amd_then_nothing(nvml, no_amd, monkeypatch, tmp_path):
    assert open_card("auto").kind == "nvml"
    nvml.broken = FakeNvml.NVMLError("no driver")
    assert isinstance(open_card("auto"), NoCard)
    amd(tmp_path, "card0", 512, 100)
    monkeypatch.setattr(select, "find_cards", lambda: find_cards(tmp_path))
    assert open_card("auto").kind == "sysfs"


def test_a_card_is_chosen_by_its_number(nvml):
    assert open_card("nvml:1").name == "RTX 1"
    with pytest.raises(ValueError, match="nvml:2"):
        open_card("nvml:2")


@pytest.mark.parametrize("spec", ["", "gpu", "nvml:x", "none:1", "sim:", "sim"])
def test_an_unknown_word_is_refused_naming_the_good_ones(spec):
    with pytest.raises(ValueError, match="use auto, none, nvml"):
        open_card(spec)


def test_a_card_that_is_not_there_is_refused(no_amd, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for spec in ("nvml", "sysfs"):
        with pytest.raises(ValueError, match=f"cannot open card '{spec}'"):
            open_card(spec)


def test_none_reads_nothing():
    assert open_card("none").read() is None


def test_sim_opens_a_simulated_card_at_its_path(tmp_path):
    pytest.importorskip("gpu_turnstile.sim.card")
    card = open_card(f"sim:{tmp_path / 'card.json'}")
    assert card.kind == "sim"
    assert card.read() is not None
    card.close()
