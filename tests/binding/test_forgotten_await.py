"""An enqueue on an asynchronous session that nobody awaits is never lost in silence."""

import asyncio
from typing import Any

import pytest

from cyclone_sqla import TransactionError
from tests.binding.doors import Door, drivers
from tests.shop import Order, Shop

pytestmark = [
    pytest.mark.parametrize("driver", drivers("psycopg_async", "asyncpg", "aiosqlite")),
    pytest.mark.parametrize("kind", ["AsyncSession", "async_scoped_session"]),
]


@pytest.fixture
def async_door(shop: Shop, driver: str, kind: str) -> Door:
    """Each kind of asynchronous session."""
    return Door(shop.database, driver, kind)


def test_a_commit_refuses_to_lose_an_enqueue_that_was_not_awaited(
    shop: Shop, async_door: Door
) -> None:
    async def story(session: Any) -> None:
        session.add(Order(note="tea"))
        forgotten = [
            shop.mail.enqueue(session, "anna"),
            shop.cyclone.enqueue_many(session, [shop.mail.job("bert")] * 3),
        ]
        await shop.ship.enqueue(session, 1)
        with pytest.raises(TransactionError, match="a mail job, 3 jobs of enqueue_many"):
            await session.commit()
        await session.rollback()
        with pytest.raises(RuntimeError, match="cannot reuse"):
            await forgotten[0]

    async_door.run(story)
    assert (shop.jobs(), shop.notes()) == ([], [])


def test_a_block_that_forgot_an_await_commits_nothing(shop: Shop, async_door: Door) -> None:
    async def story(session: Any) -> None:
        async with session.begin():
            session.add(Order(note="tea"))
            async with session.begin_nested():
                shop.mail.enqueue(session, "anna")

    with pytest.raises(TransactionError, match="never awaited"):
        async_door.run(story)
    assert (shop.jobs(), shop.notes()) == ([], [])


def test_what_a_rollback_undoes_is_not_missed_at_the_next_commit(
    shop: Shop, async_door: Door
) -> None:
    async def story(session: Any) -> None:
        await shop.mail.enqueue(session, "anna")
        forgotten = shop.mail.enqueue(session, "bert")
        await session.rollback()
        await shop.mail.enqueue(session, "carl")
        await session.commit()
        forgotten.close()

    async_door.run(story)
    assert len(shop.jobs()) == 1


def test_an_enqueue_awaited_late_but_before_the_commit_is_fine(
    shop: Shop, async_door: Door
) -> None:
    async def story(session: Any) -> None:
        calls = [shop.mail.enqueue(session, name) for name in ("anna", "bert")]
        for call in calls:
            await call
        task = asyncio.ensure_future(shop.mail.enqueue(session, "carl"))
        await task
        await session.commit()

    async_door.run(story)
    assert len(shop.jobs()) == 3


def test_arguments_are_taken_at_the_call(shop: Shop, async_door: Door) -> None:
    async def story(session: Any) -> None:
        rows = [1]
        call = shop.ship.enqueue(session, 1, rows)
        rows.append(2)
        await call
        await session.commit()

    async_door.run(story)
    (job,) = shop.jobs()
    assert shop.ship.decode(job.arguments)[1] == {"order": 1, "details": [1]}
