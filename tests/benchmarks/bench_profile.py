"""Where the time goes: what the other benchmarks measure as a whole, step by step."""

import sqlite3
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.benchmarks.bench_enqueue import MANY, ONE_BY_ONE, Producer, safely
from tests.benchmarks.bench_pickup import JOBS, SETTLING, SPACING, WARM_UP, Applications
from tests.benchmarks.bench_sequences import ONE_KEY
from tests.benchmarks.book import PAIRS, Book, sized
from tests.benchmarks.place import Place, PostgresPlace, SqlitePlace
from tests.benchmarks.processes import Runner, drain, running
from tests.benchmarks.trail import Trail, steps_after, steps_in_turn

ROUNDS = min(PAIRS, 3)
WRITING = sized(1_000)

Steps = Mapping[str, float]
"""How long each took, of one round."""


class Profile:
    """Writes the steps of one work into the book."""

    def __init__(self, book: Book, place: Place, work: str, size: int) -> None:
        self._book = book
        self._place = place
        self._work = work
        self._size = size

    def write(self, measure: Callable[[], Steps], unit: str = "us") -> None:
        """Measure some rounds of all steps, in seconds."""
        rounds = [measure() for _ in range(ROUNDS)]
        factor = {"us": 1e6, "us/job": 1e6, "ms": 1e3}[unit]
        for step in rounds[0]:
            values = [round_[step] * factor for round_ in rounds]
            work = f"{self._work}: {step}"
            self._book.note("profile", work, self._place.name, values, unit=unit, size=self._size)


# ---- one job a transaction -----------------------------------------------------------------------


class Inside:
    """Seconds that this thread has spent inside some calls: into a driver, which waits there for
    the database, say.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = threading.current_thread()

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def timing(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                if threading.current_thread() is self._thread:
                    self.seconds += time.perf_counter() - began

        return timing


@contextmanager
def psycopg_is_timed(spent: Inside) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", spent.timed(psycopg.Cursor.execute))
        patch.setattr(psycopg.Connection, "commit", spent.timed(psycopg.Connection.commit))
        yield {}


@contextmanager
def sqlite_is_timed(spent: Inside) -> Iterator[dict[str, Any]]:
    class TimedCursor(sqlite3.Cursor):
        execute = spent.timed(sqlite3.Cursor.execute)

    class TimedConnection(sqlite3.Connection):
        commit = spent.timed(sqlite3.Connection.commit)

        def cursor(self, factory: Any = TimedCursor) -> Any:
            return super().cursor(factory)

    yield {"connect_args": {"factory": TimedConnection}}


@pytest.mark.parametrize(
    ("database", "door", "name"),
    [
        ("place", "in_connections", "Connection"),
        ("place", "in_sessions", "Session"),
        ("sqlite_place", "in_sessions", "Session"),
    ],
)
def test_one_a_transaction(
    request: pytest.FixtureRequest, book: Book, database: str, door: str, name: str
) -> None:
    place: Place = request.getfixturevalue(database)
    spent = Inside()
    is_timed = psycopg_is_timed if isinstance(place, PostgresPlace) else sqlite_is_timed
    producer = Producer(place.url)
    through = getattr(producer, door)

    def seconds(enqueue: Callable[[Any], Any]) -> tuple[float, float]:
        through(enqueue, 20)
        spent.seconds, began = 0.0, time.perf_counter()
        through(enqueue, ONE_BY_ONE)
        return (time.perf_counter() - began) / ONE_BY_ONE, spent.seconds / ONE_BY_ONE

    def measure() -> Steps:
        own, own_driver = seconds(producer.plain)
        others, others_driver = seconds(producer.by_insert)
        door_itself = others - others_driver
        return {
            "in the driver, waiting for the database": own_driver,
            f"SQLAlchemy's {name}": door_itself,
            "this library": own - own_driver - door_itself,
        }

    with is_timed(spent) as options:
        producer.engine.dispose()
        producer.engine = sa.create_engine(place.url, **options)
        if isinstance(place, SqlitePlace):
            sa.event.listen(producer.engine, "connect", safely)
        Profile(book, place, f"one a transaction, {name}", ONE_BY_ONE).write(measure)
    producer.engine.dispose()


# ---- many at once --------------------------------------------------------------------------------


def test_many_in_a_session(
    place: PostgresPlace, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, copying = Producer(place.url), Inside()
    dialect = producer.cyclone.dialect("postgresql")
    monkeypatch.setattr(dialect, "copy_plain", copying.timed(dialect.copy_plain))

    def measure() -> Steps:
        place.empty()
        place.tidy()
        with Session(producer.engine) as session:
            session.connection()
            copying.seconds, began = 0.0, time.perf_counter()
            jobs = [producer.work.job(seq=i) for i in range(MANY)]
            made = time.perf_counter()
            producer.cyclone.enqueue_many(session, jobs)
            enqueued = time.perf_counter()
            session.commit()
            ended = time.perf_counter()
        return {
            "made and checked": (made - began) / MANY,
            "copied, and answered for": copying.seconds / MANY,
            "the rest of enqueue_many()": (enqueued - made - copying.seconds) / MANY,
            "COMMIT": (ended - enqueued) / MANY,
        }

    Profile(book, place, f"{MANY:,} in a Session", MANY).write(measure, unit="us/job")
    producer.engine.dispose()


# ---- a pickup ------------------------------------------------------------------------------------

PICKUP = {
    "sent": "until the hint leaves",
    "heard": "until the worker's listener hears of it",
    "awake": "until the work loop is awake",
    "asked": "until it asks for jobs",
    "answered": "until the claim is answered, which is a flush of the log",
    "begun": "until the action begins, in the event loop",
}


def test_pickup(place: PostgresPlace, book: Book) -> None:
    applications, trail = Applications(place.url), Trail()
    trail.watch_sender()

    def measure() -> Steps:
        place.empty()
        place.tidy()
        commits: list[float] = []
        with running([runner := Runner.ours(place, slots=10, trail=True)]):
            time.sleep(SETTLING)
            for number in range(WARM_UP + JOBS):
                applications.plain(number)
                commits.append(time.monotonic())
                time.sleep(SPACING)
            stamps = runner.end()["stamps"] + trail.stamps
        took = steps_after(stamps, commits[WARM_UP:], list(PICKUP))
        return {PICKUP[step]: statistics.median(seconds) for step, seconds in took.items()}

    Profile(book, place, "a pickup", JOBS).write(measure, unit="ms")
    applications.engine.dispose()


# ---- a turn after the other ----------------------------------------------------------------------

TRANSACTIONAL = {
    "answered": "the claim, a transaction of its own",
    "begun": "until the action begins, in a thread",
    "done": "the action: a Session, BEGIN and INSERT",
    "written": "the end of the run",
    "committed": "COMMIT",
    "asked": "until the next claim",
}

ONE_BY_ONE_OF_A_KEY = {
    "answered": "the turn: one ends and the next is claimed",
    "begun": "until the action begins, in the same thread",
    "done": "the action",
    "asked": "until the next turn",
}


@pytest.mark.parametrize("which", ["transactional", "one key"])
def test_one_after_the_other(place: PostgresPlace, book: Book, which: str) -> None:
    is_writing = which == "transactional"
    work = "ctx.session, one slot" if is_writing else "one key in order"
    steps, count = (TRANSACTIONAL, WRITING) if is_writing else (ONE_BY_ONE_OF_A_KEY, ONE_KEY)

    def measure() -> Steps:
        place.empty()
        fill = place.fill(count, "write") if is_writing else place.fill_lines(count, 1)
        place.tidy()
        told = drain(place, fill, [Runner.ours(place, slots=1, trail=True)]).told
        took = steps_in_turn([stamp for stamp in told[0]["stamps"] if stamp[0] in steps])
        return {steps[step]: statistics.median(took[step]) for step in steps}

    def whole_by_hand(loop: str) -> float:
        place.empty()
        fill = place.fill_by_hand(count)
        place.tidy()
        return 1 / drain(place, fill, [Runner.by_hand(place, loop)]).rate

    Profile(book, place, work, count).write(measure)
    loops = {"one": "psycopg by hand"}
    if is_writing:
        loops = {"transactional": "psycopg by hand", "sessions": "Sessions by hand"}
    whole = {f"all of it, {name}": loop for loop, name in loops.items()}
    Profile(book, place, work, count).write(
        lambda: {name: whole_by_hand(loop) for name, loop in whole.items()}
    )
