"""Stopping a worker inside a process: nothing is left hanging, whatever it was doing."""

import logging
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from cyclone_sqla import Context, Cyclone, State, Worker
from tests.databases import Database
from tests.waiting import wait_until


class Shop:
    """An application with one action that waits to be let go."""

    def __init__(self, database: Database) -> None:
        self.engine = database.engine()
        self.cyclone = Cyclone(self.engine, hints=False)
        self.began = threading.Event()
        self.may_end = threading.Event()

        @self.cyclone.action
        def hold(ctx: Context) -> None:
            self.began.set()
            assert self.may_end.wait(60)

        self._hold = hold

    def enqueue(self) -> int:
        with self.engine.begin() as connection:
            return self._hold.enqueue(connection).id

    def fate(self, job_id: int) -> tuple[str, int]:
        """The job's state and attempt."""
        with self.engine.connect() as connection:
            job = self.cyclone.get(connection, job_id)
        return job.state, job.attempt


@pytest.fixture
def shop(database: Database) -> Shop:
    """The application on a fresh database, once of each kind."""
    return Shop(database)


@pytest.fixture
def file_shop(sqlite_database: Database) -> Shop:
    """The application on SQLite."""
    return Shop(sqlite_database)


def test_what_a_claim_under_way_takes_is_given_back(file_shop: Shop) -> None:
    """The claim waits at its door while the worker is told to stop, and then succeeds."""
    job_id = file_shop.enqueue()
    engine = file_shop.cyclone.dialect("sqlite").worker_engine(file_shop.engine)
    knocks, door = _door_before_the_first_claim(engine)
    worker = Worker(file_shop.cyclone, engine=engine)
    worker.start()
    parts = worker._parts
    assert parts is not None
    assert knocks.wait(60)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    wait_until(lambda: parts.executor._stopping, "the worker stops")
    # A stop that didn't wait for the claim would tell the loop to end within this second.
    assert not parts.loops[0]._stopping.wait(1)
    door.set()
    stopping.join(60)
    assert not stopping.is_alive()
    engine.dispose()
    assert file_shop.fate(job_id) == (State.AVAILABLE, 0)
    assert not file_shop.began.is_set()


def _door_before_the_first_claim(engine: sa.Engine) -> tuple[threading.Event, threading.Event]:
    """Set when the work loop is about to take the write lock, and what it then waits for."""
    knocks, door = threading.Event(), threading.Event()

    @event.listens_for(engine, "begin", insert=True)
    def wait(connection: sa.Connection) -> None:
        is_write = connection.get_execution_options().get("cyclone_begin") == "IMMEDIATE"
        if is_write and threading.current_thread().name == "cyclone-work":
            knocks.set()
            assert door.wait(60)

    return knocks, door


def test_a_thread_that_asks_ends_the_run(shop: Shop) -> None:
    worker = Worker(shop.cyclone)
    ended: list[bool] = []
    running = threading.Thread(target=lambda: ended.append(worker.run()))
    running.start()
    wait_until(lambda: worker.is_healthy, "it works")
    worker.ask_to_stop()
    running.join(60)
    assert ended == [True]


def test_a_worker_that_was_asked_before_it_started_stops_at_once(shop: Shop) -> None:
    worker = Worker(shop.cyclone)
    worker.ask_to_stop()
    assert worker.run()


@pytest.fixture
def _ctrl_c_interrupts() -> Iterator[None]:
    """Also where these tests run in the background of a shell, which has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_interrupts")
def test_ctrl_c_stops_the_worker_before_it_reaches_the_program(file_shop: Shop) -> None:
    job_id = file_shop.enqueue()
    worker = Worker(file_shop.cyclone)

    def press() -> None:
        assert file_shop.began.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        file_shop.may_end.set()

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        worker.run()
    assert file_shop.fate(job_id) == (State.COMPLETED, 1)
    assert not worker.is_healthy


class _Interrupting(logging.Handler):
    """Presses Ctrl-C when the worker says that it has started, which is before its loops have."""

    def emit(self, record: logging.LogRecord) -> None:
        if " started: " in record.getMessage():
            raise KeyboardInterrupt


def test_ctrl_c_during_the_start_leaves_nothing_behind(file_shop: Shop) -> None:
    logger, handler = logging.getLogger("cyclone_sqla.worker"), _Interrupting()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    worker = Worker(file_shop.cyclone, single_instance=True)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.run()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert not worker.is_healthy
    with Worker(file_shop.cyclone, single_instance=True) as successor:
        assert successor.is_healthy


def test_a_second_stop_has_nothing_to_do(shop: Shop) -> None:
    worker = Worker(shop.cyclone)
    worker.start()
    assert worker.stop()
    assert worker.stop()


def test_a_stop_of_a_worker_that_never_started_has_nothing_to_do(shop: Shop) -> None:
    assert Worker(shop.cyclone).stop()
