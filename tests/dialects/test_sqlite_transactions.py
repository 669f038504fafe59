"""Enqueue in whatever transaction an application's SQLite engine makes: it takes part, or says why
it can't.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, delete, event, make_url, select, text
from sqlalchemy.exc import OperationalError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool, StaticPool

from cyclone_sqla import (
    ConfigurationError,
    DatabaseBusyError,
    DuplicateError,
    Job,
    SnapshotError,
    TransactionError,
    Worker,
    begin_before_savepoints,
)
from tests.databases import Database
from tests.shop import Order, Shop, statements_of

SAVEPOINT = (
    "This SQLite connection may have no BEGIN before its SAVEPOINT, so releasing the savepoint "
    "would commit the job at once. Call cyclone_sqla.begin_before_savepoints(engine) once after "
    "create_engine(), or enqueue outside begin_nested()."
)
SNAPSHOT = (
    "This transaction read the database before another one changed it; SQLite can't let it write "
    "any more. Nothing was enqueued. Roll back and run the whole unit of work again, or start it "
    "with BEGIN IMMEDIATE."
)
AUTOCOMMIT = (
    "This connection is in AUTOCOMMIT: the job would be committed, and could run, before your own "
    "writes are. Enqueue in a transaction (an engine or connection without "
    'isolation_level="AUTOCOMMIT").'
)
BUSY = (
    "Another process held the SQLite write lock longer than this engine's timeout (0.05 s). "
    "Nothing was enqueued and this transaction is still usable: try again, or raise "
    'connect_args={"timeout": …}.'
)
IN_MEMORY = (
    "A worker needs a SQLite file of its own connections; {url} is in memory or uses StaticPool. "
    "Use sqlite:///path/to/file.db."
)


@pytest.fixture
def shop(sqlite_database: Database) -> Shop:
    """An application on a SQLite file, its engine as `create_engine` makes it."""
    return Shop(sqlite_database)


def beginning(engine: Engine, how: str = "BEGIN") -> Engine:
    """Let listeners begin its transactions, as SQLAlchemy's documentation advises."""

    def let_us(dbapi_connection: Any, _record: Any) -> None:
        dbapi_connection.isolation_level = None

    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(how)

    event.listen(engine, "connect", let_us)
    event.listen(engine, "begin", begin)
    return engine


def commit_an_order(shop: Shop, note: str = "by another") -> None:
    with sqlite3.connect(shop.engine.url.database or "") as other:
        other.execute("INSERT INTO shop_order (note, total) VALUES (?, 0)", (note,))
    other.close()


# ---- the driver begins, at the first write -------------------------------------------------------


def test_a_read_keeps_nobody_from_writing_afterwards(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        assert session.scalars(select(Order)).all() == []
        commit_an_order(shop)
        shop.mail.enqueue(session, "anna")
    assert (len(shop.jobs()), shop.notes()) == (1, ["by another"])


def test_an_unread_cursor_keeps_the_snapshot_and_the_enqueue_says_so(shop: Shop) -> None:
    commit_an_order(shop)
    commit_an_order(shop)
    with shop.session() as session:
        driver: Any = session.connection().connection.driver_connection
        unread = driver.execute("SELECT note FROM shop_order")
        unread.fetchone()
        commit_an_order(shop)
        with pytest.raises(SnapshotError) as refused:
            shop.mail.enqueue(session, "anna")
        assert str(refused.value) == SNAPSHOT
        unread.close()
    assert shop.jobs() == []


# ---- a savepoint comes first ---------------------------------------------------------------------


def test_a_savepoint_that_may_be_the_transaction_is_refused(shop: Shop) -> None:
    with shop.session() as session:
        shop.mail.enqueue(session, "anna")
        session.commit()
        with session.begin_nested():
            for call in (
                lambda: shop.mail.enqueue(session, "bert"),
                lambda: shop.cyclone.enqueue_many(session, [shop.mail.job("bert")]),
            ):
                with pytest.raises(TransactionError) as refused:
                    call()
                assert str(refused.value) == SAVEPOINT
        shop.mail.enqueue(session, "carl")  # outside the savepoint all is well
        session.commit()
    assert len(shop.jobs()) == 2


def test_a_test_that_joins_by_savepoints_is_refused_too(shop: Shop) -> None:
    with (
        shop.engine.begin() as connection,
        Session(connection, join_transaction_mode="create_savepoint") as session,
        pytest.raises(TransactionError) as refused,
    ):
        shop.mail.enqueue(session, "anna")
    assert str(refused.value) == SAVEPOINT


def test_after_the_helper_a_savepoint_is_a_savepoint(shop: Shop) -> None:
    begin_before_savepoints(shop.engine)
    begin_before_savepoints(shop.engine)  # once more does no harm
    with shop.session() as session:
        with session.begin_nested():
            session.add(Order(note="tea"))
            shop.mail.enqueue(session, "anna")
        assert (shop.jobs(), shop.notes()) == ([], []), "the savepoint has committed them"
        session.rollback()
        assert (shop.jobs(), shop.notes()) == ([], [])
        with session.begin_nested() as savepoint:
            shop.mail.enqueue(session, "bert")
            savepoint.rollback()
        shop.mail.enqueue(session, "carl")
        session.commit()
    assert len(shop.jobs()) == 1


def test_an_asynchronous_engine_is_refused_and_helped_alike(shop: Shop) -> None:
    async def story(helped: bool) -> None:
        engine = create_async_engine(shop.database.url_for("aiosqlite"), poolclass=NullPool)
        if helped:
            begin_before_savepoints(engine)
        async with AsyncSession(engine) as session:
            async with session.begin_nested():
                await shop.mail.enqueue(session, "anna")
            assert shop.jobs() == []
            await session.rollback()
        await engine.dispose()

    with pytest.raises(TransactionError) as refused:
        asyncio.run(story(helped=False))
    assert str(refused.value) == SAVEPOINT
    asyncio.run(story(helped=True))
    assert shop.jobs() == []


def test_listeners_that_begin_make_savepoints_safe(shop: Shop) -> None:
    engine = beginning(shop.database.engine())
    with Session(engine) as session:
        with session.begin_nested():
            shop.mail.enqueue(session, "anna")
        session.rollback()
    assert shop.jobs() == []


# ---- listeners begin -----------------------------------------------------------------------------


def test_a_transaction_that_was_overtaken_is_told_to_start_again(shop: Shop) -> None:
    engine = beginning(shop.database.engine())
    with Session(engine) as session:
        assert session.scalars(select(Order)).all() == []
        commit_an_order(shop)
        for call in (
            lambda: shop.mail.enqueue(session, "anna"),
            lambda: shop.mail.using(unique="u", idempotency_key="i").enqueue(session, "anna"),
            lambda: shop.cyclone.enqueue_many(session, [shop.mail.job("anna")]),
        ):
            with pytest.raises(SnapshotError) as refused:
                call()
            assert str(refused.value) == SNAPSHOT
            assert refused.value.retryable
            assert isinstance(refused.value.__cause__, OperationalError)
        assert session.scalars(select(Order)).all() == [], "it can still read"
        session.rollback()
        session.scalars(select(Order)).all()
        assert shop.mail.enqueue(session, "anna").created
        session.commit()
    assert len(shop.jobs()) == 1


def test_a_unit_of_work_that_begins_immediate_is_never_overtaken(shop: Shop) -> None:
    engine = beginning(shop.database.engine(connect_args={"timeout": 0.05}), "BEGIN IMMEDIATE")
    with Session(engine) as session:
        assert session.scalars(select(Order)).all() == []
        with Session(engine) as other, pytest.raises(OperationalError, match="locked"):
            shop.mail.enqueue(other, "bert")
        shop.mail.enqueue(session, "anna")
        session.commit()
    assert len(shop.jobs()) == 1


@pytest.mark.parametrize("how", ["BEGIN", "BEGIN IMMEDIATE"])
def test_a_connection_may_enqueue_as_its_first_word(shop: Shop, how: str) -> None:
    engine = beginning(shop.database.engine(), how)
    for name in ("anna", "bert"):  # the second time the tables are known to be there
        with engine.connect() as connection:
            shop.mail.enqueue(connection, name)
            shop.cyclone.enqueue_many(connection, [shop.mail.job(name)])
            assert len(shop.jobs()) % 2 == 0
            connection.commit()
    with engine.connect() as connection:
        shop.mail.enqueue(connection, "carl")
        connection.rollback()
    assert len(shop.jobs()) == 4


# ---- nobody begins -------------------------------------------------------------------------------


def test_autocommit_is_refused_before_the_insert(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        shop.mail.enqueue(session, "anna")  # now the tables are known to be there
    shop.engine.dispose()
    by_option = shop.engine.execution_options(isolation_level="AUTOCOMMIT")
    by_engine = shop.database.engine(isolation_level="AUTOCOMMIT")
    by_driver = shop.database.engine(connect_args={"isolation_level": None})
    for engine in (by_option, by_engine, by_driver):
        with Session(engine) as session, statements_of(engine) as sent:
            with pytest.raises(TransactionError) as refused:
                shop.mail.enqueue(session, "bert")
            assert str(refused.value) == AUTOCOMMIT
            with pytest.raises(TransactionError):
                shop.cyclone.enqueue_many(session, [shop.mail.job("bert")])
            assert not any("INSERT" in statement for statement in sent)
    assert len(shop.jobs()) == 1


def test_a_begin_of_the_applications_own_is_no_autocommit(shop: Shop) -> None:
    engine = shop.database.engine(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        shop.mail.enqueue(connection, "anna")
        assert shop.jobs() == []
        connection.exec_driver_sql("ROLLBACK")
    assert shop.jobs() == []


# ---- no file of its own connections --------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file::memory:?cache=shared&uri=true",
        "sqlite:///file:jobs?mode=memory&cache=shared&uri=true",
        "sqlite:///file:/jobs?vfs=memdb&uri=true",
    ],
)
def test_no_worker_works_on_a_database_in_memory(shop: Shop, url: str) -> None:
    engine = create_engine(url, poolclass=NullPool)
    with pytest.raises(ConfigurationError) as refused:
        Worker(shop.cyclone, database=engine).start()
    assert str(refused.value) == IN_MEMORY.format(url=engine.url)
    engine.dispose()


def test_no_worker_works_with_a_shared_cache(shop: Shop) -> None:
    url = f"sqlite:///file:{shop.engine.url.database}?cache=shared&uri=true"
    with pytest.raises(ConfigurationError, match="has a shared cache"):
        Worker(shop.cyclone, database=make_url(url)).start()


def test_no_worker_shares_one_connection_with_the_application(shop: Shop) -> None:
    engine = shop.database.engine(poolclass=StaticPool)
    with pytest.raises(ConfigurationError) as refused:
        Worker(shop.cyclone, database=engine).start()
    assert str(refused.value) == IN_MEMORY.format(url=engine.url)


def test_no_worker_works_on_a_file_without_a_write_ahead_log(shop: Shop) -> None:
    shop.engine.dispose()
    with closing(sqlite3.connect(shop.engine.url.database or "")) as connection:
        assert connection.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
    with pytest.raises(ConfigurationError) as refused:
        Worker(shop.cyclone).start()
    assert str(refused.value) == (
        "This SQLite file is in journal mode delete, a worker needs wal: run `cyclone-sqla "
        "migrate`, which sets it."
    )


# ---- the lock is not to be had -------------------------------------------------------------------


@pytest.fixture
def writer(shop: Shop) -> Iterator[sqlite3.Connection]:
    """Somebody else, who holds the write lock."""
    connection = sqlite3.connect(shop.engine.url.database or "", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield connection
    connection.close()


def test_a_busy_database_is_called_so_and_the_transaction_goes_on(
    shop: Shop, writer: sqlite3.Connection
) -> None:
    engine = shop.database.engine(connect_args={"timeout": 0.05})
    with Session(engine) as session:
        assert session.scalars(select(Order)).all() == []
        session.add(Order(note="pending"))
        for call in (
            lambda: shop.mail.enqueue(session, "anna"),
            lambda: shop.mail.using(unique="u", idempotency_key="i").enqueue(session, "anna"),
            lambda: shop.cyclone.enqueue_many(session, [shop.mail.job("anna")]),
        ):
            with pytest.raises(DatabaseBusyError) as refused:
                call()
            assert str(refused.value) == BUSY
            assert refused.value.retryable
        writer.execute("COMMIT")
        ref = shop.mail.using(unique="u", idempotency_key="i").enqueue(session, "anna")
        session.commit()
    assert (shop.job_ids(), shop.notes()) == ([ref.id], ["pending"])


def test_a_busy_database_is_called_so_asynchronously(
    shop: Shop, writer: sqlite3.Connection
) -> None:
    async def story() -> None:
        engine = create_async_engine(
            shop.database.url_for("aiosqlite"), connect_args={"timeout": 0.05}, poolclass=NullPool
        )
        async with AsyncSession(engine) as session:
            with pytest.raises(DatabaseBusyError, match="held the SQLite write lock"):
                await shop.mail.enqueue(session, "anna")
            writer.execute("ROLLBACK")
            await shop.mail.enqueue(session, "anna")
            await session.commit()
        await engine.dispose()

    asyncio.run(story())
    assert len(shop.jobs()) == 1


def test_an_overtaken_asynchronous_transaction_is_told_to_start_again(shop: Shop) -> None:
    async def story() -> None:
        engine = create_async_engine(shop.database.url_for("aiosqlite"), poolclass=NullPool)
        beginning(engine.sync_engine)
        async with AsyncSession(engine) as session:
            assert (await session.scalars(select(Order))).all() == []
            commit_an_order(shop)
            with pytest.raises(SnapshotError):
                await shop.mail.enqueue(session, "anna")
            await session.rollback()
            await shop.mail.enqueue(session, "anna")
            await session.commit()
        await engine.dispose()

    asyncio.run(story())
    assert len(shop.jobs()) == 1


# ---- the disk is full ----------------------------------------------------------------------------


def nearly_full(shop: Shop) -> Engine:
    """An engine whose database may grow by 40 pages, and that writes early."""
    engine = shop.database.engine()

    def bound(dbapi_connection: Any, _record: Any) -> None:
        (pages,) = dbapi_connection.execute("PRAGMA page_count").fetchone()
        dbapi_connection.execute(f"PRAGMA max_page_count = {pages + 40}")
        dbapi_connection.execute("PRAGMA cache_size = 5")

    event.listen(engine, "connect", bound)
    return engine


def fill(shop: Shop, target: Session | Connection, *, many: bool) -> None:
    """Enqueue until the disk is full, which SQLite answers with a rollback of its own."""
    spec = shop.mail.job("anna", "x" * 20_000)

    def enqueue_for_ever() -> None:
        while True:
            if many:
                shop.cyclone.enqueue_many(target, [spec])
            else:
                shop.cyclone.enqueue_spec(target, spec)

    with pytest.raises(OperationalError, match="full"):
        enqueue_for_ever()


@pytest.mark.parametrize("many", [False, True])
def test_a_full_disk_that_is_ignored_commits_nothing(shop: Shop, many: bool) -> None:
    engine = nearly_full(shop)
    with Session(engine) as session:
        session.add(Order(note="before"))
        session.flush()
        fill(shop, session, many=many)
        with pytest.raises(PendingRollbackError):
            session.execute(text("INSERT INTO shop_order (note, total) VALUES ('after', 0)"))
        with pytest.raises(PendingRollbackError):
            shop.mail.enqueue(session, "after")
        with pytest.raises(PendingRollbackError):
            session.commit()
        session.rollback()
        assert (shop.jobs(), shop.notes()) == ([], [])
        session.add(Order(note="again"))
        shop.mail.enqueue(session, "again")
        session.commit()
    assert (len(shop.jobs()), shop.notes()) == (1, ["again"])


def test_a_full_disk_that_a_connection_ignores_commits_nothing(shop: Shop) -> None:
    with nearly_full(shop).connect() as connection:
        connection.execute(text("INSERT INTO shop_order (note, total) VALUES ('before', 0)"))
        fill(shop, connection, many=False)
        with pytest.raises(PendingRollbackError):
            connection.commit()
    assert (shop.jobs(), shop.notes()) == ([], [])


# ---- ids -----------------------------------------------------------------------------------------


def test_ids_become_visible_in_their_order(shop: Shop) -> None:
    """Four writers; whoever looks never finds an id below one that was there before."""
    writing = [threading.Thread(target=_write, args=(shop, i)) for i in range(4)]
    for thread in writing:
        thread.start()
    seen: list[int] = []
    while len(seen) < 4 * 25 * 3:
        assert any(thread.is_alive() for thread in writing) or len(shop.jobs()) == 300
        new = [job_id for job_id in shop.job_ids() if job_id not in set(seen)]
        assert not seen or not new or min(new) > max(seen)
        seen += new
    for thread in writing:
        thread.join()


def _write(shop: Shop, number: int) -> None:
    engine = create_engine(shop.engine.url, connect_args={"timeout": 60})
    for i in range(25):
        with Session(engine) as session, session.begin():
            shop.cyclone.enqueue_many(session, [shop.mail.job("one"), shop.mail.job("two")])
            shop.mail.using(unique=f"{number}-{i}").enqueue(session, "three")
    engine.dispose()


def test_the_id_of_a_deleted_job_is_never_given_again(shop: Shop) -> None:
    given: list[int] = []
    for i in range(4):
        with shop.session() as session, session.begin():
            refs = [shop.mail.enqueue(session, "anna")]
            refs += shop.cyclone.enqueue_many(session, [shop.mail.using(unique="u").job("bert")])
            if i % 2:
                with pytest.raises(DuplicateError):
                    shop.cyclone.enqueue_many(session, [shop.mail.using(unique="u").job("c")] * 2)
        with shop.session() as session, session.begin():
            session.execute(delete(Job))
        given += [ref.id for ref in refs]
    assert given == sorted(set(given))
