"""`python -m gpu_turnstile.sim ollama --port 11435`: the same as `turnstile sim …`."""

from __future__ import annotations

from gpu_turnstile.sim.app import app

app(prog_name="python -m gpu_turnstile.sim")
