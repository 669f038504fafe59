"""How a sequenced job gets its place in the line, and how a head hands its place on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Connection

from cyclone_sqla import statements
from cyclone_sqla.dialects import Dialect, Rows, Step
from cyclone_sqla.lifecycle import State, WaitsFor
from cyclone_sqla.line_statements import KEYS


@dataclass(frozen=True, slots=True)
class Admitted:
    """What one look at the incoming jobs did."""

    looked_at: int
    last_id: int
    changed: int
    queues: list[str]
    """Queues that got an available job, once for each job."""
    has_delayed: bool = False
    """Whether a head waits for its time now."""


def admit(connection: Connection, dialect: Dialect, after: int, limit: int) -> Admitted:
    """Give a window of incoming jobs their places: behind their heads, or as heads.

    ``after`` is where the last window ended, so that the incoming jobs of one busy key never hide
    those of others.
    """
    window = connection.execute(dialect.lines.incoming, {"after": after, "limit": limit}).all()
    if not window:
        return Admitted(0, 0, 0, [])
    keys = {row.sequence_key for row in window}
    placed = _place(connection, dialect, [row.id for row in window], keys)
    queues = [row.queue for row in placed if row.state == State.AVAILABLE]
    return Admitted(len(window), window[-1].id, len(placed), queues, has_delayed(placed))


def has_delayed(placed: Sequence[Any]) -> bool:
    """Whether one of these jobs, just placed, is a head that waits for its time."""
    return any(row.waits_for == WaitsFor.TIME for row in placed)


def _place(
    connection: Connection, dialect: Dialect, incoming: Sequence[int], keys: Collection[str]
) -> Sequence[Any]:
    bound = dialect.syntax.bind("incoming", statements.ID, [(job_id,) for job_id in incoming])
    bound |= dialect.syntax.bind("keys", KEYS, [(key,) for key in sorted(keys)])
    return connection.execute(dialect.lines.admit, {**bound, "now": dialect.now()}).all()


AfterRelease: TypeAlias = Callable[[Dialect, Sequence[int]], list[Step]]
"""The statements that follow the release of heads, given by their ids: :func:`handing_on`, or
:func:`owing`.
"""


def handing_on(dialect: Dialect, released: Sequence[int]) -> list[Step]:
    """What follows the release of heads in the same transaction: each hands its place on to the
    next, or keeps it as a debt if none could be admitted though the line goes on.

    Jobs in the list that were not released after all are left as they are.
    """
    jobs = dialect.syntax.bind("released", statements.ID, [(job_id,) for job_id in released])
    return [
        Step(dialect.lines.advance, jobs),
        Step(dialect.lines.admit_next, {**jobs, "now": dialect.now()}),
        Step(dialect.lines.keep_as_debt, jobs),
    ]


def new_heads(handed_on: Sequence[Rows]) -> Rows:
    """The new heads among what the steps of :func:`handing_on`, or of :func:`owing`, returned."""
    return handed_on[1] if len(handed_on) > 1 else ()


def owing(dialect: Dialect, released: Sequence[int]) -> list[Step]:
    """What follows the release of heads where the transaction sees no later commits: their places
    are handed on by a worker.
    """
    jobs = dialect.syntax.bind("released", statements.ID, [(job_id,) for job_id in released])
    return [Step(dialect.lines.owe, jobs)]


def hand_on(
    connection: Connection,
    dialect: Dialect,
    released: Sequence[int],
    after_release: AfterRelease = handing_on,
) -> Rows:
    """What follows the release of heads, in the transaction that released them; the new heads."""
    if not released:
        return ()
    return new_heads(dialect.run(connection, after_release(dialect, released)))


def payable_debts(connection: Connection, dialect: Dialect, after: int, limit: int) -> list[int]:
    """Released heads that still hold their line's place and could hand it on now."""
    return list(connection.scalars(dialect.lines.debts, {"after": after, "limit": limit}))


def pay(connection: Connection, dialect: Dialect, debts: Sequence[int]) -> list[str]:
    """Hand on the places of these debts, as far as nobody has them locked; the queues that got an
    available job.
    """
    bound = dialect.syntax.bind("wanted", statements.ID, [(job_id,) for job_id in debts])
    cleared = connection.scalars(dialect.lines.clear_debts, bound).all()
    heads = hand_on(connection, dialect, cleared)
    return [row.queue for row in heads if row.state == State.AVAILABLE]


def let_go(connection: Connection, dialect: Dialect, limit: int) -> list[str]:
    """Ready the heads that a pause held back and its end missed; the queues that got work."""
    params = {"limit": limit, "now": dialect.now()}
    rows = connection.execute(dialect.lines.let_go, params).all()
    return [row.queue for row in rows if row.state == State.AVAILABLE]


@dataclass(frozen=True, slots=True)
class Swept:
    """What one look along the lines found."""

    looked_at: int
    last_key: str
    headless: list[str]
    """Keys whose jobs wait for their turn behind nobody."""


class Mended(NamedTuple):
    """A line that had lost its head, and the job that is its head now."""

    key: str
    job_id: int


def sweep(connection: Connection, dialect: Dialect, after: str, limit: int) -> Swept:
    """Look at a window of the lines after a key, by a plain read."""
    window = connection.execute(dialect.lines.sweep, {"after": after, "limit": limit}).all()
    headless = [row.key for row in window if row.is_headless]
    return Swept(len(window), window[-1].key if window else "", headless)


def mend(connection: Connection, dialect: Dialect, keys: Collection[str]) -> list[Mended]:
    """Make the first of each of these lines its head, where there still is none and nobody has the
    job locked.
    """
    return [Mended(row.sequence_key, row.id) for row in _place(connection, dialect, [], keys)]
