"""Sequences: one key in order, and a thousand keys side by side."""

import pytest

from tests.benchmarks.book import Book, sized
from tests.benchmarks.place import Place, PostgresPlace, SqlitePlace
from tests.benchmarks.processes import Runner, drain

ONE_KEY = sized(4_000)
KEYS = 1_000
OF_ALL_KEYS = sized(100_000)
SLOTS = 500


def in_order(place: Place, count: int, keys: int, kind: str = "atick") -> float:
    """Drain fresh jobs of these many sequences, as an enqueue has left them."""
    place.empty()
    jobs = place.fill_lines(count, keys, kind)
    place.tidy()
    return drain(place, jobs, [Runner.ours(place, slots=SLOTS)]).rate


def plain(place: Place, count: int) -> float:
    """Drain fresh jobs without a sequence."""
    place.empty()
    jobs = place.fill(count, "atick")
    place.tidy()
    return drain(place, jobs, [Runner.ours(place, slots=SLOTS)]).rate


def one_by_one_by_hand(place: PostgresPlace) -> float:
    """Complete one row and claim the next in one transaction and one round trip."""
    place.empty()
    jobs = place.fill_by_hand(ONE_KEY)
    place.tidy()
    return drain(place, jobs, [Runner.by_hand(place, "one")]).rate


def test_one_key_in_order(place: PostgresPlace, book: Book) -> None:
    book.compare(
        "sequences",
        f"{ONE_KEY:,} jobs of one key in order",
        place.name,
        ours=lambda: in_order(place, ONE_KEY, 1, "tick"),
        reference=lambda: one_by_one_by_hand(place),
        beside="psycopg by hand, one completed and the next claimed in a pipelined transaction",
        size=ONE_KEY,
    )


@pytest.mark.parametrize("one", ["postgresql", "sqlite"])
def test_a_thousand_keys(one: str, book: Book, request: pytest.FixtureRequest) -> None:
    place: PostgresPlace | SqlitePlace = request.getfixturevalue(
        "place" if one == "postgresql" else "sqlite_place"
    )
    book.compare(
        "sequences",
        f"{OF_ALL_KEYS:,} jobs of {KEYS:,} keys",
        place.name,
        ours=lambda: in_order(place, OF_ALL_KEYS, KEYS),
        reference=lambda: plain(place, OF_ALL_KEYS),
        beside="as many jobs without a key",
        size=OF_ALL_KEYS,
    )
