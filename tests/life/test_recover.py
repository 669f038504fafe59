"""Recover: a worker that knows itself alone takes back what runs, whoever holds the lease."""

from cyclone_sqla import State, operations
from cyclone_sqla.operations import Settled
from tests.life.hands import DONE, Hands


def recover(hands: Hands, limit: int = 100) -> Settled:
    """Recover one batch."""
    with hands.transaction() as connection:
        return operations.recover(connection, hands.dialect, limit=limit, history_limit=25)


def test_a_running_job_is_available_at_once_and_its_attempt_stays_counted(hands: Hands) -> None:
    job_id = hands.enqueue()
    hands.claim_one(worker="gone")

    assert recover(hands).states == {job_id: State.AVAILABLE}

    row = hands.job(job_id)
    assert (row.attempt, row.crashes, row.leased_until) == (1, 1, None)
    assert [(e.event, e.attempt, e.worker) for e in hands.history(job_id)] == [
        ("rescue", 1, "gone")
    ]
    assert row.last_error == (
        "WorkerLost: worker gone was lost during attempt 1: it was gone when the next one started"
    )
    assert hands.claim_one().attempt == 2


def test_a_job_that_crashes_its_worker_again_and_again_is_recovered_at_once_each_time(
    hands: Hands,
) -> None:
    job_id = hands.enqueue()
    for _ in range(3):
        hands.claim_one()
        assert recover(hands).states == {job_id: State.AVAILABLE}
    assert hands.job(job_id).attempt == 3


def test_a_job_in_its_last_attempt_is_discarded_with_the_reason(hands: Hands) -> None:
    job_id = hands.enqueue(max_attempts=1)
    hands.claim_one(worker="gone")

    assert recover(hands).states == {job_id: State.DISCARDED}

    row = hands.job(job_id)
    assert (row.attempt, row.dead_letter) == (1, True)
    assert row.last_error == "WorkerLost: worker gone was lost during attempt 1, the last of 1"
    assert [entry.event for entry in hands.history(job_id)] == ["discard"]


def test_a_job_that_was_to_be_cancelled_is_cancelled(hands: Hands) -> None:
    job_id = hands.enqueue()
    hands.claim_one()
    hands.ask_to_cancel(job_id)

    assert recover(hands).states == {job_id: State.CANCELLED}


def test_only_running_jobs_are_touched(hands: Hands) -> None:
    hands.enqueue()
    hands.settle(hands.claim_one(), DONE)
    hands.enqueue(process_in=60)
    hands.enqueue()
    before = hands.rows()

    assert recover(hands).states == {}
    assert hands.rows() == before


def test_it_goes_on_batch_by_batch_until_none_is_left(hands: Hands) -> None:
    ids = hands.enqueue_many(5)
    hands.claim(5)

    batches = [recover(hands, limit=2).states for _ in range(4)]

    assert [len(batch) for batch in batches] == [2, 2, 1, 0]
    assert sorted(job_id for batch in batches for job_id in batch) == ids


def test_the_run_that_was_recovered_changes_nothing_any_more(hands: Hands) -> None:
    hands.enqueue()
    job = hands.claim_one()
    recover(hands)
    before = hands.rows()

    assert hands.settle(job, DONE).states == {}
    assert hands.rows() == before


def test_a_sequence_goes_on_behind_a_head_that_is_discarded(hands: Hands) -> None:
    head = hands.enqueue(sequence="account-1", max_attempts=1)
    follower = hands.enqueue(sequence="account-1")
    hands.admit()
    assert hands.claim_one().id == head

    assert recover(hands).states == {head: State.DISCARDED}

    hands.admit()
    assert hands.claim_one().id == follower


def test_a_head_keeps_its_place_when_it_is_recovered(hands: Hands) -> None:
    head = hands.enqueue(sequence="account-1")
    hands.enqueue(sequence="account-1")
    hands.admit()
    hands.claim_one()

    recover(hands)

    hands.admit()
    assert [job.id for job in hands.claim()] == [head]
