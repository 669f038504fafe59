"""What a job writes and asks: bytes of the log, statements and transactions, enqueue included."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone
from tests.benchmarks.book import Book, sized
from tests.benchmarks.conftest import SETTINGS
from tests.benchmarks.place import Jobs, PostgresPlace
from tests.benchmarks.processes import Runner, drain
from tests.databases import Database
from tests.servers.postgres import PostgresServer

COUNT = sized(10_000)
SLOTS = {"alone": 1, "together": 500}

Options = Callable[[int], dict[str, Any]]
"""The options of the job with this number."""

KINDS: dict[str, Options] = {
    "plain": lambda _: {},
    "of one sequence": lambda _: {"sequence": "only"},
    "of 1,000 sequences": lambda number: {"sequence": f"key-{number % 1000}"},
}


@pytest.fixture(scope="module")
def counting_server() -> Iterator[PostgresServer]:
    """A server that counts statements, as the shared one does not: that takes time."""
    settings = {
        **SETTINGS,
        "shared_preload_libraries": "pg_stat_statements",
        "autovacuum": "off",  # nothing but the jobs writes
    }
    with PostgresServer(settings) as server:
        yield server


@pytest.fixture
def counted(counting_server: PostgresServer) -> Iterator[PostgresPlace]:
    """A database of it."""
    from cyclone_sqla.migrations import migrate_database

    with ExitStack() as stack:
        counting_server.create_database("cost")
        stack.callback(counting_server.drop_database, "cost")
        migrate_database(counting_server.url("cost"))
        database = stack.enter_context(closing(Database(counting_server.url("cost"))))
        place = stack.enter_context(closing(PostgresPlace(database)))
        place.run("CREATE EXTENSION pg_stat_statements")
        # The last checkpoint: a page's first change after one goes into the log whole, so that how
        # much is written would depend on the checkpoints.
        place.tidy()
        yield place


class Costs:
    """Reads the server's counters before and after."""

    def __init__(self, place: PostgresPlace) -> None:
        self._place = place
        place.run("SET pg_stat_statements.track = 'none'")
        place.run("SELECT pg_stat_statements_reset()")
        self._wal = self._log_position()

    def per_job(self, count: int) -> tuple[float, float]:
        """Bytes of the log, and statements; those of BEGIN and COMMIT included."""
        calls = self._place.run(
            "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements "
            "WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        return (self._log_position() - self._wal) / count, calls[0] / count

    def _log_position(self) -> int:
        position: int = self._place.run(
            "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"
        )[0]
        return position


def enqueue(place: PostgresPlace, options: Options) -> Jobs:
    """One job a transaction."""
    engine = sa.create_engine(place.url)
    cyclone = Cyclone(engine, hints=False)
    ids = []
    for number in range(COUNT):
        with Session(engine) as session, session.begin():
            ids.append(cyclone.enqueue(session, "atick", {}, **options(number)).id)
    engine.dispose()
    return Jobs("cyclone_job", "state = 'completed'", ids[0], ids[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_cost_of_enqueue(counted: PostgresPlace, book: Book, kind: str) -> None:
    costs = Costs(counted)
    enqueue(counted, KINDS[kind])
    note(book, f"enqueue, {kind}, one a transaction", costs)


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("kind", KINDS)
def test_cost_of_the_rest(counted: PostgresPlace, book: Book, kind: str, slots: str) -> None:
    jobs = enqueue(counted, KINDS[kind])
    counted.run("ANALYZE")
    costs = Costs(counted)
    drain(counted, jobs, [Runner.ours(counted, slots=SLOTS[slots])])
    note(book, f"from claim to completed, {kind}, {SLOTS[slots]} slot(s)", costs)


def note(book: Book, work: str, costs: Costs) -> None:
    wal, statements = costs.per_job(COUNT)
    book.note("cost", work, "postgresql", [wal], unit="bytes of WAL/job", size=COUNT)
    book.note("cost", work, "postgresql", [statements], unit="statements/job", size=COUNT)
