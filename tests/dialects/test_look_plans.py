"""Who looks reads a bounded number of rows through an index, whatever stands there."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

from cyclone_sqla import Job, JobFilter, operations
from cyclone_sqla.doctor import examine
from cyclone_sqla.figures import MOST_COUNTED, WINDOW, Count
from tests.databases import Database
from tests.dialects import test_postgresql_plans as postgresql
from tests.dialects import test_sqlite_plans as sqlite
from tests.dialects.crowd import DAY, change
from tests.life.hands import Hands

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOT = 18_000
PLAIN = 24_000

Look = Callable[[Hands, sa.Connection], object]

FEW: dict[str, Look] = {
    "explain the last in line": lambda hands, c: hands.cyclone.explain(c, HOT),
    "explain the last in the queue": lambda hands, c: hands.cyclone.explain(c, HOT + PLAIN),
    "explain who runs": lambda hands, c: hands.cyclone.explain(c, HOT + 5),
    "explain who halts": lambda hands, c: hands.cyclone.explain(c, HOT + PLAIN + 1),
    "explain who is halted": lambda hands, c: hands.cyclone.explain(c, HOT + PLAIN + 2),
    "explain a gap": lambda hands, c: hands.cyclone.explain(c, HOT + PLAIN + 3),
    "get by position": lambda hands, c: hands.cyclone.get(c, sequence="numbered", position=7),
    "history": lambda hands, c: hands.cyclone.history(c, 1),
    "sequences": lambda hands, c: hands.cyclone.sequences(c),
    "paused sequences": lambda hands, c: hands.cyclone.sequences(c, only_paused=True),
    "one sequence": lambda hands, c: hands.cyclone.sequence(c, "hot"),
    "halted sequences": lambda hands, c: hands.cyclone.halted_sequences(c),
    "page of all": lambda hands, c: hands.cyclone.jobs(c, newest_first=True),
    "page of the paused": lambda hands, c: hands.cyclone.jobs(c, JobFilter(state="paused")),
}
"""Looks that read what they tell, and count up to 1,000."""

BULK: dict[str, Look] = {
    "pause many": lambda hands, c: hands.cyclone.pause_many(
        c, JobFilter(queue="default"), after=HOT, limit=3
    ),
}
"""What a filter means is found as well as the statistics allow."""

MANY: dict[str, Look] = {
    "preview": lambda hands, c: hands.cyclone.replay_many(
        c, JobFilter(dead_letter=True), preview=True, limit=10, after=HOT
    ),
    "queues": lambda hands, c: hands.cyclone.queues(c),
    "stats": lambda hands, c: hands.cyclone.stats(c),
    "doctor": lambda hands, c: examine(c, hands.cyclone),
}
"""Looks that count up to 10,000 in each of a dozen windows, or may sort all dead letters."""


def fill(hands: Hands) -> None:
    """A line of waiting jobs behind a paused head, and as many others in every state."""
    hands.enqueue_many(HOT, sequence="hot")
    change(hands, sa.true(), waits_for="turn")
    hands.change(1, state="paused", waits_for=None, admitted=True)
    hands.enqueue_many(PLAIN)
    now, share = hands.clock.now(), Job.id % 6
    plain = Job.id > HOT
    change(hands, plain & (share == 3), state="completed", finished_at=now)
    change(hands, plain & (share == 4), state="pending", waits_for="time", run_at=now + DAY)
    dead = {"state": "discarded", "dead_letter": True, "finished_at": now}
    change(hands, plain & (share == 5), **dead)
    change(hands, Job.id == HOT + 5, **RUNNING, leased_until=now + DAY)
    change(hands, Job.id == HOT + PLAIN, state="available", finished_at=None)
    add_lines(hands)


RUNNING: dict[str, Any] = {
    "state": "running",
    "waits_for": None,
    "finished_at": None,
    "dead_letter": None,
    "worker": "w",
    "lease": 1,
    "attempt": 1,
}


def add_lines(hands: Hands) -> None:
    """A halted one, one with a gap, and a live worker that serves them."""
    first = hands.enqueue(sequence="halted", on_failure="halt")
    hands.enqueue(sequence="halted")
    assert first == HOT + PLAIN + 1
    now = hands.clock.now()
    dead = {"state": "discarded", "waits_for": None, "dead_letter": True, "finished_at": now}
    hands.change(first, **dead, admitted=True)
    hands.enqueue(sequence="numbered", position=7)
    hands.act("pause_sequence", "elsewhere")
    record = {
        "id": "w", "name": "w", "host": "h", "pid": 1, "queues": {"default": 1}, "kinds": ["work"],
    }  # fmt: skip
    with hands.transaction() as connection:
        operations.announce(connection, hands.dialect, record)


def when_empty(hands: Hands, analyze: Callable[[], None]) -> None:
    """Statistics say that there are no jobs."""
    analyze()
    fill(hands)


def when_all_were_available(hands: Hands, analyze: Callable[[], None]) -> None:
    """They say that every job is available, and none waits, has ended or has a sequence."""
    hands.enqueue_many(20_000)
    analyze()
    with hands.engine.begin() as connection:
        connection.execute(sa.delete(Job))
    if hands.database.dialect == "sqlite":
        hands.execute("DELETE FROM sqlite_sequence WHERE name = 'cyclone_job'")
    else:
        hands.execute("ALTER TABLE cyclone_job ALTER COLUMN id RESTART WITH 1")
    fill(hands)


def afterwards(hands: Hands, analyze: Callable[[], None]) -> None:
    """They are right."""
    fill(hands)
    analyze()


@pytest.fixture(params=[when_empty, when_all_were_available, afterwards])
def crowded(database: Database, request: pytest.FixtureRequest) -> Iterator[Hands]:
    with closing(Hands(database)) as hands:
        if database.dialect == "postgresql":
            hands.execute("ALTER TABLE cyclone_job SET (autovacuum_enabled = false)")
        request.param(hands, lambda: hands.execute("ANALYZE"))
        hands.held.close()
        hands.engine.dispose()  # so that the next connection reads the statistics
        yield hands


def test_a_look_costs_what_it_tells(crowded: Hands) -> None:
    faults: list[str] = []
    for names, rows, steps in ((FEW, 2.5 * MOST_COUNTED, 150_000), (MANY, 1.5 * WINDOW, 3_000_000)):
        for name, look in names.items():
            faults += [f"{name}: {fault}" for fault in costs(crowded, look, rows, steps)]
    assert faults == [], "\n\n".join(faults)
    with crowded.engine.connect() as connection:
        assert_bounded(crowded, connection)


@pytest.mark.parametrize("crowded", [afterwards], indirect=True)
def test_a_batch_of_many_goes_on_where_the_last_one_ended(crowded: Hands) -> None:
    faults = [fault for look in BULK.values() for fault in costs(crowded, look, 1_000, 20_000)]
    assert faults == [], "\n\n".join(faults)


def assert_bounded(hands: Hands, connection: sa.Connection) -> None:
    """What was counted says where it ended."""
    figures = {line.key: line for line in hands.cyclone.sequences(connection)}
    assert figures["hot"].waiting == Count(MOST_COUNTED, is_exact=False)
    stats = hands.cyclone.stats(connection)
    assert str(stats.jobs["available"]) == "10,000 or more"
    assert not stats.pending["turn"].is_exact
    assert stats.jobs["running"] == Count(1)


def costs(hands: Hands, look: Look, rows: float, steps: int) -> Iterator[str]:
    """What a look reads beyond its bounds: rows on PostgreSQL, instructions on SQLite."""
    if hands.database.dialect == "postgresql":
        yield from costs_on_postgresql(hands, look, rows)
    else:
        yield from costs_on_sqlite(hands, look, steps)


def costs_on_postgresql(hands: Hands, look: Look, rows: float) -> Iterator[str]:
    for mode in ("force_generic_plan", "force_custom_plan"):
        with postgresql.explaining(hands, mode) as plans, hands.engine.connect() as connection:
            look(hands, connection)
        for text, plan in plans:
            for node in postgresql.nodes_of(plan):
                if str(node.get("Relation Name", "")).startswith("cyclone_"):
                    seen = postgresql.rows_seen(node)
                    if seen > rows:
                        told = json.dumps(postgresql.brief(node))
                        yield f"{mode}: {seen:.0f} rows: {told}\n{text}"


def costs_on_sqlite(hands: Hands, look: Look, steps: int) -> Iterator[str]:
    with sqlite.watching(hands) as looks, hands.engine.connect() as connection:
        look(hands, connection)
    for text, plan, taken in looks:
        if taken > steps:
            yield f"{taken} steps: {plan}\n{text}"
