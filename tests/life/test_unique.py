"""A unique key has one active job: the database decides who, and a conflict changes nothing."""

import pytest

from cyclone_sqla import DuplicateError, JobRef, State
from cyclone_sqla.lifecycle import ACTIVE, TERMINAL, WaitsFor
from tests.shop import Order, Shop

HOLDING = [(state, None) for state in ACTIVE if state != State.PENDING] + [
    (State.PENDING, reason) for reason in WaitsFor
]


def test_a_duplicate_is_told_who_holds_the_key(shop: Shop) -> None:
    holder = _enqueue(shop, "order:1", queue="slow", process_in=60)
    with shop.session() as session, session.begin():
        with pytest.raises(DuplicateError) as refused:
            shop.mail.using(unique="order:1").enqueue(session, "bert")
        session.add(Order(note="still usable"))
    error = refused.value
    assert (error.kind, error.key, error.job_id) == ("mail", "order:1", holder.id)
    assert error.job == JobRef(holder.id, "mail", "slow", created=False, state=State.PENDING)
    assert str(error) == (
        f"an active mail job already holds the unique key 'order:1': job {holder.id}"
    )
    (duplicate,) = error.duplicates
    assert (duplicate.index, duplicate.kind, duplicate.key) == (0, "mail", "order:1")
    assert duplicate.job == error.job
    assert shop.job_ids() == [holder.id]
    assert shop.notes() == ["still usable"]


def test_the_holder_can_be_of_the_same_transaction(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        holder = shop.mail.using(unique="u").enqueue(session, "anna")
        with pytest.raises(DuplicateError) as refused:
            shop.mail.using(unique="u").enqueue(session, "bert")
        assert refused.value.job_id == holder.id
    assert shop.job_ids() == [holder.id]


def test_a_duplicate_can_be_answered_with_the_holder(shop: Shop) -> None:
    holder = _enqueue(shop, "u", queue="slow")
    shop.set_state(holder.id, "running")
    with shop.session() as session, session.begin():
        found = shop.mail.using(unique="u", on_duplicate="return").enqueue(session, "bert")
        new = shop.mail.using(unique="v", on_duplicate="return").enqueue(session, "carl")
    assert found == JobRef(holder.id, "mail", "slow", created=False, state=State.RUNNING)
    assert new.created
    assert shop.job_ids() == [holder.id, new.id]


def test_keys_are_one_key_only_if_they_are_equal(shop: Shop) -> None:
    keys = ["u", "U", "u ", " u", "ü", "u\u0308", "'", "%s", ":x", "\\", '"', "ß", "ss"]
    for key in keys:
        assert _enqueue(shop, key).created
    with shop.session() as session:
        specs = [shop.mail.using(unique=key, on_duplicate="return").job("b") for key in keys]
        assert [ref.id for ref in shop.cyclone.enqueue_many(session, specs)] == shop.job_ids()


def test_every_active_job_holds_its_key(shop: Shop) -> None:
    holder = _enqueue(shop, "u")
    for state, waits_for in HOLDING:
        shop.set_state(holder.id, state, waits_for)
        with shop.session() as session:
            with pytest.raises(DuplicateError) as refused:
                shop.mail.using(unique="u").enqueue(session, "bert")
            with pytest.raises(DuplicateError):
                shop.cyclone.enqueue_many(session, [shop.mail.using(unique="u").job("bert")])
        assert refused.value.job is not None
        assert (refused.value.job.id, refused.value.job.state) == (holder.id, state)


def test_a_job_that_has_ended_frees_its_key(shop: Shop) -> None:
    ids = []
    for state in TERMINAL:
        ids.append(_enqueue(shop, "u").id)
        shop.set_state(ids[-1], state)
        with shop.session() as session, session.begin():
            (ref,) = shop.cyclone.enqueue_many(session, [shop.mail.using(unique="u").job("b")])
        ids.append(ref.id)
        shop.set_state(ids[-1], state)
    assert shop.job_ids() == ids


def test_a_conflict_never_changes_the_holder(shop: Shop) -> None:
    holder = _enqueue(shop, "u", priority=3, headers={"a": "b"})
    shop.set_state(holder.id, "running")
    before = shop.rows()
    for _ in range(15):
        with shop.session() as session, session.begin():
            mail = shop.mail.using(unique="u", priority=9, process_in=5)
            with pytest.raises(DuplicateError):
                mail.enqueue(session, "bert")
            mail.using(on_duplicate="return").enqueue(session, "bert")
            shop.cyclone.enqueue_many(session, [mail.job("bert")] * 2, on_duplicate="return")
    assert shop.rows() == before


def _enqueue(shop: Shop, key: str, **options: object) -> JobRef:
    with shop.session() as session, session.begin():
        return shop.mail.using(unique=key, **options).enqueue(session, "anna")  # type: ignore[misc,arg-type]
