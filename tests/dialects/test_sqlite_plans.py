"""SQLite: what a worker asks costs what it yields, whatever the statistics say."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from tests.databases import Database
from tests.dialects.crowd import MOMENTS, Moment, a_whole_life
from tests.life.hands import Hands

MOST_STEPS = 200_000
"""Instructions of SQLite that a statement may take: a look at the crowd takes millions."""

GRAIN = 1_000


@pytest.fixture
def hands(sqlite_database: Database) -> Iterator[Hands]:
    with closing(Hands(sqlite_database)) as hands:
        yield hands


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_no_statement_reads_the_crowd(hands: Hands, moment: Moment) -> None:
    moment(hands, lambda: hands.execute("ANALYZE"))
    hands.held.close()  # so that the next connection reads the statistics

    with watching(hands) as looks:
        a_whole_life(hands)

    assert len(looks) > 30
    faults = [
        f"{steps} steps; {fault}\n{text}"
        for text, plan, steps in looks
        for fault in faults_of(plan)
    ]
    faults += [f"{steps} steps\n{text}" for text, _, steps in looks if steps > MOST_STEPS]
    assert faults == [], "\n\n".join(faults)


Look = tuple[str, list[str], int]
"""A statement, the lines of its plan, and the instructions that it took."""


@contextmanager
def watching(hands: Hands) -> Iterator[list[Look]]:
    """Note the plan and the cost of every statement."""
    looks: list[Look] = []
    steps = [0]

    def count() -> None:
        steps[0] += GRAIN

    def before(connection: sa.Connection, *_: object) -> None:
        driver: Any = connection.connection.driver_connection
        steps[0] = 0
        driver.set_progress_handler(count, GRAIN)

    def after(
        connection: sa.Connection, _cursor: object, text: str, parameters: Any, *_: object
    ) -> None:
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(None, 0)
        if "cyclone_" in text:
            looks.append((text, plan_of(driver, text, parameters), steps[0]))

    for engine in (hands.engine, hands.worker_engine):
        sa.event.listen(engine, "before_cursor_execute", before)
        sa.event.listen(engine, "after_cursor_execute", after)
    yield looks


def plan_of(driver: sqlite3.Connection, text: str, parameters: Any) -> list[str]:
    return [row[3] for row in driver.execute(f"EXPLAIN QUERY PLAN {text}", parameters)]


def faults_of(plan: list[str]) -> Iterator[str]:
    """Lines that read one of our large tables from end to end."""
    large = r"(cyclone_job|cyclone_history|cyclone_idempotency_key|candidate|first|due|old)"
    for line in plan:
        if re.match(rf"SCAN {large}(?! USING)", line):
            yield line
