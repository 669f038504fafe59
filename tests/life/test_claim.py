"""Claim: who gets which job, and what is written before any of its code runs."""

from datetime import timedelta

import pytest

from cyclone_sqla import JobSpec
from cyclone_sqla.outcomes import GivenBack
from tests.life.hands import FAILED, MINUTE, Hands


def test_the_attempt_is_counted_and_committed_by_the_claim(hands: Hands) -> None:
    job_id = hands.enqueue()

    claimed = hands.claim_one(worker="w", lease=timedelta(seconds=45))

    row = hands.job(job_id)
    assert (row.state, row.attempt, row.worker, row.lease) == ("running", 1, "w", claimed.lease)
    assert row.leased_until == hands.clock.now() + timedelta(seconds=45)
    assert row.started_at == row.updated_at == hands.clock.now()
    assert claimed.attempt == 1


def test_smaller_priority_first_then_the_older_one_whatever_the_kind(hands: Hands) -> None:
    jobs = [("b", 5), ("a", 5), ("a", 0), ("b", 0), ("b", -1), ("a", 5)]
    ids = [hands.enqueue(kind, priority=priority) for kind, priority in jobs]

    one_by_one = [hands.claim_one(kinds=["a", "b"]).id for _ in range(3)]
    rest = [job.id for job in hands.claim(kinds=["b", "a"])]

    assert [*one_by_one, *rest] == [ids[i] for i in (4, 2, 3, 0, 1, 5)]


def test_no_queue_gives_more_than_its_free_slots(hands: Hands) -> None:
    for kind in ("a", "b"):
        hands.enqueue_many(5, kind, queue="ledger")
        hands.enqueue_many(5, kind, queue="mail")
        hands.enqueue_many(5, kind, queue="of-others")

    claimed = hands.claim(3, queues=["ledger", "mail"], kinds=["a", "b"])

    assert sorted(job.queue for job in claimed) == ["ledger"] * 3 + ["mail"] * 3


def test_an_unknown_kind_is_never_claimed_and_burns_no_attempt(hands: Hands) -> None:
    unknown = hands.enqueue_many(50, "of-another-release")
    known = hands.enqueue("work")
    before = hands.job(unknown[0])

    assert [job.id for job in hands.claim(kinds=["work", "never-enqueued"])] == [known]

    after = hands.job(unknown[0])
    assert (after.state, after.attempt, after.updated_at) == ("available", 0, before.updated_at)


def test_a_paused_queue_is_not_claimed_from_also_by_a_later_worker(hands: Hands) -> None:
    paused, other = hands.enqueue(queue="mail"), hands.enqueue(queue="ledger")
    hands.execute(
        "INSERT INTO cyclone_queue (name, paused_at) VALUES ('mail', :at)",
        at="2030-01-01T00:00:00Z" if hands.dialect.name == "postgresql" else 1,
    )

    assert [job.id for job in hands.claim(queues=["mail", "ledger"], worker="w1")] == [other]
    assert hands.claim(queues=["mail"], worker="started later") == []

    hands.execute("UPDATE cyclone_queue SET paused_at = NULL")
    assert [job.id for job in hands.claim(queues=["mail"], worker="w1")] == [paused]


def test_a_job_whose_time_has_not_come_is_not_claimed(hands: Hands) -> None:
    hands.enqueue(process_in=timedelta(hours=1))
    retrying = hands.enqueue()
    hands.settle(hands.claim_one(), FAILED)

    assert hands.claim() == []
    assert hands.job(retrying).waits_for == "retry"


def test_a_claimed_job_is_not_claimed_again(hands: Hands) -> None:
    ids = hands.enqueue_many(4)

    first, second = hands.claim(2, worker="a"), hands.claim(10, worker="b")

    assert [job.id for job in (*first, *second)] == ids
    assert hands.claim(worker="c") == []


def test_leases_only_rise_through_every_way_back(hands: Hands) -> None:
    hands.enqueue()
    leases: list[int] = []
    for outcome in (GivenBack(), FAILED, None, GivenBack()):
        job = hands.claim_one()
        leases.append(job.lease)
        if outcome is not None:
            hands.settle(job, outcome)
        hands.clock.advance(minutes=2)
        hands.rescue()
        hands.stage()
    hands.enqueue()
    leases += [job.lease for job in hands.claim(2)]

    assert leases == sorted(set(leases))
    assert leases[0] > 0


@pytest.mark.parametrize(
    ("after", "expired"), [(timedelta(minutes=59), False), (timedelta(minutes=60), True)]
)
def test_the_deadline_is_judged_by_the_clock_of_the_claim(
    hands: Hands, after: timedelta, expired: bool
) -> None:
    hands.enqueue(deadline=hands.clock.now() + timedelta(hours=1))
    hands.clock.advance(seconds=after.total_seconds())

    job = hands.claim_one()

    assert job.expired is expired
    assert job.time_left == timedelta(hours=1) - after


def test_a_run_is_told_all_it_needs(hands: Hands) -> None:
    spec = JobSpec(
        kind="work",
        arguments='{"n":[1.10]}',
        unique="order:7",
        max_attempts=3,
        timeout=timedelta(seconds=1.5),
        deadline=hands.clock.now() + MINUTE,
        tenant="t",
        trace_id="abc",
        headers={"a": "ö"},
    )
    with hands.engine.begin() as connection:
        ref = hands.cyclone.enqueue_spec(connection, spec)

    job = hands.claim_one()

    assert (job.id, job.kind, job.queue) == (ref.id, "work", "default")
    assert (job.arguments, job.unique_key, job.max_attempts) == (spec.arguments, "order:7", 3)
    assert (job.timeout, job.deadline) == (spec.timeout, spec.deadline)
    assert (job.tenant, job.trace_id, job.headers) == ("t", "abc", {"a": "ö"})
    assert hands.job(job.id).headers == {"a": "ö"}
    assert (job.run_at, job.created_at) == (hands.clock.now(), hands.clock.now())
