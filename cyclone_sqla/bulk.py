"""People's verbs on all jobs that a filter means: batch by batch, each the caller's transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sqlalchemy as sa
from sqlalchemy import Connection

from cyclone_sqla import interventions, statements
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.errors import Duplicate, DuplicateError, InvalidTransitionError, JobNotFoundError
from cyclone_sqla.job_filter import JobFilter
from cyclone_sqla.job_spec import JobRef
from cyclone_sqla.lifecycle import PEOPLES_VERBS, State
from cyclone_sqla.operations import holders_of, ref_of

Act: TypeAlias = "Callable[[Connection, Dialect, int], JobRef]"
"""One verb on one job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A job that the verb was not done to, and why."""

    job_id: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkReport:
    """What became of one batch.

    ``done`` has the jobs as they are now (of a preview: those that the verb fits, as they are).
    ``after`` is what the next call goes on with; None if no job is left.
    """

    verb: str
    is_preview: bool
    done: tuple[JobRef, ...]
    refused: tuple[Refused, ...]
    after: int | None


def act_on_batch(
    connection: Connection,
    dialect: Dialect,
    *,
    verb: str,
    act: Act,
    wanted: JobFilter,
    after: int,
    limit: int,
    preview: bool,
) -> BulkReport:
    """Do the verb to the next jobs that the filter means, by id; or only judge them.

    Without a state in the filter they are those whose state allows the verb. A job that another
    transaction has locked is not waited for: it is refused as busy.
    """
    states = tuple(State) if wanted.state is not None else PEOPLES_VERBS[verb]
    given = {"after": after, "limit": limit}
    rows = connection.execute(dialect.looks.pick(wanted, states), given).all()
    if preview:
        done, refused = _judge(connection, dialect, verb, rows)
    else:
        done, refused = _act_on(connection, dialect, act, rows)
    return BulkReport(
        verb=verb,
        is_preview=preview,
        done=tuple(done),
        refused=tuple(refused),
        after=rows[-1].id if len(rows) == limit else None,
    )


_Outcome: TypeAlias = "tuple[list[JobRef], list[Refused]]"


def _act_on(
    connection: Connection, dialect: Dialect, act: Act, rows: Sequence[sa.Row[Any]]
) -> _Outcome:
    """All rows are locked first, in one order and without waiting: two people never deadlock."""
    bound = dialect.syntax.bind("wanted", statements.ID, [(row.id,) for row in rows])
    locked = set(connection.scalars(dialect.looks.lock, bound)) if rows else set[int]()
    done, refused = list[JobRef](), list[Refused]()
    for row in rows:
        if row.id not in locked:
            refused.append(Refused(job_id=row.id, why=f"job {row.id} is in use by somebody else"))
            continue
        try:
            done.append(act(connection, dialect, row.id))
        except (InvalidTransitionError, DuplicateError, JobNotFoundError) as exc:
            refused.append(Refused(job_id=row.id, why=str(exc)))
    return done, refused


def _judge(
    connection: Connection, dialect: Dialect, verb: str, rows: Sequence[sa.Row[Any]]
) -> _Outcome:
    """What would become of them, as things are now."""
    done, refused = list[JobRef](), list[Refused]()
    replayed = rows if verb == "replay" else ()
    keys = sorted({(row.kind, row.unique_key) for row in replayed if row.unique_key is not None})
    holders = holders_of(connection, dialect, keys)
    for row in rows:
        ref, key = ref_of(row), (row.kind, row.unique_key)
        if not _fits(verb, row):
            why = str(interventions.refusal(row, connection, dialect, verb))
            refused.append(Refused(job_id=row.id, why=why))
        elif key in holders:
            why = str(DuplicateError([Duplicate(0, row.kind, row.unique_key, holders[key])]))
            refused.append(Refused(job_id=row.id, why=why))
        else:
            done.append(ref)
            if verb == "replay" and row.unique_key is not None:
                holders[key] = ref
    return done, refused


def _fits(verb: str, row: sa.Row[Any]) -> bool:
    if row.state not in PEOPLES_VERBS[verb]:
        return False
    return verb != "skip" or row.sequence_open is not None or row.dead_letter is not None
