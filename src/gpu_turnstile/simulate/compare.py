"""One workload under several orders: the gate's own two, llama-swap's, each with contexts lost and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gpu_turnstile.core.model import Tenant
from gpu_turnstile.core.policy import Order, Rules
from gpu_turnstile.core.scheduler import Scheduler
from gpu_turnstile.simulate.baselines import LlamaSwap
from gpu_turnstile.simulate.outcome import Outcome
from gpu_turnstile.simulate.workload import Workload
from gpu_turnstile.simulate.world import Gate, World

LLAMA_SWAP = "llama-swap"
POLICIES = (Order.ARRIVAL.value, LLAMA_SWAP, Order.AMORTISED.value)  # the seed's order is `arrival`


def gate(policy: str, rules: Rules) -> Callable[[Iterable[Tenant]], Gate]:
    if policy == LLAMA_SWAP:
        return LlamaSwap
    return lambda tenants: Scheduler(tenants, replace(rules, order=Order(policy)))


def run(workload: Workload, policy: str, context: str, rules: Rules | None = None) -> Outcome:
    tenants = [preset.tenant() for preset in workload.presets]
    return World(workload, gate(policy, rules or Rules())(tenants), policy, context).run()


def compare(
    workload: Workload, policies: Sequence[str], contexts: Sequence[str], rules: Rules | None = None
) -> list[Outcome]:
    """In the order of the arguments."""
    return [run(workload, policy, context, rules) for context in contexts for policy in policies]
