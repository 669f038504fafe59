"""`cyclone-sqla doctor`: what it finds, what it mends, and how it ends."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.exc import IntegrityError

from cyclone_sqla import Context, Cyclone, State, operations
from cyclone_sqla.cli import main
from cyclone_sqla.doctor import Finding, Limits, examine, examine_engine, mend
from cyclone_sqla.schema_version import VERSION_TABLE
from tests.databases import Database
from tests.life.hands import DONE, Hands

HOUR = timedelta(hours=1)

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def hands(database: Database) -> Iterator[Hands]:
    with closing(Hands(database)) as direct:
        yield direct


@pytest.fixture
def server_hands(postgresql_database: Database) -> Iterator[Hands]:
    with closing(Hands(postgresql_database)) as direct:
        yield direct


def found(hands: Hands, **options: Any) -> dict[str, Finding]:
    """What is found, by name."""
    with hands.engine.connect() as connection:
        return {each.name: each for each in examine(connection, hands.cyclone, **options)}


def announce(hands: Hands, queues: dict[str, int], kinds: list[str]) -> None:
    """A live worker."""
    record = {"id": "w", "name": "w", "host": "h", "pid": 1, "queues": queues, "kinds": kinds}
    with hands.transaction() as connection:
        operations.announce(connection, hands.dialect, record)


# ---- the queue -----------------------------------------------------------------------------------


def test_nothing_is_found_in_a_queue_at_work(hands: Hands) -> None:
    """More often than a driver takes to prepare a statement."""
    announce(hands, {"default": 5}, ["work"])
    hands.enqueue_many(3)
    hands.enqueue(process_in=60)
    hands.enqueue(sequence="k")
    hands.admit()
    hands.claim(2)
    for _ in range(16):
        assert found(hands) == {}


def make_lapsed(hands: Hands) -> None:
    hands.enqueue()
    hands.claim_one()


def make_overdue(hands: Hands) -> None:
    hands.enqueue(process_in=1)


def make_incoming(hands: Hands) -> None:
    hands.enqueue(sequence="k")


def make_headless(hands: Hands) -> None:
    first = hands.enqueue(sequence="headless")
    hands.enqueue(sequence="headless")
    hands.admit()
    hands.forget(first)


def make_debt(hands: Hands) -> None:
    """Its successor is in line before the sweep could take the line for a headless one."""
    first = hands.enqueue(sequence="owing")
    hands.admit()
    hands.settle(hands.claim_one(), DONE)
    hands.change(first, admitted=True)
    hands.enqueue(sequence="owing")


def make_unserved(hands: Hands) -> None:
    hands.enqueue(queue="mail")


WRONG: dict[str, Callable[[Hands], None]] = {
    "headless-sequences": make_headless,
    "unpaid-debts": make_debt,
    "lapsed-leases": make_lapsed,
    "overdue-jobs": make_overdue,
    "jobs-not-admitted": make_incoming,
    "queue-without-worker": make_unserved,
}


def test_what_no_worker_does_is_found_when_it_is_late(hands: Hands) -> None:
    """And a look writes nothing."""
    for make in WRONG.values():
        make(hands)
    before = hands.rows()
    hands.clock.advance(minutes=4)
    announce(hands, {"default": 5}, ["work"])
    assert found(hands).keys() == {"headless-sequences", "queue-without-worker"}
    hands.clock.advance(minutes=56)
    with hands.transaction() as connection:
        operations.beat(connection, hands.dialect, "w")
    late = found(hands)
    assert late.keys() == WRONG.keys()
    assert {(each.severity, each.is_problem) for each in late.values()} == {("error", True)}
    assert hands.rows() == before


def test_a_kind_that_no_worker_of_the_queue_knows_is_found(hands: Hands) -> None:
    hands.enqueue("renamed")
    announce(hands, {"default": 5}, ["work"])
    assert "'renamed'" in found(hands)["kind-without-worker"].text


def test_a_paused_queue_needs_no_worker(hands: Hands) -> None:
    hands.enqueue(queue="mail")
    hands.act("pause_queue", "mail")
    assert found(hands) == {}


def test_a_job_without_a_position_among_numbered_ones_is_found(hands: Hands) -> None:
    hands.enqueue(sequence="k", position=1)
    hands.admit()
    lost = hands.enqueue(sequence="k")
    assert str(lost) in found(hands)["jobs-without-position"].text


def test_silent_workers_are_a_note(hands: Hands) -> None:
    announce(hands, {"default": 5}, ["work"])
    hands.clock.advance(minutes=2)
    (finding,) = found(hands).values()
    assert (finding.name, finding.is_problem) == ("silent-workers", False)


# ---- what is mended ------------------------------------------------------------------------------


def test_what_can_be_mended_is(hands: Hands) -> None:
    for name in MENDABLE:
        WRONG[name](hands)
    hands.clock.advance(minutes=4)
    assert [said for said in mended(hands) if "Took" in said] == []
    hands.clock.advance(minutes=56)
    late = found(hands)
    assert {name for name, each in late.items() if each.can_be_mended} == {
        "lapsed-leases",
        "unpaid-debts",
    }
    assert len(mended(hands)) == 2
    assert not MENDABLE & found(hands).keys()
    assert mended(hands) == []
    assert len(hands.claim()) == 3


MENDABLE = {"lapsed-leases", "headless-sequences", "unpaid-debts"}


def mended(hands: Hands) -> list[str]:
    return mend(hands.database.engine(), hands.cyclone)


# ---- the database --------------------------------------------------------------------------------


def test_a_missing_index_is_found_with_the_command_that_makes_it(hands: Hands) -> None:
    hands.execute("DROP INDEX cyclone_job_available")
    finding = found(hands)["missing-index"]
    assert "cyclone_job_available" in finding.text
    hands.execute(finding.advice.removeprefix("Run: "))
    assert found(hands) == {}


def test_an_invalid_index_is_found(server_hands: Hands) -> None:
    for _ in range(2):
        server_hands.enqueue()
    engine = server_hands.database.engine(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(IntegrityError):
        connection.exec_driver_sql("CREATE UNIQUE INDEX CONCURRENTLY broken ON cyclone_job (kind)")
    finding = found(server_hands)["invalid-index"]
    assert finding.advice == "Run: DROP INDEX CONCURRENTLY broken;"


def test_what_the_server_lacks_is_found(server_hands: Hands) -> None:
    """Time, here as if this host's clock went wrong, and connections, here as if none were left."""
    ahead = {"host_now": lambda: datetime.now(UTC) + HOUR}
    names = found(server_hands, limits=Limits(connections=0.0), **ahead)
    assert names.keys() == {"clock-skew", "few-connections"}
    assert re.search(r" (3600|3599)\.\d s\.", names["clock-skew"].text)


def test_an_old_transaction_is_found_with_what_it_holds_back(server_hands: Hands) -> None:
    with server_hands.database.engine().connect() as old:
        old.execution_options(isolation_level="REPEATABLE READ")
        pid = old.scalar(sa.text("SELECT pg_backend_pid()"))
        for _ in range(2):
            server_hands.enqueue()
        names = found(server_hands, limits=Limits(transaction=timedelta(0), horizon=0))
    assert f"pg_terminate_backend({pid})" in names["old-transaction"].advice
    assert f"process {pid}" in names["vacuum-horizon"].text


def test_a_log_that_grows_is_found(sqlite_database: Database) -> None:
    with closing(Hands(sqlite_database)) as hands:
        hands.enqueue()
        assert "large-log" in found(hands, limits=Limits(log=0))


def test_a_file_without_a_write_ahead_log_is_found(sqlite_database: Database) -> None:
    with closing(Hands(sqlite_database)) as hands:
        hands.held.close()
        hands.worker_engine.dispose()
        with hands.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=delete")
        assert "cyclone-sqla migrate" in found(hands)["unfit-database"].advice


# ---- the application's engine --------------------------------------------------------------------


def of_engine(hands: Hands, cyclone: Cyclone | None = None, **options: Any) -> set[str]:
    engine = hands.database.engine(**options)
    with hands.engine.connect() as connection:
        return {f.name for f in examine_engine(engine, connection, cyclone or hands.cyclone)}


def test_how_an_engine_begins_is_looked_at(server_hands: Hands) -> None:
    assert of_engine(server_hands) == set()
    assert of_engine(server_hands, isolation_level="AUTOCOMMIT") == {"autocommit"}
    assert of_engine(server_hands, isolation_level="SERIALIZABLE") == {"isolation"}


def test_a_pool_that_is_smaller_than_the_runs_is_found(server_hands: Hands) -> None:
    def work(ctx: Any) -> None: ...

    server_hands.cyclone.action(kind="work")(_with_context(work))
    announce(server_hands, {"default": 20}, ["work"])
    assert of_engine(server_hands, pool_size=20) == set()
    assert of_engine(server_hands, pool_size=2, max_overflow=3) == {"small-pool"}


def _with_context(fn: Callable[..., None]) -> Callable[..., None]:
    fn.__annotations__ = {"ctx": Context, "return": None}
    return fn


# ---- the command ---------------------------------------------------------------------------------


def run(url: str, *options: str, code: int) -> str:
    result = CliRunner().invoke(main, ["doctor", "--database-url", url, *options])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_the_exit_code_says_whether_there_are_problems(database: Database) -> None:
    assert run(database.url, code=0) == "Nothing is wrong.\n"
    with closing(Hands(database)) as hands:
        hands.enqueue()
    assert "error    queue-without-worker: 1 job(s)" in run(database.url, code=1)
    (finding,) = json.loads(run(database.url, "--format", "json", code=1))["findings"]
    assert finding["name"] == "queue-without-worker"
    assert finding.keys() == {"name", "severity", "text", "advice", "can_be_mended"}


def test_it_says_what_it_mended(sqlite_database: Database) -> None:
    with closing(Hands(sqlite_database)) as hands:
        job_id = hands.enqueue()
        hands.claim_one()
        past = datetime.now(UTC) - HOUR
        hands.change(job_id, leased_until=past, run_at=past)
        assert "lapsed-leases" in run(sqlite_database.url, code=1)
        told = json.loads(run(sqlite_database.url, "--fix", "--format", "json", code=1))
        assert told["done"] == [f"Took job {job_id} back from worker-1: now available."]
        assert [each["name"] for each in told["findings"]] == ["queue-without-worker"]
        assert hands.job(job_id).state == State.AVAILABLE


def test_tables_of_another_version_are_the_one_finding(hands: Hands) -> None:
    hands.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    assert "schema-version: The tables are at revision 9999" in run(hands.database.url, code=1)


def test_missing_tables_are_found_and_no_file_is_made(empty_sqlite: Database) -> None:
    said = run(empty_sqlite.url, "--fix", code=1)
    assert "Run: cyclone-sqla migrate --database-url" in said.replace("\n", " ")
    path = sa.make_url(empty_sqlite.url).database
    assert path is not None
    assert not Path(path).exists()


def test_a_database_that_is_not_there_is_an_exit_code_of_its_own() -> None:
    said = run("postgresql://shop:secret@127.0.0.1:1/shop", code=2)
    assert said.startswith("Error: postgresql://shop:***@127.0.0.1:1/shop: connection")
