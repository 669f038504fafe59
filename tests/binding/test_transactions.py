"""Whatever shape the application's transaction has, an enqueue takes part in it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, inspect, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.sql import Delete, Insert, Update

from cyclone_sqla import (
    ConfigurationError,
    Cyclone,
    DuplicateError,
    Job,
    JobRef,
    JobSpec,
    SchemaError,
    begin_before_savepoints,
)
from cyclone_sqla.migrations import migrate_database
from tests.binding.doors import KINDS, Door, drivers
from tests.databases import Database
from tests.servers.postgres import Postgres
from tests.shop import Base, Order, Shop, settled, statements_of

# ---- stricter isolation --------------------------------------------------------------------------


@asynccontextmanager
async def isolated(door: Door, where: str, level: str) -> AsyncIterator[Any]:
    """A target whose isolation level is set in one of the ways there are."""
    on_server = f"-c default_transaction_isolation={level.lower()}".replace("e r", "e\\ r")
    options: dict[str, dict[str, Any]] = {
        "engine": {"isolation_level": level},
        "execution options": {"execution_options": {"isolation_level": level}},
        "server": {"connect_args": {"options": on_server}},
    }
    async with door.target(**options.get(where, {})) as target:
        if where == "target" and "Connection" in door.kind:
            await settled(target.execution_options(isolation_level=level))
        elif where == "target":
            await settled(target.connection(execution_options={"isolation_level": level}))
        yield target


WAYS = [
    ("psycopg", "Session", "engine"),
    ("psycopg", "Session", "execution options"),
    ("psycopg", "Session", "server"),
    ("psycopg", "Session", "target"),
    ("psycopg", "Connection", "target"),
    ("psycopg2", "Session", "engine"),
    ("psycopg2", "Session", "server"),
    ("psycopg2", "Connection", "target"),
    ("psycopg_async", "AsyncSession", "engine"),
    ("psycopg_async", "AsyncConnection", "target"),
    ("asyncpg", "AsyncSession", "engine"),
    ("asyncpg", "AsyncSession", "target"),
    ("asyncpg", "AsyncConnection", "target"),
]
strictly = pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
in_every_way = pytest.mark.parametrize(("driver", "kind", "where"), WAYS)


@pytest.fixture
def postgresql_shop(shared_postgresql: Shop) -> Iterator[Shop]:
    """The shared application on PostgreSQL."""
    yield shared_postgresql
    shared_postgresql.clear()


@strictly
@in_every_way
def test_a_conflict_with_an_invisible_row_is_40001_and_the_transaction_goes_on(
    postgresql_shop: Shop, driver: str, kind: str, where: str, level: str
) -> None:
    shop = postgresql_shop
    held, known = shop.mail.using(unique="held"), shop.mail.using(idempotency_key="known")
    new = shop.mail.using(unique="new", idempotency_key="new")
    refused = [
        [held.job("a")],
        [held.using(on_duplicate="return").job("a")],
        [known.job("a")],
        [held.using(idempotency_key="new").job("a")],
        [new.job("a"), shop.mail.job("b"), held.job("c")],
        [new.job("a"), shop.mail.job("b"), known.job("c")],
    ]

    async def story() -> JobRef:
        async with isolated(Door(shop.database, driver, kind), where, level) as target:
            await settled(target.execute(text("SELECT 1")))  # takes the snapshot
            with shop.session() as session, session.begin():
                held.using(idempotency_key="known").enqueue(session, "holder")
            for specs in refused:
                await _meets_40001(shop, target, specs)
            ref = await settled(new.enqueue(target, "anna"))
            await settled(target.commit())
            return ref

    assert asyncio.run(story()).created
    assert [job.unique_key for job in shop.jobs()] == ["held", "new"]


async def _meets_40001(shop: Shop, target: Any, specs: list[JobSpec]) -> None:
    with pytest.raises(DBAPIError) as error:
        await settled(shop.cyclone.enqueue_many(target, specs))
    assert _sqlstate(error.value) == "40001"
    if len(specs) == 1:
        with pytest.raises(DBAPIError) as error:
            await settled(shop.cyclone.enqueue_spec(target, specs[0]))
        assert _sqlstate(error.value) == "40001"


def _sqlstate(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)


@strictly
def test_a_conflict_with_a_visible_row_is_a_duplicate_everywhere(
    postgresql_shop: Shop, level: str
) -> None:
    shop = postgresql_shop
    held = shop.mail.using(unique="held", idempotency_key="known")
    with shop.session() as session, session.begin():
        holder = held.enqueue(session, "holder")
    engine = shop.engine.execution_options(isolation_level=level)
    with Session(engine) as session, session.begin():
        pending = Order(note="pending")
        session.add(pending)
        with pytest.raises(DuplicateError) as refused:
            shop.mail.using(unique="held", idempotency_key="new").enqueue(session, "a")
        assert refused.value.job_id == holder.id
        many = [shop.mail.job("a"), shop.mail.using(unique="held").job("b")]
        with pytest.raises(DuplicateError):
            shop.cyclone.enqueue_many(session, many)
        assert held.enqueue(session, "b").id == holder.id
        found = shop.mail.using(unique="held", on_duplicate="return").enqueue(session, "c")
        assert found.id == holder.id
        assert list(session.new) == [pending]
    assert shop.job_ids() == [holder.id]
    assert shop.notes() == ["pending"]


@strictly
def test_enqueues_of_overlapping_transactions_are_no_conflict(
    postgresql_shop: Shop, level: str
) -> None:
    shop = postgresql_shop
    engine = shop.engine.execution_options(isolation_level=level)
    sessions = [Session(engine) for _ in range(2)]
    for name, session in zip("ab", sessions, strict=True):
        session.execute(text("SELECT count(*) FROM shop_order"))  # takes the snapshot
        shop.mail.enqueue(session, name)
        shop.mail.using(unique=name, idempotency_key=name).enqueue(session, name)
        shop.mail.using(sequence="one line").enqueue(session, name)
        shop.cyclone.enqueue_many(session, [shop.mail.using(unique=f"many {name}").job(name)])
    for session in sessions:
        session.commit()
    assert len(shop.jobs()) == 8


# ---- two phases ----------------------------------------------------------------------------------


@pytest.fixture
def two_databases(postgresql_shop: Shop, postgresql_database: Database) -> dict[Any, Engine]:
    """Where a session finds what: the jobs are in one database, the orders in another."""
    orders = postgresql_database.engine()
    Base.metadata.create_all(orders)
    return {Job: postgresql_shop.engine, Order: orders}


def in_two_phases(shop: Shop, binds: dict[Any, Engine]) -> Session:
    """A session that is prepared: with an order and its jobs, and a duplicate that was refused."""
    session = Session(binds=binds, twophase=True)
    session.add(Order(note="tea"))
    mail = shop.mail.using(unique="u", idempotency_key="i")
    holder = mail.enqueue(session, "anna")
    with pytest.raises(DuplicateError) as refused:
        shop.mail.using(unique="u").enqueue(session, "bert")
    assert refused.value.job_id == holder.id
    shop.cyclone.enqueue_many(session, [shop.mail.job("carl"), shop.mail.job("dora")])
    session.prepare()
    return session


def found(shop: Shop, binds: dict[Any, Engine]) -> tuple[int, int]:
    """How many jobs and orders are committed."""
    with Session(binds=binds) as session:
        return len(shop.jobs()), len(session.scalars(select(Order)).all())


def test_a_job_is_there_after_the_second_phase(
    postgresql_shop: Shop, two_databases: dict[Any, Engine]
) -> None:
    with in_two_phases(postgresql_shop, two_databases) as session:
        assert found(postgresql_shop, two_databases) == (0, 0)
        session.commit()
    assert found(postgresql_shop, two_databases) == (3, 1)


def test_what_was_prepared_can_still_be_rolled_back(
    postgresql_shop: Shop, two_databases: dict[Any, Engine]
) -> None:
    with in_two_phases(postgresql_shop, two_databases) as session:
        session.rollback()
    assert found(postgresql_shop, two_databases) == (0, 0)


# ---- shapes of sessions --------------------------------------------------------------------------


@pytest.mark.parametrize("driver", drivers("psycopg", "pysqlite"))
@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint"])
def test_a_session_inside_a_connections_transaction_commits_nothing_by_itself(
    shop: Shop, mode: Any
) -> None:
    begin_before_savepoints(shop.engine)
    with shop.engine.connect() as connection, connection.begin() as transaction:
        with Session(connection, join_transaction_mode=mode) as session:
            shop.mail.using(unique="u").enqueue(session, "anna")
            session.commit()
        with Session(connection, join_transaction_mode=mode) as session:
            with pytest.raises(DuplicateError) as refused:
                shop.mail.using(unique="u").enqueue(session, "bert")
            assert shop.cyclone.get(session, refused.value.job_id or 0).unique_key == "u"
        assert shop.jobs() == []
        transaction.rollback()
    assert shop.jobs() == []


def test_a_session_of_several_engines_enqueues_where_the_jobs_are(
    sqlite_database: Database, tmp_path: Path
) -> None:
    elsewhere = create_engine(f"sqlite:///{tmp_path}/elsewhere.db")
    Base.metadata.create_all(elsewhere)
    shop = Shop(sqlite_database)
    for options in (
        {"binds": {Base: elsewhere, Job: shop.engine}},
        {"binds": {Base: elsewhere, Job.__table__: shop.engine}},
        {"bind": shop.engine, "binds": {Order: elsewhere}},
        {"binds": {Base: shop.engine}},
    ):
        given: Any = options
        with Session(**given) as session, session.begin():
            session.add(Order(note="tea"))
            ref = shop.mail.enqueue(session, "anna")
            (other,) = shop.cyclone.enqueue_many(session, [shop.mail.job("bert")])
            assert shop.cyclone.get(session, ref.id).state == "available"
        assert shop.job_ids()[-2:] == [ref.id, other.id]
    elsewhere.dispose()


def test_a_session_that_can_not_tell_where_the_jobs_are_is_told_what_to_do(
    sqlite_database: Database, tmp_path: Path
) -> None:
    shop = Shop(sqlite_database)
    elsewhere = create_engine(f"sqlite:///{tmp_path}/elsewhere.db")
    advice = r"bind=engine, or binds=\{cyclone.job_class: engine\}"
    for binds in ({Order: shop.engine, Base: elsewhere}, {}):
        with Session(binds=binds) as session, pytest.raises(ConfigurationError, match=advice):
            shop.mail.enqueue(session, "anna")


def test_a_session_that_sends_reads_to_replicas_enqueues_on_the_primary(
    sqlite_database: Database, tmp_path: Path
) -> None:
    shop = Shop(sqlite_database)
    replica = create_engine(f"sqlite:///{tmp_path}/replica.db")

    class Routing(Session):
        def get_bind(self, mapper: Any = None, clause: Any = None, **kwargs: Any) -> Any:
            bind = kwargs.get("bind")
            if bind is not None:
                return bind
            is_write = self._flushing or isinstance(clause, Insert | Update | Delete)
            return shop.engine if is_write else replica

    with Routing() as session, session.begin():
        ref = shop.mail.using(unique="u", idempotency_key="i").enqueue(session, "anna")
        assert shop.cyclone.get(session, ref.id).unique_key == "u"
        shop.cyclone.enqueue_many(session, [shop.mail.job("bert")])
    assert len(shop.jobs()) == 2
    replica.dispose()


@pytest.mark.parametrize("driver", drivers("psycopg", "pysqlite"))
def test_a_schema_that_the_application_translates_is_not_the_queues(shop: Shop) -> None:
    engine = shop.engine.execution_options(schema_translate_map={None: "tenant_7"})
    with Session(engine) as session:
        ref = shop.mail.using(unique="u", idempotency_key="i").enqueue(session, "anna")
        with pytest.raises(DuplicateError):
            shop.mail.using(unique="u").enqueue(session, "bert")
        shop.cyclone.enqueue_many(session, [shop.mail.using(idempotency_key="j").job("carl")])
        assert shop.cyclone.get(session, ref.id).unique_key == "u"
        session.commit()
        with pytest.raises(DBAPIError, match="tenant_7"):
            session.scalars(select(Order)).all()
    assert len(shop.jobs()) == 2


@pytest.mark.parametrize("driver", drivers("psycopg", "pysqlite"))
def test_an_event_of_the_application_can_enqueue(shop: Shop) -> None:
    def welcome(_mapper: Any, connection: Any, order: Order) -> None:
        shop.mail.using(unique=order.note).enqueue(connection, order.note)

    def summarise(session: Session, _context: Any) -> None:
        shop.mail.using(unique="summary", on_duplicate="return").enqueue(session, "boss")

    event.listen(Order, "after_insert", welcome)
    event.listen(Session, "after_flush", summarise)
    try:
        with shop.session() as session, session.begin():
            session.add_all([Order(note="tea"), Order(note="milk")])
        with shop.session() as session:
            session.add(Order(note="bread"))
            session.flush()
            session.rollback()
    finally:
        event.remove(Order, "after_insert", welcome)
        event.remove(Session, "after_flush", summarise)
    assert [job.unique_key for job in shop.jobs()] == ["tea", "milk", "summary"]


OPTIONS: list[dict[str, Any]] = [
    {"use_insertmanyvalues": False},
    {"insertmanyvalues_page_size": 1},
    {"query_cache_size": 0},
    {"pool_pre_ping": True},
    {"pool_reset_on_return": None},
    {"echo": False, "hide_parameters": True},
    {"execution_options": {"insertmanyvalues_page_size": 2, "logging_token": "web"}},
]


def test_whatever_the_options_of_the_engine(shop: Shop, driver: str) -> None:
    async def story(target: Any) -> None:
        mail = shop.mail.using(unique="u", idempotency_key="i")
        ref = await settled(mail.enqueue(target, "anna"))
        assert (await settled(mail.enqueue(target, "anna"))).id == ref.id
        many = [shop.mail.job("bert"), shop.mail.using(unique="v").job("carl")]
        await settled(shop.cyclone.enqueue_many(target, many))
        assert (await settled(shop.cyclone.get(target, ref.id))).unique_key == "u"
        await settled(target.commit())

    for options in OPTIONS:
        Door(shop.database, driver, KINDS[driver][2]).run(story, **options)
        assert len(shop.jobs()) == 3, options
        shop.clear()


def test_the_bare_name_of_the_database_will_do(postgresql_shop: Shop) -> None:
    shop = postgresql_shop
    engine = create_engine(shop.database.url.replace("+psycopg", ""))
    with sessionmaker(engine).begin() as session:
        shop.mail.using(unique="u").enqueue(session, "anna")
        shop.cyclone.enqueue_many(session, [shop.mail.job("bert")])
    engine.dispose()
    assert len(shop.jobs()) == 2


# ---- a refusal in an asynchronous session --------------------------------------------------------


@pytest.mark.parametrize("driver", drivers("psycopg_async", "asyncpg", "aiosqlite"))
def test_a_duplicate_leaves_the_objects_of_an_asynchronous_session_as_they_were(
    shop: Shop, driver: str
) -> None:
    held = shop.mail.using(unique="held")
    with shop.session() as session, session.begin():
        held.enqueue(session, "holder")
        session.add(old := Order(note="old"))
        session.flush()
        order_id = old.id
    before = shop.rows()
    refusals: list[Callable[[Any], Any]] = [
        lambda target: held.enqueue(target, "a"),
        lambda target: held.using(idempotency_key="i").enqueue(target, "a"),
        lambda target: shop.cyclone.enqueue_many(target, [shop.mail.job("a"), held.job("b")]),
    ]

    async def story(session: Any) -> None:
        dirty = (await session.scalars(select(Order))).one()
        dirty.note = "changed"
        pending = Order(note="new")
        session.add(pending)
        for refused in refusals:
            with pytest.raises(DuplicateError):
                await refused(session)
            with statements_of(session.bind.sync_engine) as sent:
                assert (dirty.note, dirty.id, dirty.total) == ("changed", order_id, 0)
                assert sent == [], "it had to be read again"
            assert inspect(pending).pending
            assert inspect(dirty).modified
        await session.commit()

    Door(shop.database, driver, "AsyncSession").run(story)
    assert shop.notes() == ["changed", "new"]
    assert shop.rows() == before


# ---- a database without our tables ---------------------------------------------------------------


def test_a_database_without_tables_is_named_and_stays_usable(
    shop: Shop, postgres: Postgres, tmp_path: Path, driver: str
) -> None:
    if driver.endswith("sqlite"):
        bare, name = Database(f"sqlite:///{tmp_path}/bare.db"), "bare.db"
    else:
        url = shop.database.url.replace("postgres@", "postgres:s3cret@")
        bare, name = Database(url.rpartition("/")[0] + "/postgres"), r"postgres:\*\*\*@.*/postgres"

    async def story(target: Any) -> None:
        for call in (
            lambda: shop.mail.enqueue(target, "anna"),
            lambda: shop.cyclone.enqueue_many(target, [shop.mail.job("anna")]),
            lambda: shop.cyclone.get(target, 1),
        ):
            with pytest.raises(SchemaError, match=f"{name} has no cyclone_job table") as missing:
                await settled(call())
            assert "cyclone-sqla migrate" in str(missing.value)
            assert "s3cret" not in str(missing.value)
        assert (await settled(target.execute(text("SELECT 7")))).scalar() == 7
        await settled(target.rollback())

    Door(bare, driver, KINDS[driver][0]).run(story)


def test_a_missing_schema_is_named(postgresql_shop: Shop) -> None:
    cyclone = Cyclone(schema="My Queue", hints=False)
    with postgresql_shop.session() as session, session.begin():
        with pytest.raises(SchemaError, match=r"schema 'My Queue'.* has no cyclone_job table"):
            cyclone.enqueue(session, "mail", {})
        session.add(Order(note="usable"))
    assert postgresql_shop.notes() == ["usable"]


def test_tables_that_were_migrated_meanwhile_are_found(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/new.db")
    cyclone = Cyclone(hints=False)
    with Session(engine) as session, pytest.raises(SchemaError):
        cyclone.enqueue(session, "mail", {})
    migrate_database(engine)
    with Session(engine) as session, session.begin():
        assert cyclone.enqueue(session, "mail", {}).created
    engine.dispose()
