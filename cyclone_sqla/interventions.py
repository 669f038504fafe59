"""What people do to jobs, queues and sequences: each in the caller's transaction, and recorded.

Releasing a head here leaves its place as a debt: a worker hands it on in a transaction of its own,
whose isolation level it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from cyclone_sqla import statements
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.errors import (
    Duplicate,
    DuplicateError,
    InvalidTransitionError,
    JobNotFoundError,
)
from cyclone_sqla.job_spec import MAX_ID, JobRef
from cyclone_sqla.lifecycle import PEOPLES_VERBS, State
from cyclone_sqla.operations import holders_of, ref_of


def cancel(connection: Connection, dialect: Dialect, job_id: int, by: str | None) -> JobRef:
    """A waiting job ends; a running one is asked to, and ends as cancelled whatever it does."""
    return _act(connection, dialect, "cancel", dialect.acts.cancel, job_id, by)


def pause(connection: Connection, dialect: Dialect, job_id: int, by: str | None) -> JobRef:
    """Keep a waiting job from running. It holds its unique key and its place in the line."""
    return _act(connection, dialect, "pause", dialect.acts.pause, job_id, by)


def resume(connection: Connection, dialect: Dialect, job_id: int, by: str | None) -> JobRef:
    """Let a paused job go on."""
    return _act(connection, dialect, "resume", dialect.acts.resume, job_id, by)


def replay(
    connection: Connection, dialect: Dialect, job_id: int, by: str | None, arguments: str | None
) -> JobRef:
    """Begin a failed or cancelled job afresh, with other arguments if given (JSON text).

    Raises DuplicateError if another active job holds its unique key by now.
    """
    statement, given = dialect.acts.replay, {"new_arguments": arguments}
    try:
        with dialect.savepoint(connection):
            return _act(connection, dialect, "replay", statement, job_id, by, **given)
    except IntegrityError as exc:  # the key was taken by a transaction that has just committed
        row = _look(connection, dialect, job_id)
        raise refusal(row, connection, dialect, "replay") from exc


def skip(connection: Connection, dialect: Dialect, job_id: int, by: str | None) -> JobRef:
    """Pass over a head that halts its sequence, or mark a dead letter as dealt with."""
    row = _look(connection, dialect, job_id)
    is_in_line = row.sequence_open is not None
    statement = dialect.acts.skip_head if is_in_line else dialect.acts.skip_dead_letter
    return _act(connection, dialect, "skip", statement, job_id, by)


def reschedule(
    connection: Connection,
    dialect: Dialect,
    job_id: int,
    by: str | None,
    *,
    process_at: datetime | None,
    process_in: timedelta | None,
) -> JobRef:
    """Give a waiting job another time."""
    times = {"process_at": process_at, "delay": process_in}
    return _act(connection, dialect, "reschedule", dialect.acts.reschedule, job_id, by, **times)


def _act(
    connection: Connection,
    dialect: Dialect,
    verb: str,
    statement: Any,
    job_id: int,
    by: str | None,
    **params: Any,
) -> JobRef:
    _refuse_impossible(job_id)
    given = {**params, "job_id": job_id, "now": dialect.now()}
    row = connection.execute(statement, given).first()
    if row is None:
        raise refusal(_look(connection, dialect, job_id), connection, dialect, verb)
    entry = (row.id, verb, None, None, None, by, None, None)
    bound = dialect.syntax.bind("entries", statements.ENTRY, [entry])
    connection.execute(dialect.sql.record, {**bound, "now": dialect.now()})
    return ref_of(row)


def kind_of(connection: Connection, dialect: Dialect, job_id: int) -> str:
    """The kind of a job; JobNotFoundError if there is none."""
    kind: str = _look(connection, dialect, job_id).kind
    return kind


def _look(connection: Connection, dialect: Dialect, job_id: int) -> sa.Row[Any]:
    _refuse_impossible(job_id)
    row = connection.execute(dialect.acts.look, {"job_id": job_id}).first()
    if row is None:
        raise JobNotFoundError(f"there is no job {job_id} in this database")
    return row


def _refuse_impossible(job_id: int) -> None:
    """An id that no job can have would be an error of the database."""
    if not 0 < job_id <= MAX_ID:
        raise JobNotFoundError(f"there is no job {job_id} in this database")


def refusal(
    row: sa.Row[Any], connection: Connection, dialect: Dialect, verb: str
) -> InvalidTransitionError | DuplicateError:
    """Why a verb does not fit a job as it is now."""
    if verb == "replay" and row.unique_key is not None and State(row.state).is_terminal:
        key = (row.kind, row.unique_key)
        if holder := holders_of(connection, dialect, [key]).get(key):
            return DuplicateError([Duplicate(0, *key, holder)])
    if verb == "skip" and row.state in PEOPLES_VERBS[verb]:
        return InvalidTransitionError(
            f"job {row.id} is {row.state}, but halts no sequence and is no dead letter, so there "
            "is nothing to skip"
        )
    allowed = [name for name, states in PEOPLES_VERBS.items() if row.state in states]
    return InvalidTransitionError(
        f"job {row.id} is {row.state}, so it can't be {PARTICIPLES[verb]}; "
        f"it allows: {', '.join(allowed) or 'nothing'}"
    )


PARTICIPLES: Mapping[str, str] = {
    "cancel": "cancelled",
    "pause": "paused",
    "resume": "resumed",
    "replay": "replayed",
    "skip": "skipped",
    "reschedule": "rescheduled",
}
"""What a job is when a verb was done to it."""


# ---- queues --------------------------------------------------------------------------------------


def pause_queue(connection: Connection, dialect: Dialect, queue: str, by: str | None) -> None:
    """Nobody claims from the queue until it is resumed. Jobs that run go on; enqueue works."""
    given = {"name": queue, "by": by, "now": dialect.now()}
    connection.execute(dialect.acts.pause_queue, given)


def resume_queue(connection: Connection, dialect: Dialect, queue: str) -> bool:
    """Claim from the queue again; False if it was not paused."""
    return connection.execute(dialect.acts.resume_queue, {"of_name": queue}).first() is not None


# ---- sequences -----------------------------------------------------------------------------------


def pause_sequence(connection: Connection, dialect: Dialect, key: str, by: str | None) -> None:
    """No job of the sequence starts until it is resumed. One that runs goes on.

    The head is locked before the pause is written, and looked up again until the one that is locked
    is the present one: its place can't be handed on to a job that knows nothing of the pause.
    """
    _lock_head(connection, dialect, key)
    given = {"of_key": key, "by": by, "now": dialect.now()}
    connection.execute(dialect.acts.pause_sequence, given)
    connection.execute(dialect.acts.hold_back_head, {"of_key": key, "now": dialect.now()})


def resume_sequence(connection: Connection, dialect: Dialect, key: str) -> bool:
    """Let the sequence go on; False if it was not paused."""
    _lock_head(connection, dialect, key)
    if connection.execute(dialect.acts.resume_sequence, {"of_key": key}).first() is None:
        return False
    connection.execute(dialect.acts.let_head_go, {"of_key": key, "now": dialect.now()})
    return True


def _lock_head(connection: Connection, dialect: Dialect, key: str) -> None:
    """Lock the present head: looked up again until the one that is locked is the present one."""
    locked = None
    while (head := connection.scalar(dialect.acts.lock_head, {"key": key})) != locked:
        locked = head
