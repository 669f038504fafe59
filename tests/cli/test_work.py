"""`cyclone-sqla work`: how it starts, what it says, and how it ends."""

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from cyclone_sqla import State, migrations
from cyclone_sqla.cli import main
from cyclone_sqla.schema_version import VERSION_TABLE
from tests.databases import Database
from tests.processes import PATIENCE, App, Process
from tests.servers.postgres import PostgresServer
from tests.waiting import wait_until

STARTED = " started: "
STOPS = " stops: "


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CYCLONE_DATABASE_URL", raising=False)


@pytest.fixture
def app(tmp_path: Path, database: Database) -> App:
    """The application on a migrated database, once of each kind."""
    return App(tmp_path, database)


@pytest.fixture
def file_app(tmp_path: Path, sqlite_database: Database) -> App:
    """The application on SQLite."""
    return App(tmp_path, sqlite_database)


@pytest.fixture
def server_app(tmp_path: Path, postgresql_database: Database) -> App:
    """The application on PostgreSQL."""
    return App(tmp_path, postgresql_database)


# ---- the first signal --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_runs_end_and_claims_nothing_more(app: App, number: signal.Signals) -> None:
    held = app.enqueue("hold", name="first")
    with app.work() as process:
        app.wait_begun("first")
        process.send(number)
        process.wait_for(STOPS)
        late = app.enqueue("hold", name="late")
        app.let_go("first")
        assert process.exit_code() == 0
    assert app.job(held).state == State.COMPLETED
    assert (app.job(late).state, app.job(late).attempt) == (State.AVAILABLE, 0)
    assert app.workers() == {}


def test_leases_are_renewed_during_the_grace(app: App) -> None:
    held = app.enqueue("hold", name="long")

    def lease_end() -> datetime:
        end = app.job(held).leased_until
        assert end is not None
        return end

    with app.work("--lease", "1") as process:
        app.wait_begun("long")
        process.send(signal.SIGTERM)
        process.wait_for(STOPS)
        for _ in range(2):
            before = lease_end()
            wait_until(lambda before=before: lease_end() > before, "the lease is renewed")
        app.let_go("long")
        assert process.exit_code() == 0
    assert (app.job(held).state, app.job(held).attempt) == (State.COMPLETED, 1)


def test_what_was_claimed_and_not_begun_is_given_back_with_its_attempt(app: App) -> None:
    """An async action that blocks the event loop keeps the others from beginning."""
    blocker = app.enqueue("block_the_loop", name="blocker")
    waiting = [app.enqueue("hold_async", name=f"waiting-{n}") for n in range(3)]
    with app.work() as process:
        app.wait_begun("blocker")
        wait_until(lambda: _states(app, waiting) == {State.RUNNING}, "all are claimed")
        process.send(signal.SIGTERM)
        wait_until(lambda: _states(app, waiting) == {State.AVAILABLE}, "they are given back")
        assert {app.job(i).attempt for i in waiting} == {0}
        app.let_go("blocker")
        assert process.exit_code() == 0
    assert app.job(blocker).state == State.COMPLETED


def _states(app: App, jobs: list[int]) -> set[str]:
    return {app.job(job_id).state for job_id in jobs}


def test_an_async_run_is_cancelled_when_the_grace_is_over(file_app: App) -> None:
    held = file_app.enqueue("hold_async", name="endless")
    with file_app.work("--grace", "0.2") as process:
        file_app.wait_begun("endless")
        assert process.stop() == 0
    job = file_app.job(held)
    assert (job.state, job.attempt) == (State.AVAILABLE, 1)
    assert job.last_error == "Cancelled: the worker is stopping"


def test_a_thread_that_runs_on_after_the_grace_is_an_exit_code_of_its_own(file_app: App) -> None:
    held = file_app.enqueue("hold", name="endless")
    with file_app.work("--grace", "0.2") as process:
        file_app.wait_begun("endless")
        assert process.stop() == 4
        assert any(f"job {held} (hold) runs on" in line for line in process.lines())
    assert file_app.job(held).state == State.RUNNING


def test_a_thread_that_an_action_left_behind_does_not_keep_the_process(file_app: App) -> None:
    left = file_app.enqueue("leave_a_thread", name="left")
    with file_app.work() as process:
        file_app.wait_begun("left")
        assert process.stop() == 0
    assert file_app.job(left).state == State.COMPLETED


# ---- the second signal, and the clock ----------------------------------------------------------


def test_a_second_signal_ends_it_at_once(file_app: App) -> None:
    held = file_app.enqueue("hold", name="endless")
    with file_app.work("--grace", "3600") as process:
        file_app.wait_begun("endless")
        process.send(signal.SIGTERM)
        process.wait_for(STOPS)
        process.send(signal.SIGINT)
        assert process.exit_code() == 130
    assert file_app.job(held).state == State.RUNNING


@pytest.mark.slow
def test_a_silent_database_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    with PostgresServer() as server, _migrated(server) as database:
        app = App(tmp_path, database)
        with app.work("--grace", "0") as process:
            process.wait_for(STARTED)
            server.freeze()
            try:
                assert process.stop() == 4
            finally:
                server.thaw()


@pytest.mark.slow
def test_a_silent_database_does_not_hold_up_a_stop_before_the_start(tmp_path: Path) -> None:
    with PostgresServer() as server, _migrated(server) as database:
        app = App(tmp_path, database)
        server.freeze()
        try:
            with app.work("--grace", "0") as process:
                wait_until(app.importers, "it has loaded the application")
                wait_until(lambda: _is_connected(process), "it waits for the server")
                assert process.stop() == 4
        finally:
            server.thaw()


@contextmanager
def _migrated(server: PostgresServer) -> Iterator[Database]:
    server.create_database("shop")
    migrations.migrate_database(server.url("shop"))
    with closing(Database(server.url("shop"))) as database:
        yield database


def _is_connected(process: Process) -> bool:
    return bool(psutil.Process(process.pid).net_connections("tcp"))


# ---- the tables --------------------------------------------------------------------------------


def test_missing_tables_are_created_in_a_file_by_another_process(
    tmp_path: Path, empty_sqlite: Database
) -> None:
    app = App(tmp_path, empty_sqlite)
    with app.work() as process:
        process.wait_for(STARTED)
        done = app.enqueue("say", text="hello")
        process.wait_for("hello")
        assert process.stop() == 0
        assert any("running cyclone-sqla migrate" in line for line in process.lines())
    assert app.job(done).state == State.COMPLETED
    assert not app.loaded() & {"alembic", "mako", "rich"}


def test_missing_tables_on_a_server_are_one_line_with_the_command(
    tmp_path: Path, empty_postgresql: Database
) -> None:
    with App(tmp_path, empty_postgresql).work() as process:
        assert process.exit_code() == 3
        (line,) = process.lines()
    shown = sa.make_url(empty_postgresql.url).render_as_string()
    assert line == (
        "Error: this database has no tables of cyclone-sqla (needed: 0001); "
        f"run: cyclone-sqla migrate --database-url {shown}"
    )


def test_tables_of_another_version_are_one_line(file_app: App) -> None:
    with file_app.database.engine().begin() as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with file_app.work() as process:
        assert process.exit_code() == 3
        (line,) = process.lines()
    assert "at revision 9999, which this code (up to 0001) does not know" in line


def test_the_tables_may_be_in_a_schema_that_the_application_does_not_name(
    tmp_path: Path, empty_postgresql: Database
) -> None:
    app = App(tmp_path, empty_postgresql)
    migrations.migrate_database(empty_postgresql.url, schema="queue")
    job_id = app.enqueue_in("queue", "say", text="hello")
    with app.work("--schema", "queue") as process:
        process.wait_for("hello")
        assert process.stop() == 0
        assert f"job_id={job_id}" in "".join(process.lines())


# ---- what can't work is one line ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--queues", ","], "queues: name at least one, like ledger:5,mail:20"),
        (["--queues", "a:1,a:2"], "queues: 'a' is given twice"),
        (["--lease", "0.5"], "lease: at least 1 s, so that it can be renewed in time"),
        (["--grace", "-1"], "grace: a finite number of seconds above zero, not -1.0"),
        (["--poll", "nan"], "poll: a finite number of seconds above zero, not nan"),
        (["--concurrency", "0"], "concurrency: a whole number from 1 to 1,000,000, not 0"),
    ],
)
def test_a_wrong_setting_is_named(options: list[str], complaint: str) -> None:
    result = CliRunner().invoke(main, ["work", "--app", "jobs:cyclone", *options])
    assert (result.exit_code, result.stderr) == (2, f"Error: {complaint}\n")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--app", "nowhere:cyclone"], "can't import the application's module nowhere"),
        (["--app", "jobs:other"], "the module jobs has no other"),
        (["--processes", "2", "--single-instance"], "don't go together"),
    ],
)
def test_wrong_use_is_one_line(file_app: App, options: list[str], complaint: str) -> None:
    with file_app.work(*options) as process:
        assert process.exit_code() == 2
        (line,) = process.lines()
    assert complaint in line


def test_a_worker_needs_an_application(file_app: App) -> None:
    url = file_app.database.url
    with file_app.run(sys.executable, "-m", "cyclone_sqla", "work", "--database-url", url) as bare:
        assert bare.exit_code() == 2
        (line,) = bare.lines()
    assert line.startswith("Error: whose jobs? give --app module:attribute")


def test_a_database_that_is_not_there_is_one_line(file_app: App) -> None:
    url = "postgresql://shop:secret@127.0.0.1:1/shop"
    with file_app.work("--database-url", url) as process:
        assert process.exit_code() == 1
        (line,) = process.lines()
    assert line.startswith("Error: postgresql://shop:***@127.0.0.1:1/shop: connection")


# ---- options -----------------------------------------------------------------------------------


def test_only_the_named_queues_are_served(file_app: App) -> None:
    other = file_app.enqueue("say", text="other")
    done = file_app.enqueue("say", queue="mail", text="hello")
    with file_app.work("--queues", "mail, ledger:3", "--concurrency", "7") as process:
        process.wait_for("hello")
        assert process.stop() == 0
        assert any("started: queues mail:7, ledger:3" in line for line in process.lines())
    assert file_app.job(done).state == State.COMPLETED
    assert file_app.job(other).attempt == 0


def test_a_worker_can_poll_alone(server_app: App) -> None:
    with server_app.work("--no-listen", "--no-prepare", "--poll", "0.05") as process:
        process.wait_for(STARTED)
        server_app.enqueue("say", text="hello")
        process.wait_for("hello")
        assert process.stop() == 0


def test_it_listens_where_it_is_told_to(server_app: App) -> None:
    listening = sa.text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE query LIKE 'LISTEN%' AND application_name = 'direct'"
    )
    url = f"{server_app.database.url}?application_name=direct"
    with server_app.work("--listen-url", url) as process:
        engine = server_app.database.engine()

        def listens() -> bool:
            with engine.connect() as connection:
                return connection.scalar(listening) == 1

        wait_until(listens, "it listens on the direct connection", within=PATIENCE)
        assert process.stop() == 0


def test_the_console_script_is_the_same(file_app: App) -> None:
    script = str(Path(sys.executable).with_name("cyclone-sqla"))
    with file_app.run(script, "work", "--app", "jobs:cyclone", "--name", "web") as process:
        process.wait_for(STARTED)
        assert list(file_app.workers()) == ["web"]
        assert process.stop() == 0


# ---- what it loads -----------------------------------------------------------------------------


def test_a_worker_on_a_file_loads_no_migrations_no_rich_and_no_driver_of_a_server(
    file_app: App,
) -> None:
    loaded = _loaded_by_a_worker(file_app)
    assert "sqlalchemy" in loaded
    assert not loaded & {"alembic", "mako", "rich", "psycopg", "psycopg2", "asyncpg", "aiosqlite"}


def test_a_worker_on_a_server_loads_no_migrations_and_no_rich(server_app: App) -> None:
    loaded = _loaded_by_a_worker(server_app)
    assert "psycopg" in loaded
    assert not loaded & {"alembic", "mako", "rich", "psycopg2", "asyncpg", "aiosqlite"}


def _loaded_by_a_worker(app: App) -> set[str]:
    with app.work() as process:
        process.wait_for(STARTED)
        app.enqueue("say", text="hello")
        process.wait_for("hello")
        assert process.stop() == 0
    return app.loaded()


# ---- what it writes ----------------------------------------------------------------------------

NASTY = "\x1b[31mred\r\n2026-01-31 12:00:00.000+00:00 CRITICAL worker  forged\u2028\x00\x9b"


def test_text_of_an_action_stays_in_its_line(file_app: App) -> None:
    job_id = file_app.enqueue("say", text=NASTY.replace("\x00", ""))
    failed = file_app.enqueue("fail", max_attempts=1, text=NASTY.replace("\x00", ""))
    with file_app.work("--name", "web-1") as process:
        process.wait_for("red", count=2)
        assert process.stop() == 0
        lines = [line for line in process.lines() if "red" in line]
    assert all(line.isprintable() for line in lines)
    of_action, of_failure = sorted(lines, key=lambda line: "discarded" in line)
    assert " WARNING  web-1  \\x1b[31mred\\r\\n2026" in of_action
    assert of_action.endswith(f"  job_id={job_id}  kind=say  queue=default  attempt=1")
    assert f" ERROR    web-1  fail job {failed}, attempt 1: discarded: ValueError: " in of_failure


def test_json_logs_are_one_object_a_line(file_app: App) -> None:
    text = NASTY.replace("\x00", "")
    job_id = file_app.enqueue("say", text=text)
    with file_app.work("--name", "web-1", "--log-format", "json") as process:
        process.wait_for("red")
        assert process.stop() == 0
        records = process.records()
    assert {record["worker"] for record in records} == {"web-1"}
    (said,) = (record for record in records if record["message"] == text)
    assert said["level"] == "warning"
    assert (said["job_id"], said["kind"], said["queue"], said["attempt"]) == (
        job_id, "say", "default", 1,
    )  # fmt: skip
    assert datetime.fromisoformat(said["time"]).tzinfo is not None


def test_whoever_reads_json_gets_a_failure_as_json(
    tmp_path: Path, empty_postgresql: Database
) -> None:
    with App(tmp_path, empty_postgresql).work("--log-format", "json") as process:
        assert process.exit_code() == 3
        (record,) = process.records()
    assert record["level"] == "critical"
    assert "cyclone-sqla migrate" in record["message"]


def test_a_busy_worker_writes_no_line_for_a_job(file_app: App) -> None:
    jobs = [file_app.enqueue("hold", name=f"{n}") for n in range(40)]
    for n in range(40):
        file_app.let_go(f"{n}")
    with file_app.work() as process:
        wait_until(lambda: file_app.job(jobs[-1]).is_terminal, "all have ended", within=60)
        assert process.stop() == 0
        started, stops, stopped = process.lines()
    assert STARTED in started
    assert STOPS in stops
    assert stopped.endswith(" stopped")


def test_a_worker_that_is_told_to_be_silent_says_nothing(file_app: App) -> None:
    file_app.enqueue("hold", name="x")
    file_app.let_go("x")
    with file_app.work("--log-level", "ERROR") as process:
        file_app.wait_begun("x")
        assert process.stop() == 0
        assert process.lines() == []
