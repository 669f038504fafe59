"""Recover: in batches, until none is left; the rest is in the contract."""

from cyclone_sqla import operations
from cyclone_sqla.operations import Settled
from tests.life.hands import Hands


def recover(hands: Hands, limit: int) -> Settled:
    """Recover one batch."""
    with hands.transaction() as connection:
        return operations.recover(connection, hands.dialect, limit=limit, history_limit=25)


def test_it_goes_on_batch_by_batch_until_none_is_left(hands: Hands) -> None:
    ids = hands.enqueue_many(5)
    hands.claim(5)

    batches = [recover(hands, limit=2).states for _ in range(4)]

    assert [len(batch) for batch in batches] == [2, 2, 1, 0]
    assert sorted(job_id for batch in batches for job_id in batch) == ids
