"""Simulated engines: the demo and the tests stand on them. Their JSON is what the real ones send.

    async with serve(OllamaSim(card=card)) as url: ...

Each is a real HTTP server with faults by switch (`faults.py`), a log of what it was asked and a place on a
simulated card that raises an alarm when two engines hold it at once. Standalone: `turnstile sim --help`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_turnstile.sim.a1111 import A1111Sim
    from gpu_turnstile.sim.card import GB, Alarm, SimCard
    from gpu_turnstile.sim.comfy import ComfySim
    from gpu_turnstile.sim.faults import ComfyFaults, JobFate, LlamaFaults, OllamaFaults, PromptReply
    from gpu_turnstile.sim.invokeai import InvokeAISim
    from gpu_turnstile.sim.koboldcpp import KoboldCppSim
    from gpu_turnstile.sim.llama import LlamaSim
    from gpu_turnstile.sim.lm_studio import LMStudioSim
    from gpu_turnstile.sim.localai import LocalAISim
    from gpu_turnstile.sim.ollama import OllamaSim, SimModel
    from gpu_turnstile.sim.runner import serve
    from gpu_turnstile.sim.servers import ServerFaults
    from gpu_turnstile.sim.sglang import SGLangSim
    from gpu_turnstile.sim.tabbyapi import TabbyAPISim
    from gpu_turnstile.sim.vllm import VLLMSim

__all__ = [
    "GB",
    "A1111Sim",
    "Alarm",
    "ComfyFaults",
    "ComfySim",
    "InvokeAISim",
    "JobFate",
    "KoboldCppSim",
    "LMStudioSim",
    "LlamaFaults",
    "LlamaSim",
    "LocalAISim",
    "OllamaFaults",
    "OllamaSim",
    "PromptReply",
    "SGLangSim",
    "ServerFaults",
    "SimCard",
    "SimModel",
    "TabbyAPISim",
    "VLLMSim",
    "serve",
]

_HOMES = {
    "a1111": ("A1111Sim",),
    "card": ("GB", "Alarm", "SimCard"),
    "comfy": ("ComfySim",),
    "faults": ("ComfyFaults", "JobFate", "LlamaFaults", "OllamaFaults", "PromptReply"),
    "invokeai": ("InvokeAISim",),
    "koboldcpp": ("KoboldCppSim",),
    "llama": ("LlamaSim",),
    "lm_studio": ("LMStudioSim",),
    "localai": ("LocalAISim",),
    "ollama": ("OllamaSim", "SimModel"),
    "runner": ("serve",),
    "servers": ("ServerFaults",),
    "sglang": ("SGLangSim",),
    "tabbyapi": ("TabbyAPISim",),
    "vllm": ("VLLMSim",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a simulator when it is first named: the command line must start fast, and reads no web server."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
