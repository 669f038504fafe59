"""A transaction that stays open elsewhere: no dead row can be removed while it lives."""

from collections.abc import Generator
from contextlib import contextmanager

import psycopg

from tests.benchmarks.book import PAIRS, Book, sized
from tests.benchmarks.place import PostgresPlace
from tests.benchmarks.processes import Runner, drain

EARLIER = sized(200_000)
COUNT = sized(80_000)


@contextmanager
def snapshot(place: PostgresPlace) -> Generator[None]:
    """Somebody looks at the database as it is now, and does not end."""
    with psycopg.connect(place.dsn) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT count(*) FROM cyclone_worker")
        yield
        connection.rollback()


def later_drain(place: PostgresPlace, *, by_hand: bool) -> float:
    """Drain many jobs, then measure the drain of some more by a fresh process."""

    def fill(count: int) -> tuple[object, Runner]:
        if by_hand:
            return place.fill_by_hand(count), Runner.by_hand(place, "batches")
        return place.fill(count, "atick"), Runner.ours(place)

    jobs, runner = fill(EARLIER)
    drain(place, jobs, [runner])  # type: ignore[arg-type]
    jobs, runner = fill(COUNT)
    place.tidy()
    return drain(place, jobs, [runner]).rate  # type: ignore[arg-type]


def held(place: PostgresPlace, *, by_hand: bool = False) -> float:
    """With a snapshot from before the first job until the end."""
    place.empty()
    place.tidy()
    with snapshot(place):
        return later_drain(place, by_hand=by_hand)


def free(place: PostgresPlace, *, by_hand: bool = False) -> float:
    """Without."""
    place.empty()
    place.tidy()
    return later_drain(place, by_hand=by_hand)


def test_drain_under_a_held_snapshot(place: PostgresPlace, book: Book) -> None:
    book.compare(
        "snapshot",
        f"drain of {COUNT:,} under a snapshot held through {EARLIER:,} earlier jobs",
        place.name,
        ours=lambda: held(place),
        reference=lambda: free(place),
        beside="the same without a snapshot",
        size=COUNT,
    )


def test_drain_by_hand_under_a_held_snapshot(place: PostgresPlace, book: Book) -> None:
    book.compare(
        "snapshot",
        f"for comparison, by hand: drain of {COUNT:,} under such a snapshot",
        place.name,
        ours=lambda: held(place, by_hand=True),
        reference=lambda: free(place, by_hand=True),
        beside="the same without a snapshot",
        size=COUNT,
        pairs=min(PAIRS, 3),
    )
