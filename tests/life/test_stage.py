"""Stage: what waits for a time becomes available when it has come."""

from datetime import timedelta

from cyclone_sqla import operations
from tests.life.hands import FAILED, NOT_NOW, Hands

HOUR = timedelta(hours=1)


def next_due(hands: Hands) -> timedelta | None:
    with hands.held.reading() as connection:
        return operations.look_ahead(connection, hands.dialect).due_in


def test_a_delayed_job_becomes_available_when_it_is_due_and_not_before(hands: Hands) -> None:
    job_id = hands.enqueue(process_in=HOUR, queue="later")
    hands.clock.advance(minutes=59, seconds=59.999_999)
    assert hands.stage() == []
    assert hands.job(job_id).waits_for == "time"

    hands.clock.advance(microseconds=1)
    assert hands.stage() == ["later"]

    row = hands.job(job_id)
    assert (row.state, row.waits_for, row.updated_at) == ("available", None, hands.clock.now())
    assert row.run_at == hands.clock.now()
    assert hands.stage() == []


def test_a_snoozed_and_a_retrying_job_are_staged_as_well(hands: Hands) -> None:
    hands.enqueue_many(2)
    snoozed, failed = hands.claim()
    hands.settle(snoozed, NOT_NOW)
    hands.settle(failed, FAILED)

    hands.clock.advance(seconds=FAILED.delay.total_seconds())
    assert len(hands.stage()) == 1
    assert hands.claim_one().id == failed.id

    hands.clock.advance(seconds=NOT_NOW.delay.total_seconds())
    assert len(hands.stage()) == 1
    assert hands.claim_one().id == snoozed.id


def test_the_longest_due_come_first_and_no_more_than_a_batch(hands: Hands) -> None:
    ids = [hands.enqueue(process_in=HOUR * hours) for hours in (3, 1, 2)]
    hands.clock.advance(hours=4)

    assert len(hands.stage(limit=2)) == 2

    assert [hands.job(job_id).state for job_id in ids] == ["pending", "available", "available"]


def test_only_what_waits_for_a_time_is_staged(hands: Hands) -> None:
    waiting = hands.enqueue_many(3)
    for job_id, waits_for in zip(waiting, ("admission", "turn", "dependencies"), strict=True):
        hands.change(job_id, state="pending", waits_for=waits_for)
    paused = hands.enqueue()
    hands.change(paused, state="paused")

    assert hands.stage() == []
    assert next_due(hands) is None


def test_the_next_due_time_is_the_earliest_of_what_waits_for_one(hands: Hands) -> None:
    hands.enqueue(process_in=HOUR)
    hands.enqueue(process_in=3 * HOUR)
    hands.enqueue()

    assert next_due(hands) == HOUR
    hands.clock.advance(minutes=90)
    assert next_due(hands) == -HOUR / 2
