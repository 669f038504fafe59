"""Drain: what one or two worker processes make of a backlog, and what a process weighs."""

import pytest

from tests.benchmarks.book import Book, sized
from tests.benchmarks.place import Place, PostgresPlace, SqlitePlace
from tests.benchmarks.processes import Drained, Runner, drain

COUNT = sized(50_000)
LONG = sized(100_000)
WRITING = sized(5_000)
SLOTS = 500
THREADS = 10


def ours(place: Place, kind: str, count: int, *, slots: int = SLOTS, processes: int = 1) -> Drained:
    """Drain fresh jobs of a kind."""
    place.empty()
    jobs = place.fill(count, kind)
    place.tidy()
    return drain(place, jobs, [Runner.ours(place, slots=slots) for _ in range(processes)])


def by_hand(place: Place, loop: str, count: int, processes: int = 1, threads: int = 1) -> Drained:
    """Drain rows of the same number by a loop by hand."""
    place.empty()
    jobs = place.fill_by_hand(count)
    place.tidy()
    runners = [Runner.by_hand(place, loop, threads=threads) for _ in range(processes)]
    return drain(place, jobs, runners)


@pytest.mark.parametrize("kind", ["tick", "atick"])
def test_drain_by_one_process(place: PostgresPlace, book: Book, kind: str) -> None:
    drains: list[Drained] = []

    def measure() -> float:
        drains.append(ours(place, kind, LONG))
        return drains[-1].rate

    name = "sync" if kind == "tick" else "async"
    book.compare(
        "drain",
        f"{LONG:,} no-op jobs, {name}, one process, {SLOTS} slots",
        place.name,
        ours=measure,
        reference=lambda: by_hand(place, "batches", LONG).rate,
        beside="psycopg by hand, batches of 500",
        size=LONG,
    )
    cpu = [drained.told[0]["cpu"] / LONG * 1e6 for drained in drains]
    book.note("drain", f"CPU of the worker, {name}", place.name, cpu, unit="us/job", size=LONG)


@pytest.mark.parametrize("kind", ["tick", "atick"])
def test_weight_of_a_process(place: PostgresPlace, book: Book, kind: str) -> None:
    name = "sync" if kind == "tick" else "async"
    weights = [ours(place, kind, COUNT).told[0]["rss_mib"] for _ in range(3)]
    work = f"most memory of a process that drains {COUNT:,}, {name}"
    book.note("drain", work, place.name, weights, unit="MiB", size=COUNT)


def test_drain_by_two_processes(place: PostgresPlace, book: Book) -> None:
    book.compare(
        "drain",
        f"{LONG:,} no-op jobs, async, two processes",
        place.name,
        ours=lambda: ours(place, "atick", LONG, processes=2).rate,
        reference=lambda: ours(place, "atick", LONG).rate,
        beside="by one process",
        size=LONG,
    )


@pytest.mark.parametrize(
    ("kind", "loop", "beside"),
    [
        ("write", "transactional", "psycopg by hand, the same threads"),
        ("write", "sessions", "Sessions by hand, the same threads"),
        ("awrite", "transactional", "psycopg by hand, the same threads"),
        ("awrite", "async sessions", "AsyncSessions by hand, as many tasks"),
    ],
)
def test_drain_of_transactional_actions(
    place: PostgresPlace, book: Book, kind: str, loop: str, beside: str
) -> None:
    name = "ctx.session" if kind == "write" else "ctx.async_session"
    book.compare(
        "drain",
        f"{WRITING:,} jobs with one INSERT through {name}, {THREADS} slots",
        place.name,
        ours=lambda: ours(place, kind, WRITING, slots=THREADS).rate,
        reference=lambda: by_hand(place, loop, WRITING, threads=THREADS).rate,
        beside=beside,
        size=WRITING,
    )


@pytest.mark.parametrize("kind", ["tick", "atick"])
def test_drain_on_sqlite(sqlite_place: SqlitePlace, book: Book, kind: str) -> None:
    name = "sync" if kind == "tick" else "async"
    book.compare(
        "drain",
        f"{COUNT:,} no-op jobs, {name}, one process, {SLOTS} slots, synchronous=NORMAL",
        sqlite_place.name,
        ours=lambda: ours(sqlite_place, kind, COUNT).rate,
        reference=lambda: by_hand(sqlite_place, "sqlite", COUNT).rate,
        beside="sqlite3 by hand, batches of 500",
        size=COUNT,
    )
