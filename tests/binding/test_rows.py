"""Rows as arguments, through every door: what is pending is inserted with its job, or refused."""

import asyncio
import json
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone, DuplicateError, PayloadError
from tests.binding.doors import Door, drivers
from tests.databases import Database
from tests.shop import Base, Order, Shop, settled, statements_of

cyclone = Cyclone(hints=False)


@cyclone.action
def pack(order: Order, more: list[Order | None] | None = None, remark: object = None) -> None:
    """Nobody runs it: these tests only enqueue."""


def arguments(shop: Shop) -> list[Any]:
    return [json.loads(job.arguments) for job in shop.jobs()]


def order_ids(shop: Shop) -> list[int]:
    with shop.session() as session:
        return list(session.scalars(sa.select(Order.id).order_by(Order.id)))


def takes_orders(door: Door) -> bool:
    return "ession" in door.kind


def test_a_pending_row_is_inserted_before_its_job(shop: Shop, door: Door) -> None:
    async def story(target: Any) -> None:
        first, second = Order(note="first"), Order(note="second")
        if not takes_orders(door):
            with pytest.raises(PayloadError, match="order: this Order is in no session"):
                pack.enqueue(target, first)
            with Session() as elsewhere:
                elsewhere.add(first)
                with pytest.raises(PayloadError, match=r"order: this Order is not inserted yet"):
                    pack.enqueue(target, first)
            return
        target.add_all([first, second])
        more = [second, None, first]
        enqueued = pack.enqueue(target, first, more, remark={"a": 1})
        more.clear()
        await settled(enqueued)
        await settled(cyclone.enqueue(target, "pack", {"order": second}))
        await settled(target.commit())

    door.run(story)
    if takes_orders(door):
        ids = order_ids(shop)
        assert arguments(shop) == [
            {"order": ids[0], "more": [ids[1], None, ids[0]], "remark": {"a": 1}},
            {"order": ids[1]},
        ]


def test_a_stored_row_is_enqueued_without_being_looked_at(shop: Shop, door: Door) -> None:
    with shop.session() as session:
        order = Order(note="stored")
        session.add(order)
        session.commit()  # which expires it
        session.expunge(order)

    async def story(target: Any) -> None:
        await settled(pack.enqueue(target, order))
        await settled(cyclone.enqueue_many(target, [pack.job(order), pack.job(order)]))
        await settled(target.commit())

    door.run(story)
    (key,) = order_ids(shop)
    assert arguments(shop) == [{"order": key}] * 3
    assert "note" in sa.inspect(order).expired_attributes


@pytest.mark.parametrize("driver", drivers("psycopg", "asyncpg", "pysqlite", "aiosqlite"))
def test_what_is_wrong_with_a_pending_row_is_the_applications_own_error(
    shop: Shop, driver: str
) -> None:
    kind = "AsyncSession" if driver in ("asyncpg", "aiosqlite") else "Session"

    async def story(target: Any) -> None:
        order = Order(note="bad", total=-1)
        target.add(order)
        with pytest.raises(sa.exc.IntegrityError):
            await settled(pack.using(unique="a").enqueue(target, order))
        await settled(target.rollback())

    Door(shop.database, driver, kind).run(story)
    assert arguments(shop) == []


@pytest.mark.parametrize("driver", drivers("psycopg", "asyncpg", "pysqlite", "aiosqlite"))
def test_a_refused_enqueue_leaves_what_was_pending_inserted_and_the_session_usable(
    shop: Shop, driver: str
) -> None:
    kind = "AsyncSession" if driver in ("asyncpg", "aiosqlite") else "Session"

    async def story(target: Any) -> None:
        orders = [Order(note="a"), Order(note="b")]
        once = pack.using(unique="a")
        target.add(orders[0])
        await settled(once.enqueue(target, orders[0]))
        target.add(orders[1])
        with pytest.raises(DuplicateError):
            await settled(once.enqueue(target, orders[1]))
        orders[1].note = "changed"
        await settled(target.commit())

    Door(shop.database, driver, kind).run(story)
    assert len(arguments(shop)) == 1
    assert shop.notes() == ["a", "changed"]


@pytest.mark.parametrize("driver", drivers("psycopg", "pysqlite"))
def test_only_a_pending_instance_has_the_session_flushed(shop: Shop, driver: str) -> None:
    with shop.session() as session:
        stored, pending = Order(note="stored"), Order(note="pending")
        session.add(stored)
        session.flush()
        session.add(pending)
        with statements_of(shop.engine) as sent:
            pack.enqueue(session, stored)
            assert pending in session.new
            assert [text for text in sent if "shop_order" in text] == []
            pack.enqueue(session, pending)
        assert len([text for text in sent if "INTO shop_order" in text]) == 1


def test_a_forgotten_await_flushes_nothing(sqlite_database: Database) -> None:
    shop = Shop(sqlite_database)

    async def story(target: Any) -> None:
        order = Order(note="pending")
        target.add(order)
        coroutine = pack.enqueue(target, order)
        await asyncio.sleep(0)
        assert order in target.new
        coroutine.close()

    Door(sqlite_database, "aiosqlite", "AsyncSession").run(story)
    assert shop.notes() == []


def test_a_translated_schema_is_still_that_of_the_applications_rows(
    postgresql_database: Database,
) -> None:
    plain = postgresql_database.engine()
    with plain.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA tenant")
    engine = plain.execution_options(schema_translate_map={None: "tenant"})
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        order = Order(note="theirs")
        session.add(order)
        ref = pack.enqueue(session, order)
        assert order.id is not None
    with plain.connect() as connection:
        assert connection.scalar(sa.text("SELECT note FROM tenant.shop_order")) == "theirs"
        assert connection.scalar(sa.text("SELECT id FROM cyclone_job")) == ref.id


def test_without_the_actions_code_a_key_is_given(sqlite_database: Database) -> None:
    shop, producer = Shop(sqlite_database), Cyclone(hints=False)
    with shop.session() as session, session.begin():
        order = Order(note="a")
        session.add(order)
        session.flush()
        with pytest.raises(PayloadError, match=r"order: is a Order; .* give its primary key"):
            producer.enqueue(session, "pack", {"order": order})
        producer.enqueue(session, "pack", {"order": order.id})
    assert arguments(shop) == [{"order": 1}]


def test_the_limit_is_for_what_is_stored(sqlite_database: Database) -> None:
    shop = Shop(sqlite_database)
    small = Cyclone(hints=False, max_payload=2_000)
    action = small.action(kind="pack")(pack.fn)
    with shop.session() as session:
        small_enough, too_large = Order(id=10**9, note="a"), Order(id=10**9 + 1, note="b")
        session.add(small_enough)
        # What stands there until the keys are known is longer: it does not count.
        action.enqueue(session, small_enough, [small_enough] * 170)
        session.add(too_large)
        with pytest.raises(PayloadError, match="more than the limit"):
            action.enqueue(session, too_large, [too_large] * 180)
        assert too_large not in session.new
