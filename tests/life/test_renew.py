"""Renew: a healthy run keeps its lease, and learns in time what became of it.

What a user may expect of it is in the contract.
"""

from tests.life.hands import DONE, Hands, run_of


def test_a_lapsed_lease_that_nobody_took_is_renewed(hands: Hands) -> None:
    hands.enqueue()
    job = hands.claim_one()
    hands.clock.advance(hours=1)

    assert hands.renew(job).lost == []
    assert hands.rescue().states == {}


def test_a_lease_is_lost_when_another_worker_has_the_job_or_it_has_ended(hands: Hands) -> None:
    hands.enqueue_many(4)
    kept, retaken, rescued, ended = hands.claim()
    hands.clock.advance(minutes=2)
    hands.renew(kept, ended)
    hands.rescue()
    hands.claim_one(worker="another")
    hands.settle(ended, DONE)
    before = [row for row in hands.rows() if row.id != kept.id]

    renewal = hands.renew(kept, retaken, rescued, ended)

    assert renewal.lost == [run_of(retaken), run_of(rescued), run_of(ended)]
    assert [row for row in hands.rows() if row.id != kept.id] == before


def test_a_job_that_is_gone_is_lost(hands: Hands) -> None:
    hands.enqueue()
    job = hands.claim_one()._replace(id=4_711)

    assert hands.renew(job).lost == [run_of(job)]


def test_renewing_nothing_is_fine(hands: Hands) -> None:
    assert hands.renew().lost == []


def test_a_lost_run_is_told_apart_from_the_new_run_of_its_job(hands: Hands) -> None:
    hands.enqueue()
    lost = hands.claim_one()
    hands.clock.advance(minutes=2)
    hands.rescue()
    taken_again = hands.claim_one()

    assert hands.renew(lost, taken_again).lost == [run_of(lost)]
    assert hands.renew(taken_again).lost == []
