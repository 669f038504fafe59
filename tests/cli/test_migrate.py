"""`cyclone-sqla migrate`: what it does, what it says, and how it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine, inspect, make_url, text

from cyclone_sqla import migrations, schema_version
from cyclone_sqla.cli import main
from tests.databases import Database
from tests.waiting import wait_until

NAMES = ["My-App", "user", "1x", 'a"b', "o'brien", "a$$b", "a.b", "ü", "a%b", "a b"]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run where nothing is configured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CYCLONE_DATABASE_URL", raising=False)


def run(*arguments: str, **environment: str) -> Result:
    """Run `cyclone-sqla migrate` in this process."""
    return CliRunner().invoke(main, ["migrate", *arguments], env=environment)


def _on(database: Database, *arguments: str) -> Result:
    return run("--database-url", database.url, *arguments)


# ---- what it does and says -----------------------------------------------------------------------


def test_it_creates_the_tables_and_says_so(empty_database: Database) -> None:
    result = _on(empty_database)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "0001  The tables of the queue",
        f"{empty_database.url} is at revision 0001",
    ]
    assert result.stderr == ""
    with empty_database.engine().connect() as connection:
        assert migrations.check(connection).is_current


def test_a_second_run_has_nothing_to_do(empty_database: Database) -> None:
    _on(empty_database)
    result = _on(empty_database)
    assert result.exit_code == 0
    assert result.stdout == f"{empty_database.url} is at revision 0001: nothing to do\n"


def test_the_check_tells_what_is_behind(empty_database: Database) -> None:
    result = _on(empty_database, "--check")
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "lacks 0001 (The tables of the queue)" in line
    assert f"run: cyclone-sqla migrate --database-url {empty_database.url}" in line
    _on(empty_database)
    result = _on(empty_database, "--check")
    assert result.exit_code == 0
    assert result.stdout == f"{empty_database.url} is at revision 0001, the newest\n"


def test_tables_in_the_applications_own_history_are_checked_and_left_to_it(
    empty_database: Database,
) -> None:
    _on(empty_database)
    with empty_database.engine().begin() as connection:
        version = schema_version.Installed("0001", by_application=True).version_num
        table = schema_version.version_table(None)
        connection.execute(table.update().values(version_num=version))
    assert _on(empty_database, "--check").exit_code == 0
    result = _on(empty_database)
    assert (result.exit_code, result.stdout.endswith("nothing to do\n")) == (0, True)
    result = _on(empty_database, "--downgrade", "base")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "belong to the application's own Alembic history" in line
    with empty_database.engine().connect() as connection:
        assert migrations.current(connection) == "0001"


def test_the_check_changes_nothing(empty_database: Database) -> None:
    _on(empty_database, "--check")
    if empty_database.dialect == "sqlite":
        assert not Path(str(make_url(empty_database.url).database)).exists()
    else:
        assert inspect(empty_database.engine()).get_table_names() == []


def test_the_check_tells_of_a_newer_database(database: Database) -> None:
    with database.engine().begin() as connection:
        connection.execute(schema_version.version_table(None).update().values(version_num="9999"))
    result = _on(database, "--check")
    assert result.exit_code == 1
    assert "revision 9999, which this code (up to 0001) does not know" in result.stderr


def test_a_downgrade_to_base_takes_everything_away(database: Database) -> None:
    result = _on(database, "--downgrade", "base")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "0001  The tables of the queue  (undone)",
        f"{database.url} has no tables of cyclone-sqla",
    ]
    assert inspect(database.engine()).get_table_names() == []


def test_a_revision_can_be_named(empty_database: Database) -> None:
    assert _on(empty_database, "--revision", "0001").exit_code == 0
    result = _on(empty_database, "--revision", "0815")
    assert result.exit_code == 2
    assert "no way to revision '0815'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_sql_is_printed_and_nothing_is_done(empty_database: Database) -> None:
    result = _on(empty_database, "--sql")
    assert result.exit_code == 0
    assert result.stdout.count("CREATE TABLE cyclone_job ") == 1
    assert result.stderr == ""
    assert _on(empty_database, "--check").exit_code == 1
    down = _on(empty_database, "--sql", "--downgrade", "0001:base")
    assert "DROP TABLE cyclone_job;" in down.stdout


def test_the_sql_needs_no_server_and_no_driver() -> None:
    code = (
        "import sys; sys.modules['psycopg'] = sys.modules['psycopg2'] = None\n"
        "from cyclone_sqla.cli import main\n"
        "main(['migrate', '--sql', '--database-url', 'postgresql://'])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "CREATE TABLE cyclone_job" in answer.stdout


@pytest.mark.parametrize("schema", NAMES)
def test_any_schema_name_works(empty_postgresql: Database, schema: str) -> None:
    def migrate(*arguments: str) -> Result:
        return _on(empty_postgresql, "--schema", schema, *arguments)

    assert migrate("--check").exit_code == 1
    created = migrate()
    assert created.exit_code == 0, created.stderr
    assert f"(schema {schema}) is at revision 0001" in created.stdout
    assert migrate("--check").exit_code == 0
    assert "cyclone_job" in inspect(empty_postgresql.engine()).get_table_names(schema)
    assert inspect(empty_postgresql.engine()).get_table_names() == []
    assert "CREATE TABLE" in migrate("--sql").stdout
    assert migrate("--downgrade", "base").exit_code == 0
    assert inspect(empty_postgresql.engine()).get_table_names(schema) == []


def test_a_schema_is_refused_on_sqlite(empty_sqlite: Database) -> None:
    result = _on(empty_sqlite, "--schema", "queue")
    assert result.exit_code == 1
    assert "no schema 'queue': leave the schema out" in result.stderr


# ---- which database ------------------------------------------------------------------------------


def test_the_environment_names_the_database(empty_sqlite: Database) -> None:
    assert run(CYCLONE_DATABASE_URL=empty_sqlite.url).exit_code == 0
    assert _on(empty_sqlite, "--check").exit_code == 0


def test_the_option_comes_before_the_environment(empty_sqlite: Database) -> None:
    result = run("--database-url", empty_sqlite.url, CYCLONE_DATABASE_URL="postgresql://nowhere/x")
    assert result.exit_code == 0
    assert _on(empty_sqlite, "--check").exit_code == 0


def test_without_any_name_it_is_a_file_here_and_it_says_so(tmp_path: Path) -> None:
    result = run()
    assert result.exit_code == 0
    assert "using sqlite:///cyclone.db" in result.stderr
    assert (tmp_path / "cyclone.db").exists()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg2"])
def test_the_url_of_another_driver_works(empty_postgresql: Database, driver: str) -> None:
    result = run("--database-url", empty_postgresql.url_for(driver))
    assert result.exit_code == 0, result.stderr
    assert _on(empty_postgresql, "--check").exit_code == 0


# ---- how it ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--database-url", "shop.db"], "not a database URL"),
        (["--database-url", "oracle://shop"], "oracle is not supported"),
        (["--database-url", "sqlite+nodriver:///shop.db"], "sqlite.nodriver"),
        (["--database-url", "sqlite://"], "in memory"),
        (["--database-url", "sqlite:///x.db", "--schema", ""], "can't be the name of a schema"),
        (["--revision", "head", "--downgrade", "base"], "don't go together"),
        (["--check", "--sql"], "don't go together"),
        (["--check", "--downgrade", "base"], "don't go together"),
        (["--lock-timeout", "soon"], "'soon' is not a valid integer"),
        (["--lock-timeout", "-1"], "-1 is not in the range"),
        (["--nonsense"], "No such option"),
        (["--app", "shop"], "must be written as module:attribute"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert result.stdout == ""


def test_no_server_is_one_line_and_exit_code_1() -> None:
    result = run("--database-url", "postgresql://me:s3cret@127.0.0.1:1/shop")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "postgresql://me:***@127.0.0.1:1/shop" in line
    assert "refused" in line


def test_no_directory_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    result = run("--database-url", f"sqlite:///{tmp_path}/nowhere/shop.db")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "unable to open database file" in line


def test_the_lock_timeout_ends_the_wait(empty_database: Database) -> None:
    with empty_database.engine().connect() as holder:
        migrations.upgrade(holder)
        result = _on(empty_database, "--lock-timeout", "0")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "for more than 0 s" in line


def test_a_foreign_table_in_the_way_is_one_line(empty_database: Database) -> None:
    with empty_database.engine().begin() as connection:
        connection.execute(text("CREATE TABLE cyclone_job (mine integer)"))
    result = _on(empty_database)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "cyclone_job" in line
    assert "already exists" in line


@pytest.fixture
def waiting(empty_postgresql: Database) -> Iterator["subprocess.Popen[str]"]:
    """`python -m cyclone_sqla migrate`, as a process that waits for another migration."""
    command = [sys.executable, "-m", "cyclone_sqla", "migrate"]
    environment = {**os.environ, "CYCLONE_DATABASE_URL": empty_postgresql.url}
    engine = empty_postgresql.engine()
    with engine.connect() as holder:
        migrations.upgrade(holder)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            wait_until(lambda: _is_waiting(engine), "it waits")
            yield process
            process.kill()


def _is_waiting(engine: Engine) -> bool:
    sessions = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name")
    with engine.connect() as connection:
        return bool(connection.scalar(sessions, {"name": "cyclone-sqla migrate"}))


def test_an_interrupt_ends_it_with_one_line(waiting: "subprocess.Popen[str]") -> None:
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=30)
    assert (waiting.returncode, out) == (130, "")
    assert err == "Error: interrupted\n"


def test_the_help_explains_the_exit_codes() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "Exit codes: 0 done; 1 the database" in " ".join(result.stdout.split())


@pytest.mark.parametrize("command", ["migrate", "work"])
def test_a_command_loads_nothing_that_only_others_need(command: str) -> None:
    code = (
        "import sys; sys.modules['alembic'] = sys.modules['rich'] = None\n"
        "from cyclone_sqla.cli import main\n"
        f"main(['{command}', '--help'])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "--database-url" in answer.stdout
