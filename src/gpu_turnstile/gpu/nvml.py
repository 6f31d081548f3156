"""NVIDIA cards, by the driver's own library. Any error makes the reading unknown and the next one start afresh
(drivers are reloaded, cards fall off the bus). Process ids are the host's; memory per process may be unknown."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import psutil

from gpu_turnstile.gpu.base import Holder, Reading


class NvmlCard:
    """Card `index` of the driver's order. The library is loaded at the first reading."""

    kind: ClassVar[str] = "nvml"

    def __init__(self, index: int = 0) -> None:
        self.name = f"NVIDIA {index}"
        self._index = index
        self._nvml: Any = None
        self._handle: Any = None

    def read(self) -> Reading | None:
        try:
            if self._handle is None:
                self._open()
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
            return Reading(int(memory.total), int(memory.total) - int(memory.free), self._holders())
        except Exception:  # the library raises its own, ctypes', and what a half-installed driver makes of it
            self.close()
            return None

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        self._nvml = self._handle = None

    def _open(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(self._index)
        name = pynvml.nvmlDeviceGetName(self._handle)
        self.name = name.decode() if isinstance(name, bytes) else str(name)

    def _holders(self) -> tuple[Holder, ...] | None:
        """None where the driver does not list processes; one that computes and draws is listed twice by it."""
        try:
            listed = [
                *self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle),
                *self._nvml.nvmlDeviceGetGraphicsRunningProcesses(self._handle),
            ]
        except self._nvml.NVMLError:
            return None
        return tuple(Holder(p.pid, _name(p.pid), p.usedGpuMemory) for p in {p.pid: p for p in listed}.values())


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "?"
