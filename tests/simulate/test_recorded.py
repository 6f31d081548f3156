"""A recorded history as a workload."""

from __future__ import annotations

from contextlib import closing

import pytest

from gpu_turnstile.core.policy import Order
from gpu_turnstile.journal import schema
from gpu_turnstile.journal.schema import Event, Lease
from gpu_turnstile.simulate import recorded
from gpu_turnstile.simulate.compare import run
from gpu_turnstile.simulate.workload import Job
from gpu_turnstile.simulate.world import LOST

T = 1_000_000.0


def row(ticket: int, since: float, until: float, tenant="a", client="x", run=1) -> recorded.Row:
    return recorded.Row(run, ticket, tenant, client, T + since, T + until)


def test_nobody_asked_later_than_a_younger_ticket_was_served():
    """B's ticket 2 waited for the card until 50; ticket 3 was served at 7, so 2 was asked for by then."""
    rows = [row(1, 0, 10), row(2, 50, 60, "b"), row(3, 7, 9), row(4, 70, 80), row(1, 20, 30, run=2)]
    assert recorded.arrivals(rows) == [T, T + 7, T + 7, T + 70, T + 20]


def test_a_quick_return_is_a_loop_and_anything_else_keeps_its_time():
    rows = [row(1, 0, 10), row(2, 13, 20), row(3, 500, 510), row(4, 505, 506)]
    (client,) = recorded.build(rows, (), 0.0).clients
    assert client.jobs == (Job(10.0, at=0.0), Job(7.0, pause=3.0), Job(10.0, at=500.0), Job(1.0, at=505.0))


def test_the_cost_of_a_swap_is_what_it_usually_was():
    swaps = [Event(T + n, "swapped", {"target": "a", "seconds": s}) for n, s in enumerate((5.0, 6.0, 60.0))]
    workload = recorded.build([row(1, 0, 10), row(2, 20, 30, "b")], swaps, 0.0)
    assert [preset.swap for preset in workload.presets] == [6.0, recorded.SWAP]


def test_a_client_on_two_presets_is_two_here():
    workload = recorded.build([row(1, 0, 10), row(2, 20, 30, "b")], (), 0.0)
    assert [client.name for client in workload.clients] == ["x on a", "x on b"]


def test_an_image_server_that_never_did_two_things_at_once_does_not_here():
    rows = [row(1, 0, 10, "images", "y"), row(2, 10.2, 20, "images", "z"), row(3, 20.1, 30, "images", "y")]
    rows += [row(4, 40, 50), row(5, 45, 55)]
    workload = recorded.build(rows, (), 0.0)
    assert {preset.name: preset.exclusive for preset in workload.presets} == {"a": False, "images": True}


def test_a_file_of_the_gate_is_played_under_every_order(tmp_path):
    path = tmp_path / schema.FILE_NAME
    leases = [
        Lease(n, "ab"[n % 2], f"client {n % 2}", None, T + 30 * n, T + 30 * n + 12, "released") for n in range(100)
    ]
    with closing(schema.open_file(path)) as connection:
        schema.add_leases(connection, 1, leases)
        schema.add_events(connection, [Event(T, "swapped", {"target": "a", "seconds": 7.0})])
    workload = recorded.load(path, T, T + 10_000, context=20.0)
    assert workload.seconds == pytest.approx(99 * 30 + 13)
    for order in Order:
        assert run(workload, order.value, LOST).done >= 60


def test_a_history_with_nothing_in_it_says_so(tmp_path):
    path = tmp_path / schema.FILE_NAME
    with pytest.raises(recorded.NoHistory, match="cannot be read"):
        recorded.load(path, 0.0, T)
    schema.open_file(path).close()
    with pytest.raises(recorded.NoHistory, match="no request is recorded"):
        recorded.load(path, 0.0, T)
