"""An idempotency key stands for one job of its kind, ever: who comes later is told which."""

import pytest
from sqlalchemy import delete, select

from cyclone_sqla import DuplicateError, Job, JobRef, State
from cyclone_sqla.models import IdempotencyKey
from tests.shop import Order, Shop, statements_of


def test_a_later_enqueue_is_answered_with_the_first_job(shop: Shop) -> None:
    first = _enqueue(shop, "k", queue="slow")
    assert first.created
    before = shop.rows()
    assert _enqueue(shop, "k") == JobRef(
        first.id, "mail", "slow", created=False, state=State.AVAILABLE
    )
    for state in ("running", "completed", "discarded", "cancelled"):
        shop.set_state(first.id, state)
        assert _enqueue(shop, "k", unique="u") == JobRef(
            first.id, "mail", "slow", created=False, state=State(state)
        )
    assert len(shop.rows()) == len(before) == 1


def test_a_key_outlives_its_job(shop: Shop) -> None:
    first = _enqueue(shop, "k", queue="slow")
    with shop.engine.begin() as connection:
        connection.execute(delete(Job))
    assert _enqueue(shop, "k") == JobRef(first.id, "mail", "slow", created=False, state=None)
    assert shop.jobs() == []


def test_a_key_belongs_to_its_kind(shop: Shop) -> None:
    first = _enqueue(shop, "k")
    with shop.session() as session, session.begin():
        second = shop.ship.using(idempotency_key="k").enqueue(session, 1)
    assert second.created
    assert shop.job_ids() == [first.id, second.id]


def test_a_key_is_known_within_its_transaction(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        mail = shop.mail.using(idempotency_key="k")
        first, second = mail.enqueue(session, "anna"), mail.enqueue(session, "bert")
        assert (second.id, second.created) == (first.id, False)
    assert shop.job_ids() == [first.id]


def test_a_rolled_back_key_was_never_taken(shop: Shop) -> None:
    with shop.session() as session:
        shop.mail.using(idempotency_key="k").enqueue(session, "anna")
        session.rollback()
    assert _enqueue(shop, "k").created


def test_a_duplicate_does_not_burn_the_key(shop: Shop) -> None:
    holder = _enqueue(shop, "first", unique="u")
    with shop.session() as session, session.begin():
        with pytest.raises(DuplicateError) as refused:
            shop.mail.using(idempotency_key="k", unique="u").enqueue(session, "bert")
        assert refused.value.job_id == holder.id
        session.add(Order(note="still usable"))
    assert _keys(shop) == ["first"]
    shop.set_state(holder.id, "completed")
    assert _enqueue(shop, "k", unique="u").created


def test_the_holder_that_was_the_answer_stays_the_answer(shop: Shop) -> None:
    holder = _enqueue(shop, "first", unique="u")
    found = _enqueue(shop, "k", unique="u", on_duplicate="return")
    assert (found.id, found.created) == (holder.id, False)
    shop.set_state(holder.id, "completed")
    again = _enqueue(shop, "k", unique="u", on_duplicate="return")
    assert (again.id, again.created, again.state) == (holder.id, False, State.COMPLETED)


def test_many_jobs_with_keys_some_of_them_known(shop: Shop) -> None:
    known = _enqueue(shop, "b", queue="slow")
    with shop.session() as session, session.begin():
        refs = shop.cyclone.enqueue_many(
            session,
            [
                shop.mail.using(idempotency_key="c").job("0"),
                shop.mail.job("1"),
                shop.mail.using(idempotency_key="b").job("2"),
                shop.mail.using(idempotency_key="a", unique="u").job("3"),
                shop.mail.using(idempotency_key="c").job("4"),
                shop.ship.using(idempotency_key="c").job(5),
                shop.mail.using(idempotency_key="d", unique="u", on_duplicate="return").job("6"),
            ],
        )
    assert [ref.created for ref in refs] == [True, True, False, True, False, True, False]
    assert refs[2] == JobRef(known.id, "mail", "slow", created=False, state=State.AVAILABLE)
    assert refs[4] == JobRef(refs[0].id, "mail", "default", created=False, state=State.AVAILABLE)
    assert refs[6].id == refs[3].id
    new = [ref.id for ref in refs if ref.created]
    assert new == sorted(new), "ids don't rise in the order of the input"
    assert shop.job_ids() == [known.id, *new]
    for key, ref in [("a", refs[3]), ("c", refs[0]), ("d", refs[3])]:
        assert _enqueue(shop, key).id == ref.id


def test_many_keys_cost_a_handful_of_statements(shop: Shop) -> None:
    specs = [shop.mail.using(idempotency_key=f"{i}", unique=f"{i}").job("a") for i in range(300)]
    with shop.session() as session, session.begin():
        first = shop.cyclone.enqueue_many(session, specs)
        with statements_of(shop.engine) as sent:
            again = shop.cyclone.enqueue_many(session, [*specs, specs[0]])
        assert len(sent) < 10
    assert [ref.id for ref in again[:300]] == [ref.id for ref in first]
    assert not any(ref.created for ref in again)


def _enqueue(shop: Shop, key: str, **options: object) -> JobRef:
    with shop.session() as session, session.begin():
        mail = shop.mail.using(idempotency_key=key, **options)  # type: ignore[misc,arg-type]
        return mail.enqueue(session, "anna")


def _keys(shop: Shop) -> list[str]:
    with shop.session() as session:
        return list(session.scalars(select(IdempotencyKey.key)))
