"""The line's own bookkeeping: what must stay true however tickets come and go."""

from __future__ import annotations

from gpu_turnstile.core.line import SPARE, Line
from gpu_turnstile.core.model import Request


def joined(line: Line, ticket: int, want: str = "a", *, owner: str | None = None, token: int | None = None) -> None:
    line.join(Request(ticket, (want,), wait=600.0, token=token), (want,), 0, 0.0, owner)


def test_deadlines_of_answered_tickets_do_not_pile_up():
    line = Line()
    joined(line, 0)
    for ticket in range(1, 5 * SPARE):
        joined(line, ticket)
        line.leave(ticket)
    assert len(line._deadlines) <= SPARE + 4
    assert line.next_deadline == 600.0
    assert [entry.number for entry in line.expired(600.0)] == [0]


def test_a_queue_knows_whose_work_waits_in_it_until_the_last_of_it_has_left():
    line = Line()
    for ticket, owner in enumerate(("ann", "bob", "ann", None)):
        joined(line, ticket, owner=owner)
    (queue,) = line.queues()
    assert set(queue.owners) == {"ann", "bob", None}
    line.leave(0)
    assert set(queue.owners) == {"ann", "bob", None}
    line.leave(2)
    line.leave(3)
    assert set(queue.owners) == {"bob"}


def test_owners_and_tokens_are_still_known_after_the_presets_changed():
    line = Line()
    joined(line, 1, "a", owner="ann", token=7)
    joined(line, 2, "b", owner="bob")
    line.resort(lambda name: 0)
    assert [set(queue.owners) for queue in line.queues()] == [{"ann"}, {"bob"}]
    assert [entry.token for entry in line.with_token()] == [7]
    line.leave(1)
    assert line.with_token() == []
