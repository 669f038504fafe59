"""Flatness: what lies beside the jobs that are claimed, and must cost nothing."""

from collections.abc import Callable

import pytest

from tests.benchmarks.book import Book, sized
from tests.benchmarks.place import PostgresPlace
from tests.benchmarks.processes import Runner, drain

COUNT = sized(100_000)
TOMORROW = "clock_timestamp() + interval '1 day'"


def scheduled(place: PostgresPlace) -> str:
    """Jobs whose time is tomorrow."""
    rows = sized(1_000_000)
    place.fill(rows, state="'pending'", waits_for="'time'", run_at=TOMORROW)
    return f"{rows:,} scheduled jobs"


def blocked(place: PostgresPlace) -> str:
    """Jobs of one sequence whose head runs on and on."""
    rows = sized(1_000_000)
    columns = {"sequence_key": "'hot'", "sequence_open": "true", "on_failure": "'dead-letter'"}
    place.fill(
        1,
        **columns,
        admitted="true",
        state="'running'",
        attempt="1",
        lease="1",
        worker="'elsewhere'",
        leased_until=TOMORROW,
    )
    place.fill(rows, **columns, state="'pending'", waits_for="'turn'")
    return f"{rows:,} blocked jobs of one key"


def finished(place: PostgresPlace) -> str:
    """Jobs that are over and not yet pruned."""
    rows = sized(5_000_000)
    for _ in range(10):
        place.fill(rows // 10, state="'completed'", finished_at="clock_timestamp()")
    return f"{rows:,} finished jobs"


def lines(place: PostgresPlace) -> str:
    """Sequences whose heads wait until tomorrow."""
    keys = sized(100_000)
    columns = {
        "sequence_key": "'waiting-' || n",
        "sequence_open": "true",
        "on_failure": "'dead-letter'",
        "state": "'pending'",
    }
    place.fill(keys, **columns, admitted="true", waits_for="'time'", run_at=TOMORROW)
    place.fill(keys, **columns, waits_for="'turn'")
    return f"{keys:,} sequences that wait"


def unknown(place: PostgresPlace) -> str:
    """Jobs that are first in order, and of a kind that the worker does not know."""
    rows = sized(300_000)
    place.fill(rows, "strange", priority="-1")
    return f"{rows:,} available jobs of an unknown kind in front"


def of_everything(place: PostgresPlace) -> float:
    """Drain fresh jobs beside what is there."""
    jobs = place.fill(COUNT, "atick")
    place.tidy()
    return drain(place, jobs, [Runner.ours(place)]).rate


@pytest.mark.parametrize("lay", [scheduled, blocked, finished, lines, unknown])
def test_drain_beside(
    place: PostgresPlace,
    other_place: PostgresPlace,
    book: Book,
    lay: Callable[[PostgresPlace], str],
) -> None:
    what = lay(place)
    book.compare(
        "backlog",
        f"drain of {COUNT:,} beside {what}",
        place.name,
        ours=lambda: of_everything(place),
        reference=lambda: of_everything(other_place),
        beside="the same without",
        size=COUNT,
    )
