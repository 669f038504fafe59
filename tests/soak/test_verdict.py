"""A soak run that ends with zeros says something: its verdict sees every promise that is broken."""

from collections.abc import Collection

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone
from tests.databases import Database
from tests.soak import business
from tests.soak.verdict import judge

HEALTHY = """
INSERT INTO ticket (job_id, kind, sequence_key, on_failure) VALUES
    (101, 'plain', NULL, NULL), (102, 'parent', NULL, NULL), (103, 'transfer', NULL, NULL),
    (104, 'step', 'a', 'dead-letter'), (105, 'step', 'a', 'dead-letter'),
    (106, 'step', 'b', 'halt'), (107, 'step', 'b', 'halt');
INSERT INTO ending (job_id, state, started_at, finished_at) VALUES
    (101, 'completed', 1, 2), (102, 'completed', 1, 2), (103, 'completed', 1, 2),
    (104, 'discarded', 1, 2), (105, 'completed', 2, 3), (104, 'completed', 4, 5),
    (106, 'discarded', 1, 2), (106, 'completed', 3, 4), (107, 'completed', 4, 5);
INSERT INTO entry (job_id) VALUES (102), (104), (105), (106), (107);
INSERT INTO applied (job_id) VALUES (103);
UPDATE account SET balance = CASE id WHEN 1 THEN -1 ELSE 1 END
"""

BREACHES = {
    "a ticket without a job": (
        "INSERT INTO ticket (job_id, kind) VALUES (109, 'plain')", "jobs lost", [109],
    ),
    "a job that never ended": (
        "INSERT INTO ticket (job_id, kind) SELECT id, kind FROM cyclone_job", "jobs lost", [1],
    ),
    "a job that was given up": (
        "UPDATE ending SET state = 'discarded' WHERE job_id = 101", "jobs lost", [101],
    ),
    "a job without a ticket": (
        "DELETE FROM ticket WHERE job_id = 101", "jobs of no transaction", [101],
    ),
    "a second completion": (
        "INSERT INTO ending (job_id, state) VALUES (101, 'completed')", "completed twice", [101],
    ),
    "an end before that of the one before": (
        "UPDATE ending SET id = -1 WHERE job_id = 105", "order per key broken", [105],
    ),
    "a run that began too early": (
        "UPDATE ending SET started_at = 1 WHERE job_id = 105", "order per key broken", [105],
    ),
    "a run behind a head that stood still": (
        "UPDATE ending SET started_at = 3 WHERE job_id = 107", "order per key broken", [107],
    ),
    "an effect that happened twice": (
        "INSERT INTO entry (job_id) VALUES (102)", "effects other than once", [102],
    ),
    "an effect that is missing": (
        "DELETE FROM entry WHERE job_id = 105", "effects other than once", [105],
    ),
    "money that came from nowhere": (
        "UPDATE account SET balance = 2 WHERE id = 2", "effects other than once", [2],
    ),
}  # fmt: skip


@pytest.fixture
def engine(sqlite_database: Database) -> sa.Engine:
    """A run that kept every promise."""
    engine = sqlite_database.engine()
    business.create(engine)
    execute(engine, HEALTHY)
    return engine


def execute(engine: sa.Engine, script: str) -> None:
    with engine.begin() as connection:
        for statement in script.split(";"):
            connection.exec_driver_sql(statement)


def broken(engine: sa.Engine, confirmed: Collection[int] = ()) -> dict[str, list[object]]:
    return {promise: found for promise, found in judge(engine, confirmed).items() if found}


def test_nothing_is_found_where_every_promise_was_kept(engine: sa.Engine) -> None:
    assert broken(engine, {101, 102}) == {}


def test_a_job_whose_commit_was_answered_is_missed(engine: sa.Engine) -> None:
    assert broken(engine, {101, 110}) == {"jobs lost": [110]}


@pytest.mark.parametrize("breach", BREACHES)
def test_every_breach_is_found(engine: sa.Engine, breach: str) -> None:
    statement, promise, jobs = BREACHES[breach]
    if "cyclone_job" in statement:
        with Session(engine) as session, session.begin():
            Cyclone(hints=False).enqueue(session, "plain", {})
    execute(engine, statement)
    assert broken(engine)[promise] == jobs
