"""Health checks of worker processes, and processes that give way to fresh ones."""

import json
import signal
import socket
import sys
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cyclone_sqla import State
from cyclone_sqla.cli import main
from cyclone_sqla.schema_version import VERSION_TABLE
from cyclone_sqla.worker import recycling
from cyclone_sqla.worker.recycling import Share, resident_memory
from tests.databases import Database
from tests.processes import App, eventually


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CYCLONE_DATABASE_URL", raising=False)


@pytest.fixture
def app(tmp_path: Path, sqlite_database: Database) -> App:
    return App(tmp_path, sqlite_database)


def free_ports(count: int) -> int:
    """The first of so many neighbours that nobody listens on."""
    while True:
        with closing(socket.create_server(("127.0.0.1", 0))) as first:
            port: int = first.getsockname()[1]
        if all(_is_free(port + n) for n in range(count)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as other:
        return port < 65536 and other.connect_ex(("127.0.0.1", port)) != 0


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    """The status and the document; 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as exc:
        return exc.code, json.load(exc)
    except urllib.error.URLError:
        return 0, {}


def wait_ready(port: int) -> dict[str, Any]:
    eventually(lambda: ask(port, "/readyz")[0] == 200, "it is ready")
    return ask(port, "/readyz")[1]


# ---- health --------------------------------------------------------------------------------------


def test_a_process_says_how_it_is_until_it_ends(app: App) -> None:
    port = free_ports(1)
    app.enqueue("hold", name="last")
    with app.work("--health-port", str(port)) as process:
        ready = wait_ready(port)
        assert (ready["database"], ready["schema_version"]) == (True, "0001")
        assert set(ready["loops"].values()) == {True}
        assert ask(port, "/livez") == (200, {"live": True})
        assert ask(port, "/")[0] == 404
        app.wait_begun("last")
        process.send(signal.SIGTERM)
        eventually(lambda: ask(port, "/readyz")[0] == 503, "a stopping worker is not ready")
        assert ask(port, "/readyz")[1]["stopping"]
        assert ask(port, "/livez")[0] == 200
        app.let_go("last")
        assert process.exit_code() == 0
    assert not app.loaded() & {"alembic", "rich"}


def test_the_parent_answers_for_all_its_processes(app: App) -> None:
    port = free_ports(3)
    with app.work("--processes", "2", "--name", "web", "--health-port", str(port)) as process:
        assert wait_ready(port)["workers"].keys() == {"web-1", "web-2"}
        assert ask(port + 2, "/readyz")[0] == 200
        hung = process.children()[0]
        hung.suspend()
        assert ask(port, "/livez")[0] == 503
        hung.resume()
        assert ask(port, "/livez")[0] == 200
        hung.kill()
        eventually(lambda: ask(port, "/readyz")[0] == 503, "one is not ready")
        assert ask(port, "/livez")[0] == 200
        wait_ready(port)
        assert process.stop() == 0


def test_a_port_that_is_taken_is_wrong_use(app: App) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with app.work("--health-port", str(port)) as process:
            assert process.exit_code() == 2
            (line,) = process.lines()
    assert line.startswith(f"Error: can't answer health checks on 127.0.0.1:{port}: ")


# ---- recycling -----------------------------------------------------------------------------------


def test_a_single_process_ends_after_so_many_runs_when_all_have_ended(app: App) -> None:
    held = app.enqueue("hold", name="slow")
    done = app.enqueue("say", text="hello")
    with app.work("--max-jobs", "1", "--grace", "0") as process:
        process.wait_for("has done its share: 1 runs have ended")
        late = app.enqueue("say", text="late")
        app.let_go("slow")
        assert process.exit_code() == 5
    states = [app.job(each).state for each in (held, done, late)]
    assert states == [State.COMPLETED, State.COMPLETED, State.AVAILABLE]


def test_a_signal_ends_the_wait_of_a_spent_process(app: App) -> None:
    app.enqueue("hold_async", name="endless")
    app.enqueue("say", text="hello")
    with app.work("--max-jobs", "1", "--grace", "0.1") as process:
        process.wait_for("has done its share")
        assert process.stop() == 0


def test_a_spent_child_is_started_again_at_once(app: App) -> None:
    """Though a crashed one would wait for an hour."""
    with app.run(sys.executable, "-c", SPENT) as process:
        process.wait_for("has done its share; it starts again", count=3)
        assert process.stop() == 0


SPENT = """
from datetime import timedelta
from cyclone_sqla.backoff import Constant
from cyclone_sqla.cli import logs
from cyclone_sqla.worker.processes import Processes

logs.set_up("text", "info", "")
command = lambda number, pipe: ["sh", "-c", "sleep 0.1; exit 5"]
hour = Constant(timedelta(hours=1))
raise SystemExit(Processes(command, 1, fatal=(), patience=5, renewed=5, backoff=hour).run())
"""


def test_memory_is_looked_at_when_a_run_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 20 < resident_memory() < 1 << 40
    said: list[str] = []
    share = Share(None, 100 << 20, said.append)
    for used in (50, 101, 102):
        monkeypatch.setattr(recycling, "resident_memory", lambda used=used: used << 20)
        share.note_end()
    assert said == ["it uses 101 MiB of memory"]


@pytest.mark.parametrize("size", ["0", "many", "5T", "-1M"])
def test_what_is_no_size_is_refused(size: str) -> None:
    result = CliRunner().invoke(main, ["work", "--app", "jobs:cyclone", "--max-memory", size])
    assert (result.exit_code, "is no size of memory" in result.stderr) == (2, True)


def test_tables_of_another_version_make_it_unready(app: App) -> None:
    port = free_ports(1)
    with app.work("--health-port", str(port), "--lease", "1") as process:
        wait_ready(port)
        with app.database.engine().begin() as connection:
            connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        eventually(lambda: ask(port, "/readyz")[0] == 503, "it is not ready")
        assert ask(port, "/readyz")[1]["schema_version"] == "9999"
        assert process.stop() == 0
