"""Claim: who gets which job, and what is written before any of its code runs."""

from datetime import timedelta

import pytest

from cyclone_sqla import JobSpec
from cyclone_sqla.outcomes import GivenBack
from tests.life.hands import FAILED, MINUTE, Hands


def test_no_queue_gives_more_than_its_free_slots(hands: Hands) -> None:
    for kind in ("a", "b"):
        hands.enqueue_many(5, kind, queue="ledger")
        hands.enqueue_many(5, kind, queue="mail")
        hands.enqueue_many(5, kind, queue="of-others")

    claimed = hands.claim(3, queues=["ledger", "mail"], kinds=["a", "b"])

    assert sorted(job.queue for job in claimed) == ["ledger"] * 3 + ["mail"] * 3


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
