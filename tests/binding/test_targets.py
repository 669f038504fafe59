"""Every kind of session and connection, on every driver, enqueues alike."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from cyclone_sqla import DuplicateError, JobNotFoundError, TransactionError
from tests.binding.doors import KINDS, Door, drivers
from tests.shop import Shop, settled


def test_a_job_commits_with_its_target(shop: Shop, door: Door) -> None:
    async def story(target: Any) -> list[int]:
        ref = await settled(shop.mail.enqueue(target, "anna"))
        by_name = await settled(shop.cyclone.enqueue(target, "elsewhere", {"a": 1}))
        assert shop.jobs() == [], "seen before the commit"
        await settled(target.commit())
        return [ref.id, by_name.id]

    assert door.run(story) == shop.job_ids()


def test_a_job_is_rolled_back_with_its_target(shop: Shop, door: Door) -> None:
    async def story(target: Any) -> None:
        await settled(shop.mail.using(unique="u", idempotency_key="i").enqueue(target, "anna"))
        await settled(shop.cyclone.enqueue_many(target, [shop.mail.job("bert")]))
        await settled(target.rollback())
        again = await settled(shop.mail.using(idempotency_key="i").enqueue(target, "anna"))
        assert again.created
        await settled(target.rollback())

    door.run(story)
    assert shop.jobs() == []


def test_a_job_is_rolled_back_with_its_savepoint(shop: Shop, door: Door) -> None:
    async def story(target: Any) -> list[int]:
        first = await settled(shop.mail.enqueue(target, "anna"))
        savepoint = await settled(target.begin_nested())
        await settled(shop.mail.using(unique="u").enqueue(target, "bert"))
        await settled(shop.cyclone.enqueue_many(target, [shop.mail.job("carl")]))
        await settled(savepoint.rollback())
        last = await settled(shop.mail.using(unique="u").enqueue(target, "dora"))
        await settled(target.commit())
        return [first.id, last.id]

    assert door.run(story) == shop.job_ids()


def test_a_savepoint_that_comes_first_is_no_transaction(shop: Shop, door: Door) -> None:
    async def story(target: Any) -> None:
        savepoint = await settled(target.begin_nested())
        await settled(shop.mail.enqueue(target, "anna"))
        await settled(savepoint.commit())
        assert shop.jobs() == [], "the savepoint has committed it"
        await settled(target.rollback())

    door.run(story)
    assert shop.jobs() == []


def test_a_duplicate_leaves_its_target_usable(shop: Shop, door: Door) -> None:
    async def story(target: Any) -> list[int]:
        mail = shop.mail.using(unique="u")
        holder = await settled(mail.enqueue(target, "anna"))
        with pytest.raises(DuplicateError) as refused:
            await settled(mail.enqueue(target, "bert"))
        assert refused.value.job_id == holder.id
        many = [shop.mail.job("carl"), mail.job("dora"), mail.using(unique="v").job("ed")]
        with pytest.raises(DuplicateError) as refused:
            await settled(shop.cyclone.enqueue_many(target, many))
        assert [(d.index, d.job_id) for d in refused.value.duplicates] == [(1, holder.id)]
        found = await settled(mail.using(on_duplicate="return").enqueue(target, "fay"))
        assert (found.id, found.created) == (holder.id, False)
        await settled(target.commit())
        return [holder.id]

    assert door.run(story) == shop.job_ids()


def test_an_idempotency_key_is_known(shop: Shop, door: Door) -> None:
    async def story(target: Any) -> list[int]:
        mail = shop.mail.using(idempotency_key="i")
        first = await settled(mail.enqueue(target, "anna"))
        again = await settled(mail.enqueue(target, "bert"))
        many = [mail.job("carl"), mail.using(idempotency_key="j").job("dora")]
        known, new = await settled(shop.cyclone.enqueue_many(target, many))
        assert (again.id, again.created, known.id, known.created) == (first.id, False) * 2
        await settled(target.commit())
        return [first.id, new.id]

    assert door.run(story) == shop.job_ids()


def test_a_job_is_found_by_its_id(shop: Shop, door: Door) -> None:
    async def story(target: Any) -> None:
        ref = await settled(shop.mail.enqueue(target, "anna"))
        job = await settled(shop.cyclone.get(target, ref.id))
        assert (job.id, json.loads(job.arguments)) == (ref.id, {"to": "anna"})
        with pytest.raises(JobNotFoundError, match=f"no job {ref.id + 1}"):
            await settled(shop.cyclone.get(target, ref.id + 1))
        await settled(target.commit())

    door.run(story)
    assert len(shop.jobs()) == 1


@pytest.mark.parametrize("are_plain", [True, False], ids=["plain", "with keys"])
def test_the_answer_to_each_of_2500_is_at_its_place(
    shop: Shop, driver: str, are_plain: bool
) -> None:
    keys = [None if are_plain or i <= 900 or i >= 1_600 else f"{-i % 700}" for i in range(2_500)]
    specs = [shop.ship.using(unique=key).job(i) for i, key in enumerate(keys)]

    async def story(target: Any) -> list[int]:
        refs = await settled(shop.cyclone.enqueue_many(target, specs))
        await settled(target.commit())
        return [ref.id for ref in refs]

    ids = Door(shop.database, driver, KINDS[driver][0]).run(story)
    assert ids == sorted(set(ids)), "ids don't rise in the order of the input"
    orders = {job.id: json.loads(job.arguments)["order"] for job in shop.jobs()}
    assert [orders[job_id] for job_id in ids] == list(range(2_500))


def test_every_column_comes_through_the_driver(shop: Shop, driver: str) -> None:
    mail = shop.mail.using(
        priority=-7,
        process_at=datetime(2031, 5, 5, 9, 1, 2, 345678, tzinfo=UTC),
        deadline=datetime(9999, 12, 31, tzinfo=UTC),
        timeout=timedelta(days=400, microseconds=1),
        tenant="müller",
        headers={"a": "ä'\\%s"},
    )

    async def story(target: Any) -> None:
        await settled(mail.enqueue(target, "'\\%(to)s:x {}", body="🜁" * 1000))
        await settled(shop.cyclone.enqueue_many(target, [mail.job("'\\%(to)s:x {}", "🜁" * 1000)]))
        await settled(target.commit())

    Door(shop.database, driver, KINDS[driver][0]).run(story)
    for job in shop.jobs():
        assert job.priority == -7
        assert job.run_at == datetime(2031, 5, 5, 9, 1, 2, 345678, tzinfo=UTC)
        assert job.deadline == datetime(9999, 12, 31, tzinfo=UTC)
        assert job.timeout == timedelta(days=400, microseconds=1)
        assert (job.tenant, job.headers) == ("müller", {"a": "ä'\\%s"})
        arguments = shop.mail.decode(job.arguments)[1]
        assert list(arguments.values()) == ["'\\%(to)s:x {}", "🜁" * 1000]


def test_autocommit_is_refused_before_anything_is_written(shop: Shop, door: Door) -> None:
    async def story(target: Any) -> None:
        with pytest.raises(TransactionError, match="AUTOCOMMIT"):
            await settled(shop.mail.using(idempotency_key="i").enqueue(target, "anna"))
        with pytest.raises(TransactionError, match="AUTOCOMMIT"):
            await settled(shop.cyclone.enqueue_many(target, [shop.mail.job("anna")]))

    door.run(story, isolation_level="AUTOCOMMIT")
    assert shop.jobs() == []


def test_a_statement_works_the_twentieth_time_too(shop: Shop, driver: str) -> None:
    Door(shop.database, driver, KINDS[driver][0]).run(lambda target: _twenty_rounds(shop, target))


@pytest.mark.parametrize("driver", drivers("psycopg", "psycopg2", "psycopg_async", "asyncpg"))
def test_a_statement_works_with_a_generic_plan(shop: Shop, driver: str) -> None:
    async def story(target: Any) -> None:
        await settled(target.execute(text("SET plan_cache_mode = force_generic_plan")))
        await _twenty_rounds(shop, target)

    Door(shop.database, driver, KINDS[driver][2]).run(story)


async def _twenty_rounds(shop: Shop, target: Any) -> None:
    for i in range(20):
        await _all_statements(shop, target, i)
        await settled(target.commit())
    assert len(shop.jobs()) == 20 * 5


async def _all_statements(shop: Shop, target: Any, i: int) -> None:
    unique = shop.mail.using(unique=f"{i}")
    once = shop.mail.using(idempotency_key=f"{i}")
    await settled(shop.mail.enqueue(target, "plain"))
    await settled(unique.enqueue(target, "unique"))
    await settled(once.enqueue(target, "once"))
    await settled(once.enqueue(target, "once again"))
    await settled(shop.cyclone.enqueue_many(target, [shop.mail.job("many")]))
    many = [unique.using(unique=f"{i}-many").job("unique"), once.job("once")]
    ref, _ = await settled(shop.cyclone.enqueue_many(target, many))
    for refused in (
        [unique.job("a")],
        [shop.mail.job("b"), unique.using(idempotency_key="c").job("c")],
    ):
        with pytest.raises(DuplicateError):
            await settled(shop.cyclone.enqueue_many(target, refused))
    assert (await settled(shop.cyclone.get(target, ref.id))).unique_key == f"{i}-many"
