"""Small children to start, and how to tell what became of them."""

from __future__ import annotations

import asyncio

import psutil

from gpu_turnstile.runtimes.process import ProcessRuntime


def sh(script, **settings):
    return ProcessRuntime(["/bin/sh", "-c", script], **settings)


async def until(condition):
    while not condition():  # noqa: ASYNC110 - a child's output makes no event here
        await asyncio.sleep(0.005)


async def printed(runtime, *lines):
    await until(lambda: set(lines) <= set(runtime.output()))


async def pids_printed(runtime, count):
    await until(lambda: len(runtime.output()) >= count)
    return [int(line) for line in runtime.output()]


def lives(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
