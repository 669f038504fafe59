"""The steps of a worker one by one, on the connection that its loop would hold."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest
import sqlalchemy as sa

from cyclone_sqla import Cyclone, operations
from cyclone_sqla.admission import admit
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.dialects import Dialect, WorkerConnection
from cyclone_sqla.operations import Claiming, Settlement
from cyclone_sqla.outcomes import Completed
from cyclone_sqla.settings import DEFAULT_SETTINGS
from tests.benchmarks import by_hand
from tests.benchmarks.book import Book, sized
from tests.benchmarks.place import Place, PostgresPlace

COUNT = sized(40_000)
FEW = sized(2_000)
WINDOW = 500

BATCHES = pytest.mark.parametrize(("batch", "count"), [(500, COUNT), (1, FEW)])


class Hand:
    """A worker's connection, and its verbs."""

    def __init__(self, place: Place) -> None:
        self.engine = sa.create_engine(place.url)
        self._dialect: Dialect = Cyclone().dialect(place.name)
        self._held: WorkerConnection = self._dialect.hold(self.engine, DEFAULT_SETTINGS)

    def claim(self, count: int) -> list[ClaimedJob]:
        """Up to so many."""
        wanted = Claiming({"default": count}, ["tick"], "bench", timedelta(minutes=5))
        with self._held.step() as connection:
            return operations.claim(connection, self._dialect, wanted)

    def settle(self, jobs: Sequence[ClaimedJob]) -> None:
        """All of them completed."""
        ends = [
            Settlement(job.id, job.lease, 1, "bench", Completed(None), job.sequence_key)
            for job in jobs
        ]
        with self._held.step() as connection:
            settled = operations.settle(connection, self._dialect, ends, history_limit=25)
        assert len(settled.states) == len(jobs)

    def admit(self, after: int) -> int:
        """A window of incoming jobs; where it ended."""
        with self._held.step() as connection:
            return admit(connection, self._dialect, after, WINDOW).last_id

    def close(self) -> None:
        """Disconnect."""
        self._held.close()
        self.engine.dispose()


@contextmanager
def hand_on(place: Place) -> Iterator[Hand]:
    hand = Hand(place)
    try:
        yield hand
    finally:
        hand.close()


def per_job(count: int, work: Callable[[], object]) -> float:
    """Microseconds of each job."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / count * 1e6


def times(count: int, batch: int) -> range:
    """Once for each batch."""
    return range(-(-count // batch))


def claim_by_hand(connection: psycopg.Connection, batch: int) -> list[int]:
    return [row[0] for row in connection.execute(by_hand.CLAIM, (batch,)).fetchall()]


@BATCHES
def test_claim(place: PostgresPlace, book: Book, batch: int, count: int) -> None:
    def ours() -> float:
        place.empty()
        place.fill(count)
        place.tidy()
        with hand_on(place) as hand:
            return per_job(count, lambda: [hand.claim(batch) for _ in times(count, batch)])

    def reference() -> float:
        place.empty()
        place.fill_by_hand(count)
        place.tidy()
        with by_hand.connect(place.dsn) as connection:
            claims = times(count, batch)
            return per_job(count, lambda: [claim_by_hand(connection, batch) for _ in claims])

    book.compare(
        "steps",
        f"claim, {batch} at a time",
        place.name,
        ours=ours,
        reference=reference,
        beside="psycopg by hand",
        size=count,
        unit="us/job",
    )


@BATCHES
def test_settle(place: PostgresPlace, book: Book, batch: int, count: int) -> None:
    def ours() -> float:
        place.empty()
        place.fill(count)
        with hand_on(place) as hand:
            batches = [hand.claim(batch) for _ in times(count, batch)]
            place.tidy()
            return per_job(count, lambda: [hand.settle(jobs) for jobs in batches])

    def reference() -> float:
        place.empty()
        place.fill_by_hand(count)
        with by_hand.connect(place.dsn) as connection:
            batches = [claim_by_hand(connection, batch) for _ in times(count, batch)]
            place.tidy()
            done = by_hand.DONE
            return per_job(count, lambda: [connection.execute(done, (b,)) for b in batches])

    book.compare(
        "steps",
        f"settle, {batch} at a time",
        place.name,
        ours=ours,
        reference=reference,
        beside="psycopg by hand",
        size=count,
        unit="us/job",
    )


@pytest.mark.parametrize("keys", [1, 1_000])
def test_admit(place: PostgresPlace, book: Book, keys: int) -> None:
    def measure() -> float:
        place.empty()
        jobs = place.fill_lines(COUNT, keys)
        place.tidy()
        with hand_on(place) as hand:

            def all_of_them() -> None:
                last = 0
                while last < jobs.last:
                    last = hand.admit(last)

            return per_job(COUNT, all_of_them)

    book.note(
        "steps",
        f"admit, {WINDOW} at a time, {keys:,} key(s)",
        place.name,
        [measure() for _ in range(3)],
        unit="us/job",
        size=COUNT,
    )
