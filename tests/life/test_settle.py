"""Settle: how a run ends is written once, by whoever holds the lease, and by nobody else."""

from datetime import timedelta

import pytest

from cyclone_sqla import DuplicateError, State
from cyclone_sqla.failures import Failure
from cyclone_sqla.outcomes import (
    CancelledOutcome,
    Completed,
    Discarded,
    GivenBack,
    Retried,
    Snoozed,
)
from tests.life.hands import BROKE, DONE, FAILED, HOPELESS, NOT_NOW, Hands

NOTHING = timedelta(0)

ENDS = {
    "completed": DONE,
    "completed without its result": Completed(failure=BROKE),
    "retried": FAILED,
    "retried at once": Retried(NOTHING, BROKE),
    "snoozed": NOT_NOW,
    "discarded": HOPELESS,
    "cancelled": CancelledOutcome(BROKE),
    "given back": GivenBack(),
}


def test_a_run_that_returned_is_completed_with_its_result_to_the_letter(hands: Hands) -> None:
    job_id = hands.enqueue()
    job = hands.claim_one()
    hands.clock.advance(seconds=3)

    settled = hands.settle(job, Completed('{"b":1.10,"a":-0.0}'))

    row = hands.job(job_id)
    assert settled.states == {job_id: State.COMPLETED}
    assert (row.state, row.result, row.attempt) == ("completed", '{"b":1.10,"a":-0.0}', 1)
    assert row.finished_at == row.completed_at == row.updated_at == hands.clock.now()
    assert (row.leased_until, row.dead_letter, row.failed_at) == (None, None, None)
    assert hands.history(job_id) == []


def test_a_result_that_could_not_be_kept_does_not_undo_the_work(hands: Hands) -> None:
    job_id = hands.enqueue()

    hands.settle(hands.claim_one(), Completed(failure=BROKE))

    row = hands.job(job_id)
    assert (row.state, row.result, row.last_error) == ("completed", None, BROKE.error)
    assert row.failed_at is None
    assert [entry.event for entry in hands.history(job_id)] == ["complete"]


def test_a_failed_attempt_waits_for_its_retry_and_is_written_down(hands: Hands) -> None:
    job_id = hands.enqueue()
    job = hands.claim_one(worker="w-7")

    hands.settle(job, FAILED, worker="w-7")

    row, (entry,) = hands.job(job_id), hands.history(job_id)
    assert (row.state, row.waits_for, row.last_error) == ("pending", "retry", BROKE.error)
    assert row.run_at == hands.clock.now() + FAILED.delay
    assert (row.failed_at, row.finished_at) == (hands.clock.now(), None)
    assert (entry.event, entry.attempt, entry.lease) == ("retry", 1, job.lease)
    assert (entry.worker, entry.error, entry.details) == ("w-7", BROKE.error, BROKE.details)
    assert entry.at == hands.clock.now()


def test_a_retry_without_delay_can_run_at_once(hands: Hands) -> None:
    hands.enqueue()

    hands.settle(hands.claim_one(), Retried(NOTHING, BROKE))

    assert hands.claim_one().attempt == 2


def test_a_snooze_does_not_count_towards_the_limit(hands: Hands) -> None:
    job_id = hands.enqueue(max_attempts=2)
    for _ in range(5):
        hands.settle(hands.claim_one(), NOT_NOW)
        assert hands.job(job_id).waits_for == "time"
        hands.clock.advance(minutes=5)
        hands.stage()

    job = hands.claim_one()

    assert (job.attempt, job.snoozes, job.attempts_left) == (6, 5, 1)
    assert {entry.event for entry in hands.history(job_id)} == {"snooze"}
    assert hands.job(job_id).failed_at is None


def test_a_discarded_job_is_a_dead_letter_with_its_reason(hands: Hands) -> None:
    job_id = hands.enqueue()

    hands.settle(hands.claim_one(), HOPELESS)

    row = hands.job(job_id)
    assert (row.state, row.dead_letter, row.last_error) == ("discarded", True, BROKE.error)
    assert row.finished_at == row.failed_at == hands.clock.now()
    assert [entry.event for entry in hands.history(job_id)] == ["discard"]


def test_a_job_that_may_be_skipped_leaves_no_dead_letter(hands: Hands) -> None:
    job_id = hands.enqueue()
    hands.change(job_id, on_failure="skip")

    hands.settle(hands.claim_one(), HOPELESS)

    assert (hands.job(job_id).state, hands.job(job_id).dead_letter) == ("discarded", None)


def test_what_is_given_back_has_its_attempt_back_but_not_its_lease(hands: Hands) -> None:
    job_id = hands.enqueue()
    job = hands.claim_one()

    hands.settle(job, GivenBack())

    row = hands.job(job_id)
    assert (row.state, row.attempt, row.lease) == ("available", 0, job.lease)
    assert hands.history(job_id) == []


def test_a_cancel_asked_for_while_it_ran_decides_whatever_the_action_did(hands: Hands) -> None:
    for name, outcome in ENDS.items():
        job_id = hands.enqueue(max_attempts=5)
        job = hands.claim_one()
        hands.ask_to_cancel(job_id)

        settled = hands.settle(job, outcome)

        row = hands.job(job_id)
        assert settled.states == {job_id: State.CANCELLED}, name
        assert (row.state, row.waits_for, row.dead_letter) == ("cancelled", None, None), name
        assert row.finished_at == hands.clock.now(), name
        assert [entry.event for entry in hands.history(job_id)] == ["cancel"], name


@pytest.mark.parametrize("other", ["has completed it", "runs it", "failed at it", "is not there"])
def test_a_late_settle_changes_nothing_at_all(hands: Hands, other: str) -> None:
    hands.enqueue(max_attempts=100)
    late = hands.claim_one(worker="late")
    hands.clock.advance(minutes=2)
    hands.rescue()
    if other != "is not there":
        job = hands.claim_one(worker="other")
        if other == "has completed it":
            hands.settle(job, DONE, worker="other")
        elif other == "failed at it":
            hands.settle(job, FAILED, worker="other")
    before = hands.rows()

    for name, outcome in ENDS.items():
        settled = hands.settle(late, outcome, worker="late")

        assert hands.rows() == before, name
        assert (settled.states, settled.busy, list(settled.refused)) == ({}, [], [late.id]), name


def test_an_end_is_written_once(hands: Hands) -> None:
    for name, outcome in ENDS.items():
        hands.enqueue()
        job = hands.claim_one()
        hands.settle(job, outcome)
        before = hands.rows()

        settled = hands.settle(job, outcome)

        assert hands.rows() == before, name
        assert (settled.states, list(settled.refused)) == ({}, [job.id]), name
        hands.forget(job.id)


def test_the_number_of_the_lease_decides_and_not_its_time(hands: Hands) -> None:
    job_id = hands.enqueue()
    job = hands.claim_one()
    hands.clock.advance(hours=9)

    hands.settle(job, DONE)

    assert hands.job(job_id).state == "completed"


def test_a_batch_tells_what_was_written_from_what_was_refused(hands: Hands) -> None:
    jobs = (hands.enqueue_many(6), hands.claim())[1]
    stale = [job._replace(lease=job.lease + 1000) for job in jobs[:2]]

    plain = hands.settle_all([(job, DONE) for job in (*stale, jobs[2], jobs[3])])
    others = hands.settle_all([(stale[0], FAILED), (jobs[4], FAILED), (jobs[5], HOPELESS)])

    assert plain.states == {jobs[2].id: State.COMPLETED, jobs[3].id: State.COMPLETED}
    assert list(plain.refused) == [jobs[0].id, jobs[1].id]
    assert others.states == {jobs[4].id: State.PENDING, jobs[5].id: State.DISCARDED}
    assert list(others.refused) == [jobs[0].id]
    assert hands.history(jobs[0].id) == []


def test_an_ended_job_frees_its_unique_key_and_any_other_holds_it(hands: Hands) -> None:
    for outcome in ENDS.values():
        job_id = hands.enqueue(unique="k")
        is_over = isinstance(outcome, Completed | Discarded | CancelledOutcome)

        hands.settle(hands.claim_one(), outcome)

        if is_over:
            hands.forget(hands.enqueue(unique="k"))
        else:
            with pytest.raises(DuplicateError):
                hands.enqueue(unique="k")
        hands.forget(job_id)


def test_history_keeps_the_latest_entries_only(hands: Hands) -> None:
    job_id = hands.enqueue(max_attempts=100)
    for attempt in range(1, 8):
        outcome = Retried(NOTHING, Failure.of(ValueError(attempt)))
        hands.settle(hands.claim_one(), outcome, history_limit=3)

    kept = [(entry.attempt, entry.error) for entry in hands.history(job_id)]

    assert kept == [(attempt, f"ValueError: {attempt}") for attempt in (5, 6, 7)]


def test_a_snooze_without_a_failure_leaves_no_entry(hands: Hands) -> None:
    job_id = hands.enqueue()

    hands.settle(hands.claim_one(), Snoozed(timedelta(seconds=1)))

    assert hands.history(job_id) == []
