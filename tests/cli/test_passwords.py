"""Any password works, wherever it is given, and none is ever shown."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import URL, create_engine, make_url

from cyclone_sqla import ConfigurationError, Cyclone, Worker, WorkerSettings, migrations
from cyclone_sqla.cli.options import Target
from tests.databases import Database
from tests.processes import App
from tests.servers.postgres import PostgresServer
from tests.waiting import wait_until

pytestmark = pytest.mark.postgresql

PASSWORD = "p%40s%s@:/ %d$'\"#?&"
ROLE = "shop"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that asks the role `shop` for its password."""
    with PostgresServer() as server:
        rules = server.data / "pg_hba.conf"
        rules.write_text(f"host all {ROLE} all scram-sha-256\n{rules.read_text()}")
        with psycopg.connect(_as_owner(server), autocommit=True) as connection:
            create = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}")
            connection.execute(create.format(sql.Identifier(ROLE), sql.Literal(PASSWORD)))
            connection.execute("SELECT pg_reload_conf()")
        wait_until(lambda: not _can_connect(server, "wrong"), "the server asks for passwords")
        yield server


def _as_owner(server: PostgresServer) -> str:
    return server.url("postgres").replace("+psycopg", "")


def _can_connect(server: PostgresServer, password: str) -> bool:
    try:
        psycopg.connect(_as_owner(server), user=ROLE, password=password).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture
def url(server: PostgresServer) -> Iterator[URL]:
    """A database that belongs to `shop`; the URL holds the password."""
    name = "cyclone_passwords"
    with psycopg.connect(_as_owner(server), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} OWNER {ROLE}")
    yield make_url(server.url(name)).set(username=ROLE, password=PASSWORD)
    server.drop_database(name)


def _migrate(
    *arguments: str, directory: Path, **environment: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "cyclone_sqla", "migrate", *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        env={**os.environ, **environment},
    )


def _text(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def _is_hidden(answer: "subprocess.CompletedProcess[str]") -> bool:
    return _hides(answer.stdout + answer.stderr)


def _hides(shown: str) -> bool:
    return not any(secret in shown for secret in (PASSWORD, quote(PASSWORD, safe=""), PASSWORD[:7]))


def test_on_the_command_line(url: URL, tmp_path: Path) -> None:
    answer = _migrate("--database-url", _text(url), directory=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "shop:***@" in answer.stdout
    assert _is_hidden(answer)


def test_in_the_environment(url: URL, tmp_path: Path) -> None:
    answer = _migrate(directory=tmp_path, CYCLONE_DATABASE_URL=_text(url))
    assert answer.returncode == 0, answer.stderr
    assert _is_hidden(answer)


def test_in_the_query_of_the_url(url: URL, tmp_path: Path) -> None:
    inside = url.set(password=None).update_query_dict({"password": PASSWORD})
    answer = _migrate("--database-url", _text(inside), directory=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert _is_hidden(answer)


def test_in_a_call(url: URL) -> None:
    assert migrations.migrate_database(_text(url))
    assert migrations.migrate_database(url) == ()
    engine = create_engine(url)
    assert migrations.migrate_database(engine) == ()
    with engine.connect() as connection:
        assert migrations.check(connection).is_current
    engine.dispose()


def test_a_check_that_names_the_command_hides_it(url: URL, tmp_path: Path) -> None:
    answer = _migrate("--check", "--database-url", _text(url), directory=tmp_path)
    assert answer.returncode == 1
    assert "run: cyclone-sqla migrate --database-url" in answer.stderr
    assert _is_hidden(answer)


def test_a_refused_password_is_hidden(url: URL, tmp_path: Path) -> None:
    wrong = url.set(password=f"{PASSWORD}x")
    answer = _migrate("--database-url", _text(wrong), directory=tmp_path)
    assert answer.returncode == 1
    assert "password authentication failed" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
    assert _is_hidden(answer)


def test_a_password_that_breaks_the_url_is_hidden(url: URL, tmp_path: Path) -> None:
    broken = _text(url).replace(quote(PASSWORD, safe=" +"), PASSWORD)
    assert PASSWORD in broken
    answer = _migrate("--database-url", broken, directory=tmp_path)
    assert answer.returncode == 2
    assert "in a password, write @ as %40" in answer.stderr
    assert _is_hidden(answer)


def test_the_script_holds_no_password(url: URL, tmp_path: Path) -> None:
    answer = _migrate("--sql", "--database-url", _text(url), directory=tmp_path)
    assert answer.returncode == 0
    assert _is_hidden(answer)


def test_a_worker_at_its_most_talkative_hides_it_though_its_connections_are_lost(
    server: PostgresServer, url: URL, tmp_path: Path
) -> None:
    migrations.migrate_database(url)
    inside = url.set(password=None).update_query_dict({"password": PASSWORD})
    with closing(Database(_text(url))) as database:
        app = App(tmp_path, database)
        with app.work("--log-level", "debug", "--listen-url", _text(inside)) as process:
            process.wait_for("started")
            app.enqueue("fail", text="it broke", max_attempts=1)
            process.wait_for("it broke")
            with psycopg.connect(_as_owner(server), autocommit=True) as connection:
                listening = sql.SQL(LISTENING).format(sql.Literal(ROLE))
                wait_until(lambda: connection.execute(listening).fetchone(), "it listens")
                connection.execute(sql.SQL(TERMINATE).format(sql.Literal(ROLE)))
            process.wait_for("Listening for new jobs failed")
            process.wait_for("Listening for new jobs again")
            assert process.stop() == 0
        assert _hides("\n".join(process.lines()))


LISTENING = "SELECT 1 FROM pg_stat_activity WHERE usename = {} AND query LIKE 'LISTEN%'"
TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = {}"


def test_no_repr_and_no_refusal_shows_it(url: URL) -> None:
    text = _text(url)
    cyclone = Cyclone(text, hint_url=text)
    settings = WorkerSettings(listen_url=text)
    shown = [cyclone, settings, Worker(cyclone, settings), Target(url, None, cyclone)]
    assert _hides(repr(shown) + " ".join(map(str, shown)))
    broken = text.replace(quote(PASSWORD, safe=" +"), PASSWORD)
    with pytest.raises(ConfigurationError) as caught:
        Cyclone(hint_url=broken)
    assert _hides(str(caught.value))
