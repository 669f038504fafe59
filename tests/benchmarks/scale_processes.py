"""Worker processes against one server: run by `nox -s scale`."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.benchmarks.bench_pickup import Applications, percentile, waits_of
from tests.benchmarks.book import PAIRS, Book, sized
from tests.benchmarks.place import PostgresPlace
from tests.benchmarks.processes import Drained, Runner, drain

COUNT = sized(100_000)
PROCESSES = [1, 2, 4, 8]
SLOTS = 500
ROUNDS = min(PAIRS, 3)


def drained(place: PostgresPlace, processes: int, slots: int, count: int) -> Drained:
    """Drain fresh jobs by several processes, whose claims are noted."""
    place.empty()
    jobs = place.fill(count, "atick")
    place.tidy()
    runners = [Runner.ours(place, slots=slots, count_claims=True) for _ in range(processes)]
    return drain(place, jobs, runners)


def plural(processes: int) -> str:
    """In words."""
    return "process" if processes == 1 else "processes"


class Conflicts:
    """What the claims of all processes came to, without those at the end that found nothing."""

    def __init__(self, told: Sequence[dict[str, Any]]) -> None:
        self._claims = [claim for each in told for claim in until_the_last(each["claims"])]

    @property
    def empty(self) -> float:
        """The share of claims, in percent, that found nothing though there were jobs."""
        return 100 * sum(not got for _, got, _ in self._claims) / max(1, len(self._claims))

    @property
    def short(self) -> float:
        """The share of wanted jobs, in percent, that were not got."""
        wanted = sum(wanted for wanted, _, _ in self._claims)
        return 100 * (1 - sum(got for _, got, _ in self._claims) / max(1, wanted))

    @property
    def turn(self) -> float:
        """Milliseconds of a turn: settle and claim."""
        took = sorted(seconds for _, _, seconds in self._claims)
        return percentile(took, 0.5) * 1000


def until_the_last(claims: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
    """The claims of a process up to the last that got something."""
    last = max((i for i, (_, got, _) in enumerate(claims) if got), default=-1)
    return claims[: last + 1]


@pytest.mark.parametrize("slots", [SLOTS, 10])
@pytest.mark.parametrize("processes", PROCESSES)
def test_throughput(place: PostgresPlace, book: Book, processes: int, slots: int) -> None:
    count = COUNT if slots == SLOTS else COUNT // 5
    rounds = [drained(place, processes, slots, count) for _ in range(ROUNDS)]
    work = f"{processes} {plural(processes)} of {slots} slots"
    conflicts = [Conflicts(round_.told) for round_ in rounds]
    figures = {
        "jobs/s": [round_.rate for round_ in rounds],
        "% of claims empty": [each.empty for each in conflicts],
        "% of wanted jobs not got": [each.short for each in conflicts],
        "ms a turn": [each.turn for each in conflicts],
    }
    for unit, values in figures.items():
        book.note("scale", work, place.name, values, unit=unit, size=count)


@pytest.mark.parametrize("processes", PROCESSES)
def test_pickup(place: PostgresPlace, book: Book, processes: int) -> None:
    applications = Applications(place.url)
    place.empty()
    place.tidy()
    runners = [Runner.ours(place, slots=10) for _ in range(processes)]
    waited = waits_of(runners, applications.plain)
    for share, unit in ((0.5, "ms p50"), (0.99, "ms p99")):
        work = f"{processes} idle {plural(processes)}, from the commit to the action"
        value = percentile(waited, share)
        book.note("scale", work, place.name, [value], unit=unit, size=len(waited))
    applications.engine.dispose()


def test_retention(place: PostgresPlace, book: Book) -> None:
    """How many ended jobs one process deletes, and what a drain loses beside that."""
    rows = sized(500_000)
    old = "clock_timestamp() - interval '10 days'"

    def beside_retention(keep: float | None) -> tuple[float, float]:
        place.empty()
        place.fill(rows, state="'completed'", finished_at=old)
        jobs = place.fill(COUNT, "atick")
        place.tidy()
        drained = drain(place, jobs, [Runner.ours(place, slots=SLOTS, keep_completed=keep)])
        (left,) = place.run(f"SELECT count(*) FROM cyclone_job WHERE id < {jobs.first}")
        return drained.rate, (rows - left) / drained.seconds

    rounds = [(beside_retention(86_400.0), beside_retention(None)) for _ in range(ROUNDS)]
    work = "drain by one process, retention at work"
    book.write_pairs(
        "retention",
        work,
        place.name,
        [(busy[0], idle[0]) for busy, idle in rounds],
        beside="nothing to delete",
        size=COUNT,
        unit="jobs/s",
    )
    deleted = [busy[1] for busy, _ in rounds]
    book.note(
        "retention", "ended jobs deleted meanwhile", place.name, deleted, unit="rows/s", size=rows
    )
