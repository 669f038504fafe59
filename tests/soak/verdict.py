"""What must be zero when the faults are over, read from what the database itself has logged."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

import sqlalchemy as sa

from cyclone_sqla.lifecycle import ACTIVE
from cyclone_sqla.models import literals
from tests.soak.business import AMOUNT, OWES_ENTRY

Found = dict[str, list[object]]
"""What breaks each promise: jobs, accounts, processes."""

NO_JOB = f"""
SELECT job_id FROM ticket LEFT JOIN cyclone_job ON cyclone_job.id = job_id
WHERE state IN ({literals(ACTIVE)})
    OR (state IS NULL AND job_id NOT IN (SELECT job_id FROM ending))
"""

NOT_COMPLETED = """
SELECT job_id FROM ticket
WHERE sequence_key IS NULL
    AND job_id NOT IN (SELECT job_id FROM ending WHERE state = 'completed')
"""

NO_TICKET = """
SELECT id FROM cyclone_job WHERE id NOT IN (SELECT job_id FROM ticket)
UNION SELECT job_id FROM ending WHERE job_id NOT IN (SELECT job_id FROM ticket)
"""

COMPLETED_TWICE = """
SELECT job_id FROM ending WHERE state = 'completed' GROUP BY job_id HAVING count(*) > 1
"""

NOT_ONE_EFFECT = f"""
SELECT ticket.job_id FROM ticket
LEFT JOIN (
    SELECT job_id, count(*) AS effects FROM (
        SELECT job_id FROM entry UNION ALL SELECT job_id FROM applied
    ) AS happened GROUP BY job_id
) AS told ON told.job_id = ticket.job_id
WHERE kind IN ({literals((*OWES_ENTRY, "transfer"))}) AND coalesce(effects, 0) <> (
    SELECT count(DISTINCT job_id) FROM ending
    WHERE ending.job_id = ticket.job_id AND state = 'completed'
)
"""

BALANCES = "SELECT id, balance FROM account ORDER BY id"

TRANSFERRED = "SELECT count(*) FROM applied"

ENDINGS = """
SELECT ticket.job_id, sequence_key, on_failure, ending.id, started_at, finished_at
FROM ticket JOIN ending ON ending.job_id = ticket.job_id
WHERE sequence_key IS NOT NULL ORDER BY ticket.job_id, ending.id
"""


def judge(engine: sa.Engine, confirmed: Collection[int]) -> Found:
    """What breaks each promise; `confirmed` are the jobs whose commit was answered."""
    with engine.connect() as connection:

        def ids(statement: str) -> list[Any]:
            return sorted(connection.scalars(sa.text(statement)))

        tickets = set(ids("SELECT job_id FROM ticket"))
        lost = {*ids(NO_JOB), *ids(NOT_COMPLETED), *(set(confirmed) - tickets)}
        return {
            "jobs lost": sorted(lost),
            "jobs of no transaction": ids(NO_TICKET),
            "completed twice": ids(COMPLETED_TWICE),
            "order per key broken": _out_of_order(connection),
            "effects other than once": [*ids(NOT_ONE_EFFECT), *_wrong_balances(connection)],
        }


def _wrong_balances(connection: sa.Connection) -> list[object]:
    """The accounts that don't hold what was moved."""
    moved = connection.execute(sa.text(TRANSFERRED)).scalar_one() * AMOUNT
    expected = {1: -moved, 2: moved}
    balances = connection.execute(sa.text(BALANCES))
    return [number for number, balance in balances if balance != expected[number]]


def _out_of_order(connection: sa.Connection) -> list[object]:
    """The jobs that ended, or began for the last time, before an earlier one of their key was done.

    A job that halts its sequence is done at its last end, any other at its first one: it may be
    replayed while the line goes on.
    """
    lines: Mapping[str, dict[int, list[sa.Row[Any]]]] = defaultdict(dict)
    for row in connection.execute(sa.text(ENDINGS)):
        lines[row.sequence_key].setdefault(row.job_id, []).append(row)
    return [job_id for line in lines.values() for job_id in _too_early(list(line.values()))]


def _too_early(line: list[list[sa.Row[Any]]]) -> list[int]:
    found = []
    for before, after in pairwise(line):
        done = before[-1 if before[0].on_failure == "halt" else 0]
        if after[0].id < done.id or _overlap(done, after[0]):
            found.append(after[0].job_id)
    return found


def _overlap(done: sa.Row[Any], after: sa.Row[Any]) -> bool:
    return after.started_at is not None and bool(after.started_at < done.finished_at)
