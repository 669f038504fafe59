"""A worker that is alone on a SQLite file: it keeps others out, and recovers at once."""

import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from cyclone_sqla import ConfigurationError, Context, Cyclone, State, Worker, operations
from cyclone_sqla.operations import Claiming
from cyclone_sqla.worker.instance_lock import InstanceLock
from tests.databases import Database
from tests.processes import App, eventually

STARTED = " started: "
ALONE = "--single-instance"


# ---- who may work on the file ------------------------------------------------------------------


def test_a_second_one_is_refused_with_one_line(app: App) -> None:
    with app.work(ALONE) as first:
        first.wait_for(STARTED)
        with app.work(ALONE) as second:
            assert second.exit_code() == 2
            (line,) = second.lines()
        assert line.startswith("Error: single_instance: another worker is at work on /")
        assert first.stop() == 0


def test_a_worker_among_others_is_refused_beside_one_that_is_alone(app: App) -> None:
    with app.work(ALONE) as first:
        first.wait_for(STARTED)
        with app.work() as second:
            assert second.exit_code() == 2
            (line,) = second.lines()
        assert line.startswith("Error: a worker with single_instance is at work on /")


def test_it_does_not_take_the_jobs_of_a_worker_that_lives(app: App) -> None:
    held = app.enqueue("hold", name="mine")
    with app.work() as first:
        app.wait_begun("mine")
        with app.work(ALONE) as second:
            assert second.exit_code() == 2
        assert app.job(held).state == State.RUNNING
        app.let_go("mine")
        assert first.stop() == 0
    assert (app.job(held).state, app.job(held).attempt) == (State.COMPLETED, 1)


def test_any_number_may_work_together(app: App) -> None:
    with app.work() as first, app.work() as second:
        first.wait_for(STARTED)
        second.wait_for(STARTED)


def test_the_place_is_free_again_when_it_has_stopped(app: App) -> None:
    for _ in range(2):
        with app.work(ALONE) as process:
            process.wait_for(STARTED)
            assert process.stop() == 0


def test_a_server_has_no_single_instance(tmp_path: Path, postgresql_database: Database) -> None:
    with App(tmp_path, postgresql_database).work(ALONE) as process:
        assert process.exit_code() == 2
        (line,) = process.lines()
    assert line.startswith("Error: single_instance is for a SQLite file: ")


FORKED = """
import os, sys, time
from pathlib import Path
from cyclone_sqla.worker.instance_lock import InstanceLock

lock = InstanceLock(Path(sys.argv[1]), alone=True)
lock.acquire()
if os.fork() == 0:
    print("forked", os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""


def test_a_process_that_an_action_forked_does_not_hold_the_place(app: App, tmp_path: Path) -> None:
    lock = InstanceLock(tmp_path / "shop.db", alone=True)
    with app.run(sys.executable, "-c", FORKED, str(tmp_path / "shop.db")) as process:
        process.wait_for("forked")
        with pytest.raises(ConfigurationError):
            lock.acquire()
        process.send(signal.SIGKILL)
        process.exit_code()
        lock.acquire()
        lock.release()


def test_a_place_that_can_not_be_locked_is_named(tmp_path: Path) -> None:
    lock = InstanceLock(tmp_path / "nowhere" / "shop.db", alone=False)
    with pytest.raises(
        ConfigurationError, match=r"shop\.db\.cyclone-lock can't be locked: No such"
    ):
        lock.acquire()


# ---- what a crashed one left behind ------------------------------------------------------------


def test_what_a_killed_worker_held_runs_again_at_once(app: App) -> None:
    held = app.enqueue("hold", name="again")
    last = app.enqueue("hold", name="last", max_attempts=1)
    with app.work(ALONE, "--lease", "3600") as first:
        app.wait_begun("again")
        app.wait_begun("last")
        first.send(signal.SIGKILL)
        first.exit_code()
    with app.work(ALONE, "--lease", "3600") as second:
        app.wait_begun("again", attempt=2)
        second.wait_for("recovered jobs that a crashed worker held: now 1 available, 1 discarded")
        app.let_go("again")
        eventually(lambda: app.job(held).is_terminal, "the job has ended")
        assert second.stop() == 0
    assert (app.job(held).state, app.job(held).attempt) == (State.COMPLETED, 2)
    assert app.history(held) == ["rescue"]
    assert (app.job(last).state, app.job(last).attempt) == (State.DISCARDED, 1)
    assert app.job(last).dead_letter


def test_a_worker_among_others_waits_for_the_leases(app: App) -> None:
    held = app.enqueue("hold", name="held")
    with app.work("--lease", "3600") as first:
        app.wait_begun("held")
        first.send(signal.SIGKILL)
        first.exit_code()
    with app.work("--rescue-interval", "0.01") as second:
        other = app.enqueue("say", text="hello")
        eventually(lambda: app.job(other).is_terminal, "it works")
        assert second.stop() == 0
    assert app.job(held).state == State.RUNNING


# ---- inside an application ---------------------------------------------------------------------


@pytest.fixture
def cyclone(sqlite_database: Database) -> Cyclone:
    """An application with one action, whose queue the workers here don't serve."""
    cyclone = Cyclone(sqlite_database.url, hints=False)

    @cyclone.action
    def work(ctx: Context) -> None:
        """Nobody runs it."""

    return cyclone


def _abandon(cyclone: Cyclone, database: Database, count: int) -> list[int]:
    """Jobs that run by the database's account, though their worker is gone; their ids."""
    engine = database.engine()
    with engine.begin() as connection:
        ids = [cyclone.enqueue(connection, "work", {}).id for _ in range(count)]
    dialect = cyclone.dialect("sqlite")
    wanted = Claiming({"default": count}, ["work"], "gone", timedelta(hours=1))
    with engine.begin() as connection:
        claimed = operations.claim(connection, dialect, wanted)
    assert [job.id for job in claimed] == ids
    return ids


def test_a_worker_inside_an_application_recovers_every_batch_before_it_claims(
    cyclone: Cyclone, sqlite_database: Database
) -> None:
    ids = _abandon(cyclone, sqlite_database, 5)
    with (
        Worker(cyclone, single_instance=True, rescue_limit=2, queues={"other": 1}),
        sqlite_database.engine().connect() as connection,
    ):
        jobs = [cyclone.get(connection, job_id) for job_id in ids]
    assert {(job.state, job.attempt) for job in jobs} == {(State.AVAILABLE, 1)}


def test_only_one_worker_of_a_process_can_be_alone(cyclone: Cyclone) -> None:
    with Worker(cyclone, single_instance=True):
        with pytest.raises(ConfigurationError, match="another worker is at work"):
            Worker(cyclone, single_instance=True).start()
        with pytest.raises(ConfigurationError, match="a worker with single_instance is at work"):
            Worker(cyclone).start()
    with Worker(cyclone, single_instance=True) as next_one:
        assert next_one.is_healthy


def test_a_refused_worker_can_be_started_when_the_place_is_free(cyclone: Cyclone) -> None:
    waiting = Worker(cyclone, single_instance=True)
    with Worker(cyclone), pytest.raises(ConfigurationError):
        waiting.start()
    with waiting:
        assert waiting.is_healthy
