"""Pickup: from the commit to the action, by an idle worker; and what idling costs."""

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone
from cyclone_sqla.settings import DEFAULT_SETTINGS
from tests.benchmarks import by_hand
from tests.benchmarks.book import PAIRS, Book, sized
from tests.benchmarks.place import Place, PostgresPlace, SqlitePlace
from tests.benchmarks.processes import Runner, running

JOBS = sized(200)
WARM_UP = 10
SPACING = 0.02
SETTLING = 2.0
IDLE = 20.0
REPORTED = 15.0
"""Seconds after which a session that does little has told the server's statistics of all it did."""

Put = Callable[[int], None]
"""Enqueues one job and commits."""


def waits_of(runners: Sequence[Runner], put: Put, first: int = 0) -> list[float]:
    """Milliseconds from each acknowledged commit until the job's begin, sorted; what they have seen
    is numbered from ``first``.
    """
    committed: dict[int, float] = {}
    with running(runners):
        time.sleep(SETTLING)
        for number in range(WARM_UP + JOBS):
            put(number)
            committed[number] = time.monotonic()
            time.sleep(SPACING)
        time.sleep(1.0)
        seen = [each for runner in runners for each in runner.end()["seen"]]
    began = {number - first: at for number, at in seen}
    assert began.keys() >= committed.keys()
    return sorted((began[i] - committed[i]) * 1000 for i in committed if i >= WARM_UP)


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the one below which this share lies."""
    return values[min(len(values) - 1, round(share * len(values)))]


class Applications:
    """Those who enqueue: through the library, and by hand."""

    def __init__(self, url: str) -> None:
        self.engine = sa.create_engine(url)
        self._cyclone = Cyclone(self.engine)
        self._keys = count()

        @self._cyclone.action(kind="mark")
        def mark(seq: int) -> None:
            raise NotImplementedError

        self._mark: Any = mark

    def plain(self, number: int) -> None:
        """A job without a sequence."""
        with Session(self.engine) as session, session.begin():
            self._mark.enqueue(session, seq=number)

    def first_of_a_key(self, number: int) -> None:
        """The first job of a sequence that nobody has used before."""
        key = f"idle-{next(self._keys)}"
        with Session(self.engine) as session, session.begin():
            self._mark.using(sequence=key).enqueue(session, seq=number)


def of_ours(place: Place, put: Put) -> list[float]:
    place.empty()
    place.tidy()
    return waits_of([Runner.ours(place, slots=10)], put)


def of_hand(place: PostgresPlace) -> list[float]:
    place.empty()
    place.tidy()
    with by_hand.connect(place.dsn) as connection:
        # Rows get numbers of their own: what is marked is the row, so the first is found out.
        first = place.fill_by_hand(1).last + 1
        place.empty()

        def put(number: int) -> None:
            connection.execute(by_hand.INSERT_AND_TELL, ("{}",))

        return waits_of([Runner.by_hand(place, "marked")], put, first)


@pytest.mark.parametrize("which", ["plain", "first_of_a_key"])
def test_pickup(place: PostgresPlace, book: Book, which: str) -> None:
    applications = Applications(place.url)
    put = getattr(applications, which)
    pairs = [(of_ours(place, put), of_hand(place)) for _ in range(min(PAIRS, 5))]
    name = "a job" if which == "plain" else "the first job of an idle key"
    for share, unit in ((0.5, "p50"), (0.99, "p99")):
        book.write_pairs(
            "pickup",
            f"{name}, from the commit to its action, {unit}",
            place.name,
            [(percentile(own, share), percentile(other, share)) for own, other in pairs],
            beside="psycopg by hand, LISTEN",
            size=JOBS,
            unit="ms",
        )
    applications.engine.dispose()


def test_pickup_on_sqlite(sqlite_place: SqlitePlace, book: Book) -> None:
    applications = Applications(sqlite_place.url)
    rounds = [of_ours(sqlite_place, applications.plain) for _ in range(min(PAIRS, 3))]
    for share, unit in ((0.5, "p50"), (0.99, "p99")):
        values = [percentile(round_, share) for round_ in rounds]
        work = f"a job, from the commit to its action, {unit}"
        book.note("pickup", work, sqlite_place.name, values, unit="ms", size=JOBS)
    applications.engine.dispose()


def test_statements_of_an_idle_worker(place: PostgresPlace, book: Book) -> None:
    transactions = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
    defaults = {"slots": 10, "prune_interval": DEFAULT_SETTINGS.prune_interval}
    with running([Runner.ours(place, **defaults)]):
        time.sleep(sized(round(REPORTED), at_least=2))  # what the beginning cost is counted by then
        before, began = place.run(transactions)[0], time.monotonic()
        time.sleep(sized(round(IDLE), at_least=2))
        rate = (place.run(transactions)[0] - before) / (time.monotonic() - began)
    book.note("pickup", "transactions of an idle worker", place.name, [rate], unit="/s", size=1)
