"""The life of a job: one short function a verb, in the order in which a job meets them.

Each takes a synchronous Connection and the :class:`~cyclone_sqla.dialects.Dialect` of its database.
The first part runs in the caller's transaction, the second in a worker's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection

from cyclone_sqla import statements
from cyclone_sqla.admission import (
    AfterRelease,
    hand_on,
    handing_on,
    has_delayed,
    new_heads,
    owing,
)
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.dialects import Dialect, Ended, Rows, Step, Turn
from cyclone_sqla.errors import (
    CycloneError,
    Duplicate,
    DuplicateError,
    DuplicatePositionError,
    InvalidJobError,
    LeaseLostError,
    SequenceGapError,
)
from cyclone_sqla.failures import Failure
from cyclone_sqla.job_spec import JobRef, JobSpec
from cyclone_sqla.lifecycle import State, WaitsFor
from cyclone_sqla.line_statements import KEYS
from cyclone_sqla.models import EPOCH
from cyclone_sqla.outcomes import (
    Cancelled,
    CancelledOutcome,
    Completed,
    Discarded,
    GivenBack,
    Outcome,
    Retried,
    Snoozed,
)
from cyclone_sqla.statements import NewJob

T = TypeVar("T")

COPY_FROM = 100
"""So many plain jobs are copied, where the database can: of fewer, two round trips are the most."""

# ==== in the caller's transaction =================================================================


def enqueue(connection: Connection, dialect: Dialect, spec: JobSpec, origin: str | None) -> JobRef:
    """Insert one job, or find the one that holds its key.

    Raises DuplicateError if an active job holds the unique key and ``on_duplicate`` is "raise". The
    caller's transaction is usable after it.
    """
    if dialect.ids is not None:
        return enqueue_many(connection, dialect, [spec], origin)[0]
    dialect.refuse_unfit(connection)

    def attempt() -> JobRef:
        insert = _insert_or_find if spec.idempotency_key is None else _enqueue_once
        ref = insert(connection, dialect, spec, origin)
        _number_sequences(connection, dialect, [spec] if ref.created else [])
        return ref

    return _guarded(connection, dialect, [spec], attempt)


def enqueue_many(
    connection: Connection, dialect: Dialect, specs: Sequence[JobSpec], origin: str | None
) -> list[JobRef]:
    """Insert jobs; the answer to input i is at place i.

    One held key with "raise" means that nothing is inserted, and DuplicateError lists all such
    inputs. Of inputs with one idempotency key the first one counts.
    """
    dialect.refuse_unfit(connection)
    if len(specs) >= COPY_FROM and all(s.is_plain and s.idempotency_key is None for s in specs):
        copied = dialect.copy_plain(connection, specs, origin)
        if copied is not None:
            return copied

    def attempt() -> list[JobRef]:
        return _enqueue_all(connection, dialect, specs, origin)

    return _guarded(connection, dialect, specs, attempt)


class _KeyFreed(Exception):
    """A key was held when an insert met it, and free when its holder was looked up."""


def _guarded(
    connection: Connection, dialect: Dialect, specs: Sequence[JobSpec], attempt: Callable[[], T]
) -> T:
    """Attempt an enqueue, and start over if a key was freed meanwhile.

    Over, with nothing of the first attempt left: to go on where it stopped would lock keys out of
    order, and two bulk enqueues could deadlock.
    """
    has_keys = any(spec.unique or spec.idempotency_key or spec.position for spec in specs)
    with dialect.enqueueing(connection):
        if not has_keys:
            return attempt()
        while True:
            try:
                with dialect.conflict_guard(connection, many=len(specs) > 1):
                    return attempt()
            except _KeyFreed:
                continue


def _insert_or_find(
    connection: Connection, dialect: Dialect, spec: JobSpec, origin: str | None
) -> JobRef:
    if spec.sequence_lock:
        dialect.lock_sequence(connection, spec.sequence or "")
    if spec.position is not None:
        _check_position(connection, dialect, spec)
    if spec.is_plain:
        plain = {
            "kind": spec.kind,
            "queue": spec.queue,
            "priority": spec.priority,
            "arguments": spec.arguments,
            "max_attempts": spec.max_attempts,
            "origin": origin,
            "now": dialect.now(),
        }
        return _created(spec, connection.execute(dialect.sql.insert_plain, plain).first())
    values = {**_values(spec, origin), "arguments": spec.arguments, "now": dialect.now()}
    if spec.unique is None and spec.position is None:
        return _created(spec, connection.execute(dialect.sql.insert_one, values).first())
    inserted = connection.execute(dialect.sql.insert_one_unless_held, values).first()
    if inserted is not None:
        return _created(spec, inserted)
    return _met(connection, dialect, spec)


def _met(connection: Connection, dialect: Dialect, spec: JobSpec) -> JobRef:
    """What kept a job out: its position, which is refused, or its key, whose holder is found."""
    if spec.position is not None:
        _check_position(connection, dialect, spec)
    if spec.unique is None:
        raise _KeyFreed
    (holder,) = _holders_met(connection, dialect, [(spec.kind, spec.unique)]).values()
    if spec.on_duplicate == "return":
        return holder
    raise DuplicateError([Duplicate(0, spec.kind, spec.unique, holder)])


# ---- positions in a sequence ---------------------------------------------------------------------


def _check_position(
    connection: Connection,
    dialect: Dialect,
    spec: JobSpec,
    beside: Collection[tuple[str, int]] = (),
) -> None:
    """Refuse a position that is taken, or beside jobs without one, or (if asked) behind a gap.

    ``beside`` are places of the same call. The gap is judged by what is visible now: of two
    transactions that overlap, the one with the larger position sees a gap.
    """
    key, position = _place_of(spec)
    facts = connection.execute(dialect.lines.position_facts, {"key": key, "at": position}).one()
    through = facts.through or 0
    if facts.holder is not None or position <= through or (key, position) in beside:
        raise DuplicatePositionError(key, position, facts.holder)
    if facts.has_unpositioned and facts.through is None:
        raise InvalidJobError(
            f"position: sequence {key!r} has jobs without positions; give all its jobs one or none"
        )
    follows = facts.has_predecessor or position == through + 1 or (key, position - 1) in beside
    if spec.reject_gap and not follows:
        raise SequenceGapError(key, position)


def _check_positions(connection: Connection, dialect: Dialect, specs: Iterable[JobSpec]) -> None:
    """All positions of one call, before anything is inserted."""
    seen: set[tuple[str, int]] = set()
    for spec in sorted((s for s in specs if s.position is not None), key=_place_of):
        _check_position(connection, dialect, spec, seen)
        seen.add(_place_of(spec))


def _place_of(spec: JobSpec) -> tuple[str, int]:
    return spec.sequence or "", spec.position or 0


def _number_sequences(connection: Connection, dialect: Dialect, specs: Iterable[JobSpec]) -> None:
    """Write down which keys have positions: last, so that a refused job leaves nothing behind."""
    keys = sorted({spec.sequence or "" for spec in specs if spec.position is not None})
    if keys:
        bound = dialect.syntax.bind("keys", KEYS, [(key,) for key in keys])
        connection.execute(dialect.lines.number_new, bound)
        connection.execute(dialect.lines.number_known, bound)


# ---- idempotency keys: taken before the job is inserted, then given its id -----------------------

_Key: TypeAlias = tuple[str, str]
"""A kind, and a key of that kind."""


def _enqueue_once(
    connection: Connection, dialect: Dialect, spec: JobSpec, origin: str | None
) -> JobRef:
    key = (spec.kind, spec.idempotency_key or "")
    known = _take_keys(connection, dialect, {key: spec.queue})
    if known:
        return known[key]
    with _giving_back(connection, dialect, [key]):
        ref = _insert_or_find(connection, dialect, spec, origin)
    _name_keys(connection, dialect, {key: ref.id})
    return ref


def _take_keys(
    connection: Connection, dialect: Dialect, queues: Mapping[_Key, str]
) -> dict[_Key, JobRef]:
    """Take idempotency keys for jobs in these queues; the first jobs of those taken before.

    Whoever else takes one waits for this transaction. They are taken in one order, so that two bulk
    enqueues never deadlock on them.
    """
    if not queues:
        return {}
    rows = [(*key, queue) for key, queue in queues.items()]
    bound = dialect.syntax.bind("keys", statements.TAKEN_KEY, rows)
    taken = connection.execute(dialect.sql.take_keys, {**bound, "now": dialect.now()})
    rest = queues.keys() - {(row.kind, row.key) for row in taken}
    known = _jobs_of_keys(connection, dialect, rest)
    if len(known) < len(rest):
        raise _KeyFreed  # by retention
    return known


def _jobs_of_keys(
    connection: Connection, dialect: Dialect, keys: Collection[_Key]
) -> dict[_Key, JobRef]:
    """The first job of each key, without a state if only the key is left of it."""
    if not keys:
        return {}
    bound = dialect.syntax.bind("keys", statements.KEY, list(keys))
    return {
        (row.kind, row.key): JobRef(
            row.job_id, row.kind, row.queue, created=False, state=row.state and State(row.state)
        )
        for row in connection.execute(dialect.sql.jobs_of_keys, bound)
    }


def _name_keys(connection: Connection, dialect: Dialect, ids: Mapping[_Key, int]) -> None:
    """Tie keys just taken to their jobs."""
    if ids:
        rows = [(*key, job_id) for key, job_id in ids.items()]
        bound = dialect.syntax.bind("keys", statements.NAMED_KEY, rows)
        connection.execute(dialect.sql.name_keys, bound)


@contextmanager
def _giving_back(
    connection: Connection, dialect: Dialect, keys: Collection[_Key]
) -> Generator[None]:
    """What does not go in burns no key that was taken for it."""
    try:
        yield
    except (CycloneError, _KeyFreed):
        if keys:
            bound = dialect.syntax.bind("keys", statements.KEY, list(keys))
            connection.execute(dialect.sql.give_back_keys, bound)
        raise


# ---- many ----------------------------------------------------------------------------------------


def _enqueue_all(
    connection: Connection, dialect: Dialect, specs: Sequence[JobSpec], origin: str | None
) -> list[JobRef]:
    keys = {
        i: (spec.kind, spec.idempotency_key)
        for i, spec in enumerate(specs)
        if spec.idempotency_key is not None
    }
    firsts = _firsts(keys)
    known = _take_keys(connection, dialect, {key: specs[i].queue for key, i in firsts.items()})
    taken = {key: i for key, i in firsts.items() if key not in known}
    new = {i: s for i, s in enumerate(specs) if i not in keys or taken.get(keys[i]) == i}
    with _giving_back(connection, dialect, taken):
        refs = _insert_all(connection, dialect, new, origin)
    _name_keys(connection, dialect, {key: refs[i].id for key, i in taken.items()})
    known |= {key: refs[i]._replace(created=False) for key, i in taken.items()}
    return [refs[i] if i in refs else known[keys[i]] for i in range(len(specs))]


def _insert_all(
    connection: Connection, dialect: Dialect, specs: Mapping[int, JobSpec], origin: str | None
) -> dict[int, JobRef]:
    """Ids by input order. Whose key is held already is answered without an insert: a conflict is
    then only with what others insert at this moment.
    """
    if not specs:
        return {}
    for key in sorted({spec.sequence or "" for spec in specs.values() if spec.sequence_lock}):
        dialect.lock_sequence(connection, key)
    ids = dict(zip(specs, dialect.next_ids(connection, len(specs)), strict=True))
    _check_positions(connection, dialect, specs.values())
    keys = {i: (spec.kind, spec.unique) for i, spec in specs.items() if spec.unique is not None}
    firsts = _firsts(keys)
    held = holders_of(connection, dialect, firsts)
    _refuse_duplicates(specs, keys, held)
    firsts = {key: i for key, i in firsts.items() if key not in held}
    new = {
        i: (ids[i], spec) for i, spec in specs.items() if i not in keys or firsts.get(keys[i]) == i
    }
    refs = _insert_rows(connection, dialect, new, origin)
    missing = sorted(new.keys() - refs.keys())
    _check_positions(connection, dialect, [specs[i] for i in missing])
    if any(i not in keys for i in missing):
        raise _KeyFreed
    held |= _holders_met(connection, dialect, [keys[i] for i in missing])
    _refuse_duplicates(specs, keys, held)
    held |= {key: refs[i]._replace(created=False) for key, i in firsts.items() if i in refs}
    _number_sequences(connection, dialect, [specs[i] for i in refs])
    return {i: refs[i] if i in refs else held[keys[i]] for i in specs}


def _firsts(keys: Mapping[int, _Key]) -> dict[_Key, int]:
    """For each key the first input that has it."""
    return {key: i for i, key in reversed(list(keys.items()))}


def _refuse_duplicates(
    specs: Mapping[int, JobSpec], keys: Mapping[int, _Key], held: Mapping[_Key, JobRef]
) -> None:
    """Refuse inputs whose key is held, by a job or by an input before them, and must not be."""
    firsts = _firsts(keys)
    refused = [
        Duplicate(i, *key, held.get(key))
        for i, key in keys.items()
        if specs[i].on_duplicate == "raise" and (key in held or firsts[key] != i)
    ]
    if refused:
        raise DuplicateError(refused)


def _insert_rows(
    connection: Connection,
    dialect: Dialect,
    new: Mapping[int, tuple[int, JobSpec]],
    origin: str | None,
) -> dict[int, JobRef]:
    """Rows go in in the order of their keys: two bulk enqueues never deadlock on them."""
    jobs = list(new.values())
    insert = dialect.sql.insert_many
    if any(spec.unique is not None or spec.position is not None for _, spec in jobs):
        insert = dialect.sql.insert_many_unless_held
        jobs.sort(key=_order_of_keys)
    states: dict[int, str] = {}
    for batch in _batches(_rows_of(jobs, origin)):
        bound = dialect.syntax.bind_jobs("jobs", statements.NUMBERED_JOB, batch)
        told = connection.execute(insert, {**bound, "now": dialect.now()}).all()
        states |= dialect.syntax.states_of(told)
    return {
        i: JobRef(job_id, spec.kind, spec.queue, True, _STATES[states[job_id]])
        for i, (job_id, spec) in new.items()
        if job_id in states
    }


def _order_of_keys(job: tuple[int, JobSpec]) -> tuple[str, str, int]:
    job_id, spec = job
    return spec.kind, spec.unique or "", job_id


def _rows_of(jobs: Iterable[tuple[int, JobSpec]], origin: str | None) -> Generator[NewJob]:
    kind, rest, shared = "", tuple[object, ...](), dict[str, Any]()
    for job_id, spec in jobs:
        if spec.kind != kind or spec.rest != rest:
            kind, rest, shared = spec.kind, spec.rest, _values(spec, origin)
        yield NewJob(job_id, spec.arguments, shared)


def _batches(rows: Iterable[NewJob]) -> Generator[list[NewJob]]:
    """Rows for one INSERT each: few and small enough for its parameters."""
    batch, size = list[NewJob](), 0
    for row in rows:
        size += len(row.arguments)
        if batch and (len(batch) == INSERT_BATCH or size > INSERT_SIZE):
            yield batch
            batch, size = [], len(row.arguments)
        batch.append(row)
    if batch:
        yield batch


INSERT_BATCH = 5_000
"""The most rows of one INSERT."""

INSERT_SIZE = 16 * 1024 * 1024
"""The most JSON of one INSERT of several rows, in characters: no database takes a parameter of more
than 1 GB, and the driver makes copies of it.
"""

_STATES = {state.value: state for state in State}


def _holders_met(
    connection: Connection, dialect: Dialect, keys: Collection[_Key]
) -> dict[_Key, JobRef]:
    """The holders that an insert has just met."""
    holders = holders_of(connection, dialect, keys)
    if len(holders) < len(keys):
        raise _KeyFreed  # a holder has ended
    return holders


def holders_of(
    connection: Connection, dialect: Dialect, keys: Collection[_Key]
) -> dict[_Key, JobRef]:
    """Who holds these unique keys now."""
    if not keys:
        return {}
    bound = dialect.syntax.bind("keys", statements.KEY, list(keys))
    found = connection.execute(dialect.sql.holders, bound)
    return {(row.kind, row.unique_key): ref_of(row) for row in found}


def ref_of(row: sa.Row[Any]) -> JobRef:
    """A job that was there before."""
    return JobRef(row.id, row.kind, row.queue, created=False, state=State(row.state))


def _created(spec: JobSpec, row: Any) -> JobRef:
    job_id, state = row
    return JobRef(job_id, spec.kind, spec.queue, True, _STATES[state])


def _values(spec: JobSpec, origin: str | None) -> dict[str, Any]:
    """A spec as the columns of :data:`~cyclone_sqla.statements.NEW_JOB`, but for its arguments."""
    return {
        "kind": spec.kind,
        "queue": spec.queue,
        "priority": spec.priority,
        "headers": json.dumps(spec.headers) if spec.headers else None,
        "unique_key": spec.unique,
        "sequence_key": spec.sequence,
        "position": spec.position,
        "on_failure": spec.on_failure,
        "process_at": spec.process_at,
        "delay": spec.process_in,
        "deadline": spec.deadline,
        "timeout": spec.timeout,
        "max_attempts": spec.max_attempts,
        "origin": origin,
        "tenant": spec.tenant,
        "trace_id": spec.trace_id,
    }


# ==== in a worker's own transactions ==============================================================


def stage(connection: Connection, dialect: Dialect, limit: int) -> list[str]:
    """Make due jobs available; the queues that got work, once for each job."""
    params = {"limit": limit, "now": dialect.now()}
    staged = connection.execute(dialect.sql.stage, params).all()
    return [row.queue for row in staged if row.state == State.AVAILABLE]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What lies ahead: when the next job is due, and whether anything waits to be admitted."""

    due_in: timedelta | None
    has_incoming: bool
    has_debts: bool
    has_held_back: bool


def look_ahead(connection: Connection, dialect: Dialect) -> Outlook:
    """One look at what waits for a time or for its place in a line."""
    row = connection.execute(dialect.sql.outlook, {"now": dialect.now()}).one()
    return Outlook(row.due_in, bool(row.has_incoming), bool(row.has_debts), bool(row.has_held_back))


@dataclass(frozen=True, slots=True)
class Claiming:
    """What a worker asks for: up to ``slots[queue]`` jobs of each queue, of the kinds it knows."""

    slots: Mapping[str, int]
    kinds: Sequence[str]
    worker: str
    lease_length: timedelta
    hands_over: bool = False
    """Whether the next in line of a head that ends may be claimed before those that wait longer."""
    only_next: bool = False
    """Whether the next in line is enough then, where claims take it in the same call."""

    @property
    def params(self) -> dict[str, Any]:
        """The values of the statement that claims, but for the slots."""
        return {
            "kinds": list(self.kinds),
            "claimed_by": self.worker,
            "lease_length": self.lease_length,
        }


def claim(connection: Connection, dialect: Dialect, wanted: Claiming) -> list[ClaimedJob]:
    """Take jobs, of each queue by priority and id."""
    slots, params = wanted.slots, wanted.params
    turn = dialect.take_turn(connection, Ended(), slots, params, hands_over=False, only_next=False)
    return _in_order(dialect.claim(connection, slots, params) if turn is None else turn.claimed)


def claim_this(
    connection: Connection, dialect: Dialect, job_id: int, worker: str, lease_length: timedelta
) -> ClaimedJob | None:
    """Take one job, if it is available and nobody has paused its queue or its sequence."""
    params = {"job_id": job_id, "claimed_by": worker, "lease_length": lease_length}
    return next(iter(dialect.claim_this(connection, params)), None)


def settle_and_claim(
    connection: Connection,
    dialect: Dialect,
    settlements: Sequence[Settlement],
    wanted: Claiming,
    *,
    history_limit: int,
) -> tuple[Settled, list[ClaimedJob]]:
    """:func:`settle`, then :func:`claim`; one round trip if all the runs simply returned."""
    if not all(_is_plain(s) for s in settlements):
        settled = settle(connection, dialect, settlements, history_limit=history_limit)
        return settled, claim(connection, dialect, wanted)
    turn = _take_turn(connection, dialect, settlements, wanted)
    settled, asked = _judge_completed(connection, dialect, settlements, turn)
    if asked:
        settled.add(settle(connection, dialect, asked, history_limit=history_limit))
    return settled, _in_order(turn.claimed)


def _take_turn(
    connection: Connection, dialect: Dialect, settlements: Sequence[Settlement], wanted: Claiming
) -> Turn:
    slots, params = wanted.slots, wanted.params
    ended = Ended(
        [s.job_id for s in settlements],
        [s.lease for s in settlements],
        [_result(s.outcome) for s in settlements],
        [s.job_id for s in settlements if s.sequence_key is not None],
    )
    modes = {"hands_over": wanted.hands_over, "only_next": wanted.only_next}
    turn = dialect.take_turn(connection, ended, slots, params, **modes)
    if turn is not None:
        return turn
    steps = _and_hand_on(dialect, _completing(dialect, settlements), settlements)
    rows, claimed = dialect.run_and_claim(connection, steps, slots, params)
    return _turn_of(rows, claimed)


def _turn_of(rows: Sequence[Rows], claimed: Sequence[ClaimedJob] = ()) -> Turn:
    """``rows`` are those of the steps of :func:`_and_hand_on`."""
    written, *handed_on = rows
    return Turn([row.id for row in written], has_delayed(new_heads(handed_on)), claimed)


def _in_order(claimed: Iterable[ClaimedJob]) -> list[ClaimedJob]:
    return sorted(claimed, key=_ORDER)


_ORDER = attrgetter("priority", "id")


class HeldRun(NamedTuple):
    """A run as its worker holds it: of one job, an older run may still be held beside a new one."""

    job_id: int
    lease: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """What became of the leases that a worker asked to renew."""

    lost: list[HeldRun]
    cancel_requested: list[HeldRun]


def renew(
    connection: Connection,
    dialect: Dialect,
    runs: Collection[HeldRun],
    lease_length: timedelta,
) -> Renewal:
    """Lengthen the leases of runs.

    A row that did not come back may be locked by somebody: it is lost only if a plain read shows
    another lease or state.
    """
    bound = dialect.syntax.bind("held", statements.LEASED, sorted(runs))
    params = {**bound, "lease_length": lease_length, "now": dialect.now()}
    renewed = connection.execute(dialect.sql.renew, params).all()
    missing = set(runs) - {HeldRun(row.id, row.lease) for row in renewed}
    return Renewal(
        lost=sorted(missing - _still_held(connection, dialect, missing)),
        cancel_requested=[
            HeldRun(row.id, row.lease) for row in renewed if row.cancel_requested_at is not None
        ],
    )


def _still_held(
    connection: Connection, dialect: Dialect, runs: Collection[HeldRun]
) -> set[HeldRun]:
    found = _leases_of(connection, dialect, {run.job_id for run in runs})
    return {run for run in runs if _is_held(found.get(run.job_id), run.lease)}


def _leases_of(
    connection: Connection, dialect: Dialect, ids: Collection[int]
) -> dict[int, sa.Row[Any]]:
    """The jobs' present leases and states, by a plain read."""
    if not ids:
        return {}
    bound = dialect.syntax.bind("wanted", statements.ID, [(job_id,) for job_id in ids])
    return {row.id: row for row in connection.execute(dialect.sql.leases_of, bound)}


def _is_held(row: sa.Row[Any] | None, lease: int) -> bool:
    return row is not None and row.state == State.RUNNING and row.lease == lease


class Settlement(NamedTuple):
    """One run's end, to be written under its lease."""

    job_id: int
    lease: int
    attempt: int
    worker: str
    outcome: Outcome
    sequence_key: str | None
    """Decides whether the end is one statement, so nobody may leave it out."""


@dataclass(slots=True)
class Settled:
    """What became of a batch, by job: each is written, busy or refused.

    ``states`` holds what was written, with the state that followed. ``busy`` are those that
    somebody has locked just now. ``refused`` are those whose lease is not held any more, with the
    state in which they were found if no later lease was given: somebody ended that very run.
    """

    states: dict[int, State] = field(default_factory=dict[int, State])
    busy: list[int] = field(default_factory=list[int])
    refused: dict[int, State | None] = field(default_factory=dict[int, "State | None"])
    has_delayed: bool = False
    """Whether a sequence has a head now whose time has not come."""

    def add(self, other: Settled) -> None:
        """Take in what became of other jobs."""
        self.states |= other.states
        self.busy += other.busy
        self.refused |= other.refused
        self.has_delayed |= other.has_delayed


def settle(
    connection: Connection,
    dialect: Dialect,
    settlements: Sequence[Settlement],
    *,
    history_limit: int,
    after_release: AfterRelease = handing_on,
) -> Settled:
    """Write how runs ended, of every job one run at most.

    Runs that simply returned are the hot path. Any other end, and that of a run that was asked to
    stop, is written together with its history. ``after_release`` says what becomes of the places of
    heads.
    """
    plain, others = _apart(settlements)
    settled = Settled()
    if plain:
        settled, asked = _complete(connection, dialect, plain, after_release)
        others += asked
    if others:
        with dialect.together(connection):
            settled.add(_release(connection, dialect, others, history_limit, after_release))
    return settled


def settle_within(
    connection: Connection, dialect: Dialect, settlement: Settlement, *, history_limit: int
) -> bool:
    """Write a run's end in its action's own transaction: the last words before the commit.

    Waits for whoever has the job's row locked. Whether a worker has to look after the sequence: its
    place was left as a debt, or the new head waits for its time.

    Raises LeaseLostError if the run does not hold its lease any more, Cancelled if it was asked to
    stop: nothing of the transaction may then be committed.
    """
    settled, owes = settle_one(connection, dialect, settlement, history_limit=history_limit)
    state = settled.states.get(settlement.job_id)
    if state is None:
        raise LeaseLostError(
            f"the lease of job {settlement.job_id} was lost: its transaction is rolled back"
        )
    if state == State.CANCELLED:
        raise Cancelled("cancellation was asked for")
    return owes or settled.has_delayed


def settle_one(
    connection: Connection, dialect: Dialect, settlement: Settlement, *, history_limit: int
) -> tuple[Settled, bool]:
    """Write how one run ended, behind whoever has the job's row locked: written, or refused.

    And whether its place in a sequence was left as a debt, because the transaction sees no later
    commits.
    """
    owes = settlement.sequence_key is not None and not dialect.sees_commits(connection)
    write = partial(
        settle,
        connection,
        dialect,
        [settlement],
        history_limit=history_limit,
        after_release=owing if owes else handing_on,
    )
    settled = write()
    if settled.busy:
        connection.execute(dialect.sql.wait_for, {"id": settlement.job_id})
        settled = write()
    return settled, owes


def present(connection: Connection, dialect: Dialect) -> datetime:
    """The time that due times and leases go by."""
    now: datetime = connection.execute(dialect.sql.present, {"now": dialect.now()}).scalar_one()
    return now


def is_there(connection: Connection, dialect: Dialect, job_id: int) -> bool:
    """Whether a job has this id, by a plain read."""
    return bool(_leases_of(connection, dialect, [job_id]))


def still_holds(connection: Connection, dialect: Dialect, run: HeldRun) -> bool:
    """Whether a run holds its lease, by a plain read."""
    return bool(_still_held(connection, dialect, [run]))


def _apart(settlements: Iterable[Settlement]) -> tuple[list[Settlement], list[Settlement]]:
    """The ends of runs that simply returned, and all others."""
    plain: list[Settlement] = []
    others: list[Settlement] = []
    for s in settlements:
        (plain if _is_plain(s) else others).append(s)
    return plain, others


def _is_plain(settlement: Settlement) -> bool:
    outcome = settlement.outcome
    return isinstance(outcome, Completed) and outcome.failure is None


def _complete(
    connection: Connection,
    dialect: Dialect,
    settlements: Sequence[Settlement],
    after_release: AfterRelease,
) -> tuple[Settled, list[Settlement]]:
    """Write the ends of runs that returned; those asked to stop are left as they are, and named."""
    if len(settlements) == 1:
        complete = _completing_one(dialect, settlements[0])
    else:
        complete = _completing(dialect, settlements)
    rows = dialect.run(connection, _and_hand_on(dialect, complete, settlements, after_release))
    return _judge_completed(connection, dialect, settlements, _turn_of(rows))


def _completing(dialect: Dialect, settlements: Sequence[Settlement]) -> Step:
    rows = [(s.job_id, s.lease, _result(s.outcome)) for s in settlements]
    bound = dialect.syntax.bind("done", statements.COMPLETED, rows)
    return Step(dialect.sql.complete, {**bound, "now": dialect.now()})


def _completing_one(dialect: Dialect, settlement: Settlement) -> Step:
    values = {
        "one_id": settlement.job_id,
        "one_lease": settlement.lease,
        "one_result": _result(settlement.outcome),
        "now": dialect.now(),
    }
    return Step(dialect.sql.complete_one, values)


def _and_hand_on(
    dialect: Dialect,
    complete: Step,
    settlements: Sequence[Settlement],
    after_release: AfterRelease = handing_on,
) -> list[Step]:
    """The statements that write these ends."""
    heads = [s.job_id for s in settlements if s.sequence_key is not None]
    return [complete, *after_release(dialect, heads)] if heads else [complete]


def _judge_completed(
    connection: Connection, dialect: Dialect, settlements: Sequence[Settlement], turn: Turn
) -> tuple[Settled, list[Settlement]]:
    """What became of each, and those that were asked to stop and are left as they are."""
    states = dict.fromkeys(turn.settled, State.COMPLETED)
    missing = [s for s in settlements if s.job_id not in states]
    if not missing:
        return Settled(states, has_delayed=turn.has_delayed), []
    found = _leases_of(connection, dialect, [s.job_id for s in missing])
    asked = [
        s
        for s in missing
        if _is_held(found.get(s.job_id), s.lease)
        and found[s.job_id].cancel_requested_at is not None
    ]
    settled = _judged(states, [s for s in missing if s not in asked], found)
    settled.has_delayed = turn.has_delayed
    return settled, asked


def _release(
    connection: Connection,
    dialect: Dialect,
    settlements: Sequence[Settlement],
    history_limit: int,
    after_release: AfterRelease = handing_on,
    *,
    only_expired: bool = False,
) -> Settled:
    """Write every other end of a run, and its history."""
    sql = dialect.sql
    statement = sql.release_expired if only_expired else sql.release
    rows = [(s.job_id, s.lease, *_release_values(s.outcome)) for s in settlements]
    bound = dialect.syntax.bind("ended", statements.RELEASED, rows)
    written = connection.execute(statement, {**bound, "now": dialect.now()}).all()
    heads = hand_on(connection, dialect, _released(written), after_release)
    states = {row.id: State(row.state) for row in written}
    missing = [s for s in settlements if s.job_id not in states]
    found = _leases_of(connection, dialect, [s.job_id for s in missing])
    settled = _judged(states, missing, found)
    settled.has_delayed = has_delayed(heads)
    _write_history(connection, dialect, settlements, settled.states, history_limit)
    return settled


def _released(written: Rows) -> list[int]:
    """The heads among the settled rows that have left their line."""
    return [row.id for row in written if row.sequence_key is not None and row.sequence_open is None]


def _judged(
    states: dict[int, State],
    missing: Sequence[Settlement],
    found: Mapping[int, sa.Row[Any]],
) -> Settled:
    """Tell apart what was written, what somebody has locked just now, and what was fenced off."""
    settled = Settled(states)
    for s in missing:
        row = found.get(s.job_id)
        if _is_held(row, s.lease):
            settled.busy.append(s.job_id)
        else:
            is_latest = row is not None and row.lease == s.lease
            settled.refused[s.job_id] = State(row.state) if row and is_latest else None
    return settled


def _result(outcome: Outcome) -> str | None:
    return outcome.result if isinstance(outcome, Completed) else None


_Ended = tuple[str, str | None, timedelta | None, int, int, int, bool, str | None]


def _release_values(outcome: Outcome) -> _Ended:
    """The columns of :data:`~cyclone_sqla.statements.RELEASED` after id and lease."""
    failure = _failure_of(outcome)
    error = None if failure is None else failure.error
    match outcome:
        case Completed():
            return (State.COMPLETED, None, None, 0, 0, 0, False, error)
        case Retried(delay=delay, crashed=crashed) if delay:
            return (State.PENDING, WaitsFor.RETRY, delay, 0, 0, int(crashed), True, error)
        case Retried(crashed=crashed):
            return (State.AVAILABLE, None, timedelta(0), 0, 0, int(crashed), True, error)
        case Snoozed(delay=delay):
            return (State.PENDING, WaitsFor.TIME, delay, 0, 1, 0, False, error)
        case Discarded():
            return (State.DISCARDED, None, None, 0, 0, 0, True, error)
        case CancelledOutcome():
            return (State.CANCELLED, None, None, 0, 0, 0, False, error)
        case GivenBack():
            return (State.AVAILABLE, None, None, 1, 0, 0, False, None)


def _write_history(
    connection: Connection,
    dialect: Dialect,
    settlements: Sequence[Settlement],
    states: Mapping[int, State],
    limit: int,
) -> None:
    """One entry for every failed or cancelled attempt; the oldest ones of a long history go."""
    entries = [
        (
            s.job_id,
            _event(s.outcome, states[s.job_id]),
            s.attempt,
            s.lease,
            s.worker,
            None,
            *told,
        )
        for s in settlements
        if s.job_id in states and (told := _told(s.outcome, states[s.job_id])) is not None
    ]
    if not entries:
        return
    bound = dialect.syntax.bind("entries", statements.ENTRY, entries)
    connection.execute(dialect.sql.record, {**bound, "now": dialect.now()})
    for s in settlements:
        if s.attempt > limit:
            connection.execute(dialect.sql.trim_history, {"job_id": s.job_id, "keep": limit})


def _told(outcome: Outcome, state: State) -> tuple[str | None, str | None] | None:
    """What history keeps of an end: error and details; None if there is nothing to keep."""
    failure = _failure_of(outcome)
    if failure is not None:
        return failure.error, failure.details
    return (None, None) if state == State.CANCELLED else None


def _failure_of(outcome: Outcome) -> Failure | None:
    return None if isinstance(outcome, GivenBack) else outcome.failure


def _event(outcome: Outcome, state: State) -> str:
    if state == State.CANCELLED:
        return "cancel"
    match outcome:
        case Retried(crashed=True):
            return "rescue"
        case Retried():
            return "retry"
        case Snoozed():
            return "snooze"
        case Discarded():
            return "discard"
        case _:
            return "complete"


@dataclass(frozen=True, slots=True)
class LostRun:
    """A running job whose worker is lost: its lease has run out, or it is known to be gone."""

    id: int
    kind: str
    queue: str
    lease: int
    worker: str
    attempt: int
    max_attempts: int
    snoozes: int
    crashes: int

    @property
    def attempts_left(self) -> int:
        """How many more runs the job may have."""
        return max(0, self.max_attempts - (self.attempt - self.snoozes))


def expired_runs(connection: Connection, dialect: Dialect, limit: int) -> list[LostRun]:
    """Runs whose lease has run out: what rescue looks at before it acts."""
    rows = connection.execute(dialect.sql.expired, {"limit": limit, "now": dialect.now()})
    return [LostRun(*row) for row in rows]


def rescue(
    connection: Connection,
    dialect: Dialect,
    runs: Sequence[LostRun],
    backoff: Callable[[LostRun], timedelta],
    *,
    history_limit: int,
) -> Settled:
    """Put back, or discard at the limit, runs whose lease is still the listed one and still run
    out.

    The first crash of a job runs again at once, a second one backs off.
    """
    settlements = [
        _lost(run, "its lease ran out", backoff(run) if run.crashes else timedelta(0))
        for run in runs
    ]
    return _release(connection, dialect, settlements, history_limit, only_expired=True)


def recover(
    connection: Connection,
    dialect: Dialect,
    *,
    limit: int,
    history_limit: int,
    worker: str | None = None,
) -> Settled:
    """Put back at once, or discard at the limit, up to ``limit`` runs, whoever holds their leases.

    Only for a worker that knows itself alone, before it claims anything; or, with ``worker``, that
    knows who held them to be gone. Attempts stay as counted.
    """
    if worker is None:
        rows = connection.execute(dialect.sql.running, {"limit": limit})
    else:
        rows = connection.execute(dialect.sql.running_under, {"limit": limit, "worker": worker})
    settlements = [
        _lost(LostRun(*row), "it was gone when the next one started", timedelta(0)) for row in rows
    ]
    return _release(connection, dialect, settlements, history_limit)


def _lost(run: LostRun, how: str, delay: timedelta) -> Settlement:
    outcome: Outcome
    if run.attempts_left:
        reason = f"worker {run.worker} was lost during attempt {run.attempt}: {how}"
        outcome = Retried(delay, Failure.because(reason, kind="WorkerLost"), crashed=True)
    else:
        reason = (
            f"worker {run.worker} was lost during attempt {run.attempt}, "
            f"the last of {run.max_attempts}"
        )
        outcome = Discarded(Failure.because(reason, kind="WorkerLost"))
    return Settlement(run.id, run.lease, run.attempt, run.worker, outcome, None)


def held_by(connection: Connection, dialect: Dialect, worker: str) -> set[HeldRun]:
    """What a worker holds by the database's account: asked after a lost reply."""
    rows = connection.execute(dialect.sql.running_of, {"worker": worker})
    return {HeldRun(row.id, row.lease) for row in rows}


# ---- retention -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the ended jobs of one state stay, dead letters or the others."""

    state: State
    age: timedelta
    dead_letters: bool = False


class Place(NamedTuple):
    """A place in the order in which ended jobs are pruned."""

    finished_at: datetime
    job_id: int


_BEGINNING = Place(EPOCH, 0)


def oldest_prunable(
    connection: Connection, dialect: Dialect, retention: Retention, after: Place | None
) -> Place | None:
    """The first job behind a place that :func:`prune` would delete, by a plain read."""
    statement = dialect.prune_statement(retention.state, retention.dead_letters, only_look=True)
    found = connection.execute(statement, _prunable(dialect, retention, after)).first()
    return None if found is None else Place(found.finished_at, found.id)


def prune(
    connection: Connection,
    dialect: Dialect,
    retention: Retention,
    after: Place | None,
    limit: int,
) -> Place | None:
    """Delete one batch of ended jobs behind a place; where to go on, None if none was deleted."""
    statement = dialect.prune_statement(retention.state, retention.dead_letters)
    params = {**_prunable(dialect, retention, after), "limit": limit}
    rows = connection.execute(statement, params).all()
    return max((Place(row.finished_at, row.id) for row in rows), default=None)


def _prunable(dialect: Dialect, retention: Retention, after: Place | None) -> dict[str, Any]:
    return {**(after or _BEGINNING)._asdict(), "age": retention.age, "now": dialect.now()}


def has_old_idempotency_key(connection: Connection, dialect: Dialect, age: timedelta) -> bool:
    """Whether any idempotency key is older than its retention, by a plain read."""
    params = {"age": age, "now": dialect.now()}
    return connection.execute(dialect.sql.old_idempotency_key, params).first() is not None


def prune_idempotency_keys(
    connection: Connection, dialect: Dialect, age: timedelta, limit: int
) -> int:
    """Forget idempotency keys older than their retention; how many."""
    params = {"age": age, "limit": limit, "now": dialect.now()}
    return connection.execute(dialect.sql.prune_idempotency_keys, params).rowcount


# ---- workers -------------------------------------------------------------------------------------


def announce(connection: Connection, dialect: Dialect, record: Mapping[str, Any]) -> None:
    """Write a worker's record."""
    connection.execute(dialect.sql.announce, {**record, "now": dialect.now()})


def beat(connection: Connection, dialect: Dialect, worker: str) -> bool:
    """Say that a worker is alive; False if its record is gone."""
    params = {"worker": worker, "now": dialect.now()}
    return connection.execute(dialect.sql.beat, params).first() is not None


def withdraw(connection: Connection, dialect: Dialect, worker: str) -> None:
    """Remove a worker's record."""
    connection.execute(dialect.sql.withdraw, {"worker": worker})


def forget_workers(connection: Connection, dialect: Dialect, age: timedelta) -> int:
    """Remove the records of workers not heard of for ``age``."""
    params = {"age": age, "now": dialect.now()}
    return connection.execute(dialect.sql.forget_workers, params).rowcount
