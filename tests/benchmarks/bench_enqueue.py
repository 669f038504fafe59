"""Enqueue: one job a transaction through each door, many at once, and with many clients."""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from inspect import isawaitable
from itertools import count
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone
from cyclone_sqla.models import tables_in
from tests.benchmarks import by_hand
from tests.benchmarks.book import Book, sized
from tests.benchmarks.place import PostgresPlace, SqlitePlace

ONE_BY_ONE = sized(2_000)
MANY = sized(50_000)

Enqueue = Callable[[Any], Any]
"""Enqueues one job in a target's transaction."""


def rate(jobs: int, work: Callable[[], object]) -> float:
    """Jobs a second."""
    began = time.perf_counter()
    work()
    return jobs / (time.perf_counter() - began)


class Producer:
    """An application that enqueues jobs of one kind."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self.engine = sa.create_engine(url, pool_size=20)
        self.cyclone = Cyclone(self.engine, **options)

        @self.cyclone.action(kind="work")
        def work(seq: int) -> None:
            raise NotImplementedError

        self.work = work
        self._next = count()

    def plain(self, target: Any) -> Any:
        """A job without a key."""
        return self.work.enqueue(target, seq=1)

    def unique(self, target: Any) -> Any:
        """A job with a unique key of its own."""
        return self.work.using(unique=f"order-{next(self._next)}").enqueue(target, seq=1)

    def sequenced(self, target: Any) -> Any:
        """A job of one of a thousand sequences."""
        key = f"account-{next(self._next) % 1000}"
        return self.work.using(sequence=key).enqueue(target, seq=1)

    def by_insert(self, target: Any) -> Any:
        """The row of a plain job by SQLAlchemy's own INSERT, built once; nobody is told of it."""
        now = datetime.now(UTC)
        times = dict.fromkeys(("run_at", "created_at", "updated_at"), now)
        result = target.execute(BY_INSERT, {**BY_INSERT_VALUES, **times})
        return result if isawaitable(result) else result.scalar_one()

    # ---- the doors -------------------------------------------------------------------------------

    def in_connections(self, enqueue: Enqueue, jobs: int) -> None:
        """One transaction a job, on one connection."""
        with self.engine.connect() as connection:
            for _ in range(jobs):
                with connection.begin():
                    enqueue(connection)

    def in_sessions(self, enqueue: Enqueue, jobs: int) -> None:
        """One Session a job."""
        for _ in range(jobs):
            with Session(self.engine) as session, session.begin():
                enqueue(session)

    def in_async_sessions(self, enqueue: Enqueue, jobs: int) -> None:
        """One AsyncSession a job."""
        asyncio.run(self._in_async_sessions(enqueue, jobs))

    async def _in_async_sessions(self, enqueue: Enqueue, jobs: int) -> None:
        engine = create_async_engine(self.url)
        for _ in range(jobs):
            async with AsyncSession(engine) as session, session.begin():
                await enqueue(session)
        await engine.dispose()


_JOB = tables_in(None).job
BY_INSERT = sa.insert(_JOB).returning(_JOB.c.id)
BY_INSERT_VALUES = {
    "kind": "work", "queue": "default", "priority": 0, "state": "available",
    "arguments": '{"seq":1}', "max_attempts": 25,
}  # fmt: skip


@pytest.fixture
def producer(place: PostgresPlace) -> Iterator[Producer]:
    producer = Producer(place.url)
    yield producer
    producer.engine.dispose()


def one_by_one_by_hand(place: PostgresPlace, jobs: int) -> None:
    """A prepared INSERT a job, in autocommit, that tells workers."""
    with by_hand.connect(place.dsn) as connection:
        for _ in range(jobs):
            connection.execute(by_hand.INSERT_AND_TELL, ('{"seq":1}',))


def in_transactions_by_hand(place: PostgresPlace, jobs: int) -> None:
    """The row of a plain job by a prepared INSERT between BEGIN and COMMIT, and its id."""
    with by_hand.connect(place.dsn) as connection:
        connection.autocommit = False
        for _ in range(jobs):
            connection.execute(by_hand.INSERT_OF_OURS).fetchone()
            connection.commit()


all_doors = pytest.mark.parametrize(
    ("door", "name"),
    [
        ("in_connections", "Connection"),
        ("in_sessions", "Session"),
        ("in_async_sessions", "AsyncSession"),
    ],
)


@pytest.mark.parametrize("kind", ["plain", "unique", "sequenced"])
@all_doors
def test_one_a_transaction(
    place: PostgresPlace, producer: Producer, book: Book, door: str, name: str, kind: str
) -> None:
    enqueue, through = getattr(producer, kind), getattr(producer, door)
    through(enqueue, 20)
    one_by_one_by_hand(place, 20)
    book.compare(
        "enqueue",
        f"one a transaction, {name}, {kind}",
        place.name,
        ours=lambda: rate(ONE_BY_ONE, lambda: through(enqueue, ONE_BY_ONE)),
        reference=lambda: rate(ONE_BY_ONE, lambda: one_by_one_by_hand(place, ONE_BY_ONE)),
        beside="psycopg by hand, INSERT with NOTIFY",
        size=ONE_BY_ONE,
    )


@all_doors
def test_what_the_door_itself_costs(
    place: PostgresPlace, producer: Producer, book: Book, door: str, name: str
) -> None:
    """The limit for whoever goes through SQLAlchemy, which sends BEGIN, INSERT and COMMIT."""
    through = getattr(producer, door)
    for enqueue in (producer.plain, producer.by_insert):
        through(enqueue, 20)
    book.compare(
        "enqueue",
        f"one a transaction, {name}, plain, next to an INSERT through the same",
        place.name,
        ours=lambda: rate(ONE_BY_ONE, lambda: through(producer.plain, ONE_BY_ONE)),
        reference=lambda: rate(ONE_BY_ONE, lambda: through(producer.by_insert, ONE_BY_ONE)),
        beside="SQLAlchemy by hand, INSERT of the row",
        size=ONE_BY_ONE,
    )


def test_what_a_transaction_itself_costs(
    place: PostgresPlace, producer: Producer, book: Book
) -> None:
    """The limit for whoever enqueues in a transaction: three round trips, and this table."""
    producer.in_connections(producer.plain, 20)
    book.compare(
        "enqueue",
        "one a transaction, Connection, plain, next to a transaction by hand",
        place.name,
        ours=lambda: rate(ONE_BY_ONE, lambda: producer.in_connections(producer.plain, ONE_BY_ONE)),
        reference=lambda: rate(ONE_BY_ONE, lambda: in_transactions_by_hand(place, ONE_BY_ONE)),
        beside="psycopg by hand, BEGIN, INSERT of the same row, COMMIT",
        size=ONE_BY_ONE,
    )


@pytest.mark.parametrize("database", ["postgresql", "sqlite"])
def test_in_an_open_session(request: pytest.FixtureRequest, book: Book, database: str) -> None:
    place: Any = request.getfixturevalue("place" if database == "postgresql" else "sqlite_place")
    producer = Producer(place.url)

    def in_one_session(enqueue: Enqueue) -> float:
        with Session(producer.engine) as session, session.begin():
            enqueue(session)
            speed = rate(ONE_BY_ONE, lambda: [enqueue(session) for _ in range(ONE_BY_ONE)])
            session.rollback()
            return speed

    book.compare(
        "enqueue",
        "in one open Session, plain",
        place.name,
        ours=lambda: in_one_session(producer.plain),
        reference=lambda: in_one_session(producer.by_insert),
        beside="SQLAlchemy by hand, INSERT of the row",
        size=ONE_BY_ONE,
    )
    producer.engine.dispose()


@pytest.mark.parametrize("kind", ["plain", "unique", "sequenced"])
def test_many_in_a_session(place: PostgresPlace, producer: Producer, book: Book, kind: str) -> None:
    numbers = count()
    options: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": dict,
        "unique": lambda: {"unique": f"order-{next(numbers)}"},
        "sequenced": lambda: {"sequence": f"account-{next(numbers) % 1000}"},
    }

    def ours() -> None:
        make, work = options[kind], producer.work
        if kind == "plain":
            jobs = (work.job(seq=i) for i in range(MANY))
        else:
            jobs = (work.using(**make()).job(seq=i) for i in range(MANY))  # type: ignore[misc]
        with Session(producer.engine) as session, session.begin():
            refs = producer.cyclone.enqueue_many(session, jobs)
        assert len({ref.id for ref in refs}) == MANY

    def reference() -> None:
        copy = "COPY hand_job (queue, arguments) FROM STDIN"
        with psycopg.connect(place.dsn) as connection, connection.cursor().copy(copy) as rows:
            for i in range(MANY):
                rows.write_row(("default", f'{{"seq":{i}}}'))

    def fresh(work: Callable[[], None]) -> float:
        place.empty()
        place.tidy()
        return rate(MANY, work)

    book.compare(
        "enqueue",
        f"{MANY:,} in a Session, ids returned, {kind}",
        place.name,
        ours=lambda: fresh(ours),
        reference=lambda: fresh(reference),
        beside="psycopg by hand, COPY without ids",
        size=MANY,
    )


CLIENTS = 16


def test_what_hints_cost_many_clients(place: PostgresPlace, book: Book) -> None:
    """Threads of one process, and a disk whose flushes take long: who waits for others shows."""
    jobs = sized(3_200, at_least=CLIENTS)
    slow_flush = sa.make_url(place.url).update_query_dict(
        {"options": "-c commit_delay=5000 -c commit_siblings=1"}
    )
    url = slow_flush.render_as_string(hide_password=False)
    told, untold = Producer(url), Producer(url, hints=False)

    def all_clients(producer: Producer) -> float:
        def enqueue() -> None:
            with ThreadPoolExecutor(CLIENTS) as pool:
                shares = [jobs // CLIENTS] * CLIENTS
                list(pool.map(lambda share: producer.in_sessions(producer.plain, share), shares))

        return rate(jobs, enqueue)

    book.compare(
        "enqueue",
        f"{CLIENTS} clients, flushes of 5 ms, workers told after the commit",
        place.name,
        ours=lambda: all_clients(told),
        reference=lambda: all_clients(untold),
        beside="with hints=False",
        size=jobs,
    )
    told.engine.dispose()
    untold.engine.dispose()


def safely(connection: sqlite3.Connection, _record: object) -> None:
    """A listener for "connect": each transaction is on the disk before the next, as by hand."""
    connection.execute("PRAGMA synchronous = FULL")


@pytest.mark.parametrize("beside", ["sqlite3 by hand", "SQLAlchemy by hand, INSERT of the row"])
def test_one_a_transaction_on_sqlite(sqlite_place: SqlitePlace, book: Book, beside: str) -> None:
    engine = sa.create_engine(sqlite_place.url)
    sa.event.listen(engine, "connect", safely)
    producer = Producer(sqlite_place.url)
    producer.engine = engine
    references: dict[str, Callable[[int], object]] = {
        "sqlite3 by hand": lambda count: by_hand.enqueue_in_sqlite(sqlite_place.path, count),
        "SQLAlchemy by hand, INSERT of the row": lambda count: producer.in_sessions(
            producer.by_insert, count
        ),
    }
    reference = references[beside]
    producer.in_sessions(producer.plain, 20)
    reference(20)
    book.compare(
        "enqueue",
        "one a transaction, Session, plain, synchronous=FULL",
        sqlite_place.name,
        ours=lambda: rate(ONE_BY_ONE, lambda: producer.in_sessions(producer.plain, ONE_BY_ONE)),
        reference=lambda: rate(ONE_BY_ONE, lambda: reference(ONE_BY_ONE)),
        beside=beside,
        size=ONE_BY_ONE,
    )
    engine.dispose()
