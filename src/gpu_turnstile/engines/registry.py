"""Which engine speaks which dialect. A new one is its own file and its line here."""

from __future__ import annotations

from gpu_turnstile.engines.a1111 import A1111
from gpu_turnstile.engines.base import Engine
from gpu_turnstile.engines.comfyui import ComfyUI
from gpu_turnstile.engines.command import Command, Train
from gpu_turnstile.engines.invokeai import InvokeAI
from gpu_turnstile.engines.koboldcpp import KoboldCpp
from gpu_turnstile.engines.llama_server import LlamaServer
from gpu_turnstile.engines.lm_studio import LMStudio
from gpu_turnstile.engines.localai import LocalAI
from gpu_turnstile.engines.ninfer import NInfer
from gpu_turnstile.engines.ollama import Ollama
from gpu_turnstile.engines.sglang import SGLang
from gpu_turnstile.engines.tabbyapi import TabbyAPI
from gpu_turnstile.engines.vllm import VLLM

ENGINES: dict[str, type[Engine]] = {
    "a1111": A1111,
    "comfyui": ComfyUI,
    "command": Command,
    "invokeai": InvokeAI,
    "koboldcpp": KoboldCpp,
    "llama-server": LlamaServer,
    "lm-studio": LMStudio,
    "localai": LocalAI,
    "ninfer": NInfer,
    "ollama": Ollama,
    "sglang": SGLang,
    "tabbyapi": TabbyAPI,
    "train": Train,
    "vllm": VLLM,
}
