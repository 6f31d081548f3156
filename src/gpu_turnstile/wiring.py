"""The settings in the words of the rooms they are for."""

from __future__ import annotations

from gpu_turnstile.core.budget import capacity
from gpu_turnstile.core.policy import Rules
from gpu_turnstile.engines.base import Timing
from gpu_turnstile.gateway.server import Options
from gpu_turnstile.gpu.base import Reading
from gpu_turnstile.seats import GB
from gpu_turnstile.settings import Settings


def rules(settings: Settings, reading: Reading | None) -> Rules:
    """The card's own size counts where it can be read and nobody said otherwise."""
    limit = settings.llmc_vram_limit_gb
    if reading is not None:
        total = reading.total / GB
        limit = total if settings.source("LLMC_VRAM_LIMIT_GB") == "default" else min(limit, total)
    reserve = min(settings.llmc_vram_reserve_gb, limit / 2)
    return Rules(
        order=settings.turnstile_policy,
        max_wait=settings.turnstile_max_wait,
        patience=settings.turnstile_image_batch_max_wait or None,  # 0: the document's letter, see `single`
        colocate=settings.turnstile_colocate,
        capacity=capacity(limit, reserve),
        retry_after=settings.busy_retry_after,
        rollback=settings.llmc_rollback,
        home=settings.llmc_idle_restore,
        home_after=settings.llmc_idle_restore_s,
    )


def timing(settings: Settings) -> Timing:
    return Timing(
        unload_timeout=settings.unload_timeout,
        unload_poll=settings.unload_poll_interval,
        history_poll=settings.history_poll_interval,
        job_timeout=settings.job_timeout,
        free_timeout=settings.free_timeout,
        warm_timeout=settings.warm_timeout,
        call_timeout=settings.probe_timeout,
        idle_timeout=settings.job_timeout,
    )


def options(settings: Settings) -> Options:
    return Options(
        body_limit=settings.turnstile_body_limit,
        head_limit=settings.turnstile_head_limit,
        max_headers=settings.turnstile_max_headers,
        prompt_capture_limit=settings.prompt_capture_limit,
        llm_wait=0 if settings.llm_busy_mode == "reject" else settings.llm_wait_timeout,
        busy_status=settings.llm_busy_status if settings.llm_busy_mode == "reject" else 503,
        backoff_initial=settings.backoff_initial,
        backoff_max=settings.backoff_max,
        upstream_idle=settings.turnstile_upstream_idle,
        connect_timeout=settings.turnstile_connect_timeout,
        head_timeout=settings.turnstile_head_timeout,
        idle_timeout=settings.turnstile_idle_timeout,
        body_timeout=settings.turnstile_body_timeout,
        max_connections=settings.turnstile_max_connections,
        keepalive_interval=settings.turnstile_keepalive_interval,
        allowed_hosts=settings.turnstile_allowed_hosts,
        allowed_origins=settings.turnstile_allowed_origins,
        api_keys={key.key: key.name for key in settings.turnstile_api_keys},
        log_requests=settings.loglevel in ("info", "debug"),
    )
