"""Rescue: the jobs of a lost worker run again, and nothing else is touched."""

from datetime import timedelta

import pytest

from cyclone_sqla import State
from tests.life.hands import DONE, FAILED, MINUTE, Hands

EXPIRED = {"seconds": 60}


def crash(hands: Hands, **options: object) -> int:
    """Claim a job and never come back; its id."""
    job = hands.claim_one(**options)
    hands.clock.advance(**EXPIRED)
    return job.id


def test_a_lease_counts_until_its_very_end(hands: Hands) -> None:
    hands.enqueue()
    job = hands.claim_one()

    hands.clock.advance(seconds=59.999_999)
    assert hands.expired() == []
    hands.clock.advance(microseconds=1)
    assert [run.id for run in hands.expired()] == [job.id]


def test_the_second_crash_of_the_same_job_backs_off(hands: Hands) -> None:
    job_id = hands.enqueue()
    crash(hands)
    hands.rescue()
    crash(hands)

    assert hands.rescue(backoff=timedelta(seconds=7)).states == {job_id: State.PENDING}

    row = hands.job(job_id)
    assert (row.waits_for, row.crashes) == ("retry", 2)
    assert row.run_at == hands.clock.now() + timedelta(seconds=7)


def test_snoozes_do_not_bring_a_crashing_job_nearer_to_its_limit(hands: Hands) -> None:
    job_id = hands.enqueue(max_attempts=2)
    hands.change(job_id, attempt=7, snoozes=7)
    crash(hands)

    assert hands.rescue().states == {job_id: State.AVAILABLE}


@pytest.mark.parametrize(
    "meanwhile",
    ["renewed", "completed", "failed", "claimed by another", "claimed by another who is lost too"],
)
def test_what_has_changed_since_it_was_listed_is_left_alone(hands: Hands, meanwhile: str) -> None:
    hands.enqueue_many(2)
    job, other = hands.claim()
    hands.clock.advance(**EXPIRED)
    listed = hands.expired()
    assert len(listed) == 2
    if meanwhile == "renewed":
        hands.renew(job)
    elif meanwhile.startswith("claimed by another"):
        hands.rescue(listed[:1])
        hands.claim_one(worker="another")
        if meanwhile.endswith("who is lost too"):
            hands.clock.advance(**EXPIRED)
    else:
        hands.settle(job, DONE if meanwhile == "completed" else FAILED)
    before = hands.rows()

    rescued = hands.rescue([run for run in listed if run.id == job.id])

    assert rescued.states == {}
    assert hands.rows() == before
    assert hands.rescue(listed).states == {other.id: State.AVAILABLE}


def test_a_lapsed_run_that_was_asked_to_stop_ends_as_cancelled(hands: Hands) -> None:
    job_id = hands.enqueue()
    hands.ask_to_cancel(crash(hands))

    assert hands.rescue().states == {job_id: State.CANCELLED}

    assert [entry.event for entry in hands.history(job_id)] == ["cancel"]
    assert hands.job(job_id).waits_for is None


def test_the_longest_lapsed_come_first_and_no_more_than_a_pass(hands: Hands) -> None:
    hands.enqueue_many(3)
    jobs = [hands.claim_one(lease=MINUTE * minutes) for minutes in (3, 1, 2)]
    hands.clock.advance(minutes=5)

    assert [run.id for run in hands.expired(limit=2)] == [jobs[1].id, jobs[2].id]


def test_rescuing_nothing_is_fine(hands: Hands) -> None:
    assert hands.rescue().states == {}
