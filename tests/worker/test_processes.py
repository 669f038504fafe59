"""Several worker processes under one parent: they live and end together."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from cyclone_sqla import State
from tests.databases import Database
from tests.processes import App, Process, eventually

TWO = ("--processes", "2", "--name", "web")


def _wait_for_both(app: App) -> dict[str, int]:
    eventually(lambda: len(app.workers()) == 2, "both workers run")
    return app.workers()


def _wait_for_successor(app: App, name: str, before: dict[str, int]) -> None:
    known = {None, before[name]}
    eventually(lambda: app.workers().get(name) not in known, f"{name} is started again")


def _wait_gone(pids: set[int]) -> None:
    eventually(lambda: not any(_lives(pid) for pid in pids), f"{pids} are gone")


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- while they live ---------------------------------------------------------------------------


def test_every_process_has_a_name_of_its_own_and_both_work(app: App) -> None:
    with app.work(*TWO, "--concurrency", "1") as process:
        workers = _wait_for_both(app)
        assert workers.keys() == {"web-1", "web-2"}
        assert set(workers.values()) == {child.pid for child in process.children()}
        held = [app.enqueue("hold", name=name) for name in ("a", "b")]
        app.wait_begun("a")
        app.wait_begun("b")
        for name in ("a", "b"):
            app.let_go(name)
        assert process.stop() == 0
    assert {app.job(job_id).state for job_id in held} == {State.COMPLETED}
    assert len({app.job(job_id).worker for job_id in held}) == 2


def test_names_are_those_of_the_parent_where_none_is_given(app: App) -> None:
    with app.work("--processes", "2") as process:
        assert {name.split(":")[1] for name in _wait_for_both(app)} == {
            f"{process.pid}-1",
            f"{process.pid}-2",
        }


def test_the_parent_loads_no_application(app: App) -> None:
    with app.work(*TWO):
        workers = _wait_for_both(app)
        assert app.importers() == set(workers.values())


def test_a_process_that_crashes_is_started_again_under_its_name(app: App) -> None:
    with app.work(*TWO) as process:
        before = _wait_for_both(app)
        os.kill(before["web-1"], signal.SIGKILL)
        _wait_for_successor(app, "web-1", before)
        process.wait_for("worker process 1 was ended by SIGKILL; it starts again in ")
        assert app.workers()["web-2"] == before["web-2"]
        assert process.stop() == 0


def test_a_process_that_was_stopped_by_somebody_is_started_again(app: App) -> None:
    with app.work(*TWO) as process:
        before = _wait_for_both(app)
        os.kill(before["web-2"], signal.SIGTERM)
        process.wait_for("worker process 2 ended with exit code 0; it starts again in ")
        _wait_for_successor(app, "web-2", before)
        assert process.stop() == 0


CRASHING = """
import sys
from datetime import timedelta
from cyclone_sqla.worker import processes

class Policy:
    def delay(self, attempt):
        print("crash", attempt, flush=True)
        return timedelta(0)

def command(number, pipe):
    return [sys.executable, "-c", "raise SystemExit(1)"]

processes.STEADY_AFTER = {steady_after}
processes.Processes(command, 1, fatal=(), patience=5, backoff=Policy()).run()
"""


def test_each_crash_in_a_row_waits_longer(app: App) -> None:
    with app.run(sys.executable, "-c", CRASHING.format(steady_after=600)) as process:
        process.wait_for("crash", count=4)
        assert _crashes(process) == ["crash 1", "crash 2", "crash 3", "crash 4"]


def test_a_process_that_lived_for_a_while_begins_anew(app: App) -> None:
    with app.run(sys.executable, "-c", CRASHING.format(steady_after=0)) as process:
        process.wait_for("crash", count=4)
        assert _crashes(process) == ["crash 1"] * 4


def _crashes(process: Process) -> list[str]:
    return [line for line in process.lines() if line.startswith("crash")][:4]


SHORT_LIVED = """
from datetime import timedelta
from cyclone_sqla.backoff import Constant
from cyclone_sqla.worker.processes import Processes

command = lambda number, pipe: ["sh", "-c", "exit 1"]
Processes(command, 8, fatal=(), patience=5, backoff=Constant(timedelta(hours=1))).run()
"""


def test_processes_that_end_before_all_are_started_are_noticed(app: App) -> None:
    with app.run(sys.executable, "-c", SHORT_LIVED) as process:
        for number in range(1, 9):
            process.wait_for(f"worker process {number} ended with exit code 1; it starts again")


def test_what_no_restart_can_mend_ends_them_all(app: App) -> None:
    with app.work(*TWO, "--app", "jobs:nothing") as process:
        assert process.exit_code() == 2
        assert not any("starts again" in line for line in process.lines())


def test_missing_tables_on_a_server_end_them_all(
    tmp_path: Path, empty_postgresql: Database
) -> None:
    with App(tmp_path, empty_postgresql).work(*TWO) as process:
        assert process.exit_code() == 3
        assert any("run: cyclone-sqla migrate" in line for line in process.lines())
        assert not any("starts again" in line for line in process.lines())


def test_missing_tables_in_a_file_are_created_by_whoever_comes_first(
    tmp_path: Path, empty_sqlite: Database
) -> None:
    app = App(tmp_path, empty_sqlite)
    with app.work(*TWO) as process:
        process.wait_for(" started: ", count=2)
        assert not any("starts again" in line for line in process.lines())
        assert process.stop() == 0


# ---- their end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sent_to_all", [False, True], ids=["to-the-parent", "to-all"])
def test_a_signal_lets_the_runs_of_all_end(app: App, is_sent_to_all: bool) -> None:
    """A terminal and a service manager signal every process, which counts as once."""
    held = [app.enqueue("hold", name=name) for name in ("a", "b")]
    with app.work(*TWO, "--concurrency", "1") as process:
        app.wait_begun("a")
        app.wait_begun("b")
        (process.send_all if is_sent_to_all else process.send)(signal.SIGTERM)
        process.wait_for(" stops: ", count=2)
        for name in ("a", "b"):
            app.let_go(name)
        assert process.exit_code() == 0
    assert {app.job(job_id).state for job_id in held} == {State.COMPLETED}
    assert app.workers() == {}


def test_a_second_signal_kills_them(app: App) -> None:
    app.enqueue("hold", name="endless")
    with app.work(*TWO, "--grace", "3600") as process:
        app.wait_begun("endless")
        pids = {child.pid for child in process.children()}
        process.send(signal.SIGTERM)
        process.wait_for(" stops: ")
        process.send(signal.SIGTERM)
        assert process.exit_code() == 130
        _wait_gone(pids)


def test_the_exit_code_is_that_of_the_process_that_ended_worst(app: App) -> None:
    app.enqueue("hold", name="endless")
    with app.work(*TWO, "--grace", "0") as process:
        app.wait_begun("endless")
        _wait_for_both(app)
        assert process.stop() == 4


def test_when_the_parent_is_killed_the_runs_of_its_children_end_and_they_go(app: App) -> None:
    held = app.enqueue("hold", name="last")
    with app.work(*TWO) as process:
        app.wait_begun("last")
        pids = set(_wait_for_both(app).values())
        process.send(signal.SIGKILL)
        process.wait_for(" stops: ", count=2)
        app.let_go("last")
        _wait_gone(pids)
    assert app.job(held).state == State.COMPLETED


def test_children_that_would_not_end_are_killed(app: App) -> None:
    with app.run(sys.executable, "-c", DEAF) as process:
        process.wait_for("deaf")
        (child,) = process.children()
        assert process.stop() == 128 + signal.SIGKILL
        _wait_gone({child.pid})


DEAF = """
import sys
from cyclone_sqla.worker.processes import Processes

def command(number, pipe):
    return [sys.executable, "-c", "import time; print('deaf', flush=True); time.sleep(600)"]

raise SystemExit(Processes(command, 1, fatal=(), patience=0.2).run())
"""


def test_a_parent_that_is_stopped_while_a_process_is_down_ends_too(app: App) -> None:
    with app.run(sys.executable, "-c", DOWN) as process:
        process.wait_for("down")
        eventually(lambda: not process.children(), "the process is down")
        assert process.stop() == 1


DOWN = """
import sys
from datetime import timedelta
from cyclone_sqla.backoff import Constant
from cyclone_sqla.worker.processes import Processes

def command(number, pipe):
    return [sys.executable, "-c", "print('down', flush=True); raise SystemExit(1)"]

processes = Processes(command, 1, fatal=(), patience=5, backoff=Constant(timedelta(hours=1)))
raise SystemExit(processes.run())
"""
