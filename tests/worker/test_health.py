"""Health checks of worker processes, and processes that give way to fresh ones."""

import json
import random
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from cyclone_sqla import State, Worker, WorkerSettings
from cyclone_sqla.cli import main
from cyclone_sqla.errors import ConfigurationError
from cyclone_sqla.schema_version import HEAD, VERSION_TABLE
from cyclone_sqla.worker import health_server, recycling, rhythm
from cyclone_sqla.worker.health import WorkerStatus
from cyclone_sqla.worker.health_server import (
    LOOPBACK,
    Answers,
    HealthServer,
    answers_for,
    answers_of,
)
from cyclone_sqla.worker.recycling import Share, resident_memory
from cyclone_sqla.worker.rhythm import Contact
from tests.databases import Database
from tests.processes import App, eventually
from tests.waiting import wait_until
from tests.worker.site import Gate, Site, nothing


def free_ports(count: int) -> int:
    """The first of so many neighbours that nobody has: none that a client's connection may get,
    since systems give those from above 32,768.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        if all(_is_free(port + n) for n in range(count)):
            return port


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


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
    eventually(lambda: ask(port, "/readyz")[0] == 200, "it is ready", every=0.1)
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


def test_processes_share_a_port_and_are_replaced_when_they_have_done_their_share(app: App) -> None:
    port = free_ports(3)
    options = ("--processes", "2", "--name", "web", "--max-jobs", "1")
    with app.work(*options, "--health-port", str(port)) as process:
        assert wait_ready(port)["workers"].keys() == {"web-1", "web-2"}
        assert [ask(port + n, "/readyz")[0] for n in (1, 2)] == [200, 200]
        app.enqueue("say", text="hello")
        process.wait_for("has done its share; it starts again")
        wait_ready(port)
        assert process.stop() == 0


def test_a_parent_is_well_if_all_its_processes_are() -> None:
    """One that doesn't listen is being started: that is no reason to end them all."""
    port = free_ports(3)
    answers = answers_for({"web-1": port + 1, "web-2": port + 2})
    with serving(port, answers), serving(port + 1, answers_of(lambda: WELL)):
        assert (ask(port, "/livez")[0], ask(port, "/readyz")[0]) == (200, 503)
        with serving(port + 2, answers_of(lambda: replace(WELL, is_reachable=False))):
            assert (ask(port, "/livez")[0], ask(port, "/readyz")[0]) == (200, 503)
        with serving(port + 2, answers_of(lambda: WELL)):
            assert (ask(port, "/livez")[0], ask(port, "/readyz")[0]) == (200, 200)


def test_a_process_that_does_not_answer_makes_its_parent_unwell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_server, "CHILD_PATIENCE", 0.05)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        (live, _) = answers_for({"web-1": silent.getsockname()[1]}).values()
        assert live() == (False, {"live": False, "workers": {"web-1": NO_ANSWER}})


NO_ANSWER = {"error": "no answer: TimeoutError"}

WELL = WorkerStatus(
    is_live=True,
    is_stopping=False,
    loops={"work": True},
    is_reachable=True,
    hears=None,
    revision=HEAD,
)


@contextmanager
def serving(port: int, answers: Answers) -> Iterator[None]:
    with closing(HealthServer(LOOPBACK, port, answers)):
        yield


@pytest.mark.parametrize(
    "change",
    [
        {"is_live": False},
        {"is_stopping": True},
        {"is_reachable": False},
        {"loops": {"work": True, "stage": False}},
        {"loops": {}},
        {"revision": "9999"},
        {"revision": None},
    ],
    ids=str,
)
def test_whatever_keeps_a_worker_from_its_work_makes_it_unready(change: dict[str, Any]) -> None:
    assert replace(WELL, hears=False).is_ready
    assert not replace(WELL, **change).is_ready


def test_tables_of_another_version_are_noticed_while_it_works(sqlite_database: Database) -> None:
    site = Site(sqlite_database)
    site.action(nothing)
    with site.worker(lease=1) as worker:
        assert worker.status().revision == HEAD
        site.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        wait_until(lambda: worker.status().revision == "9999", "it has looked")
        assert not worker.status().is_ready


def test_a_database_that_is_silent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    contact = Contact(1.0)
    assert contact.is_fresh(15.0)
    began = rhythm._now()
    monkeypatch.setattr(rhythm, "_now", lambda: began + 16)
    assert not contact.is_fresh(15.0)
    contact.note()
    assert contact.is_fresh(15.0)


def test_a_port_that_is_taken_is_refused() -> None:
    with closing(socket.create_server((LOOPBACK, 0))) as taken:
        port = taken.getsockname()[1]
        complaint = f"can't answer health checks on 127.0.0.1:{port}: "
        with pytest.raises(ConfigurationError, match=complaint):
            HealthServer(LOOPBACK, port, {})


# ---- recycling -----------------------------------------------------------------------------------


@contextmanager
def spent_worker(database: Database) -> Iterator[tuple[Site, Gate, Worker, "Future[bool]"]]:
    """One that has run its one job, and another one that runs on."""
    site, gate = Site(database), Gate()
    site.action(gate.passing(), kind="hold")
    site.action(nothing)
    slow, quick = site.enqueue("hold"), site.enqueue()
    worker = Worker(site.cyclone, WorkerSettings(poll=0.1, grace=0.0, max_jobs=1))
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(worker.run)
        try:
            site.wait_for(quick, State.COMPLETED)
            wait_until(lambda: worker.is_spent, "it has done its share")
            assert site.job(slow).state == State.RUNNING
            yield site, gate, worker, ended
        finally:
            gate.open()
            worker.ask_to_stop()


def test_a_spent_worker_claims_nothing_more_and_waits_for_its_runs(
    sqlite_database: Database,
) -> None:
    """However long they take, with no grace at all."""
    with spent_worker(sqlite_database) as (site, gate, worker, ended):
        wait_until(lambda: worker.status().is_stopping, "it claims nothing more")
        late = site.enqueue()
        assert not ended.done()
        gate.open()
        assert ended.result(30)
        assert worker.is_spent
        assert site.job(late).attempt == 0
        assert site.states() == {State.COMPLETED: 2, State.AVAILABLE: 1}


def test_whoever_stops_a_spent_worker_has_it_end_within_its_grace(
    sqlite_database: Database,
) -> None:
    with spent_worker(sqlite_database) as (_, _, worker, ended):
        wait_until(lambda: worker.status().is_stopping, "it waits for its runs")
        worker.ask_to_stop()
        assert not ended.result(30)
        assert not worker.is_spent


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


def test_a_process_that_keeps_too_much_memory_gives_way_when_its_runs_have_ended(app: App) -> None:
    held = app.enqueue("hold", name="last")
    with app.work("--max-memory", "400M") as process:
        app.wait_begun("last")
        app.enqueue("keep_memory", mebibytes=1)
        process_memory = psutil.Process(process.pid).memory_info().rss
        assert process_memory < 300 << 20
        app.enqueue("keep_memory", mebibytes=400)
        process.wait_for("has done its share: it uses")
        late = app.enqueue("hold", name="late")
        app.let_go("last")
        assert process.exit_code() == 5
    assert [app.job(job_id).state for job_id in (held, late)] == ["completed", "available"]
