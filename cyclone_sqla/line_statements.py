"""The statements of sequences: who is first in a line, who becomes its head, who owes a hand-over.

A sequenced job is inserted *incoming*. Workers give it a place: behind the head, or as the head.
The head is a place, not a state; ``admitted`` marks it, and a unique index allows one a key. A head
that is released hands its place on in a second statement, whose snapshot is fresh because it begins
when the head's row is already locked. Where nobody could be admitted though jobs remain, the
released row keeps ``admitted``: a *debt*, which still owns the key's place until it is paid.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy import BigInteger, ColumnElement, Text, bindparam, func, select

from cyclone_sqla.lifecycle import State, WaitsFor
from cyclone_sqla.models import IS_DEBT, IS_HELD_BACK, IS_IN_LINE, IS_INCOMING
from cyclone_sqla.statements import ID, Columns, StatementSet, predicate, word

KEYS: Columns = {"key": Text()}
"""The keys of sequences."""

EARLY = 100
"""How far a look for jobs that wait for their turn goes into a line: its end may be far away."""


class LineStatements(StatementSet):
    """The statements of sequences for one schema in one database's words."""

    # ---- admit: incoming jobs get their place ----------------------------------------------------

    @cached_property
    def incoming(self) -> Any:
        """Incoming jobs after a place in the order: a moving window, so no key hides another."""
        return (
            select(self.job.c.id, self.job.c.sequence_key)
            .where(predicate(IS_INCOMING), self.job.c.id > bindparam("after", type_=BigInteger()))
            .order_by(self.job.c.id)
            .limit(bindparam("limit", type_=sa.Integer()))
        )

    @cached_property
    def admit(self) -> Any:
        """Give the listed incoming jobs their places.

        Whom this statement relies on it has locked: a head that could be locked lets the incoming
        jobs sink behind it, because its releaser then sees them; without a head the first in line,
        if it could be locked, becomes the head. All else stays as it is, to be looked at again.
        """
        heads = self._heads()
        held = self._locked_heads(heads)
        promoted = self._locked_firsts(heads)
        incoming = self._locked_incoming()
        served = sa.or_(
            incoming.c.sequence_key.in_(select(held.c.sequence_key)),
            incoming.c.sequence_key.in_(select(promoted.c.sequence_key)),
        )
        sinking = select(incoming.c.id, sa.false().label("is_head")).where(
            served, incoming.c.id.not_in(select(promoted.c.id))
        )
        placed = sa.union_all(select(promoted.c.id, sa.true().label("is_head")), sinking).subquery(
            "placed"
        )
        job, ready = self.job, self._promotion()
        return (
            sa.update(job)
            .where(job.c.id == placed.c.id)
            .values(
                state=sa.case((placed.c.is_head, ready["state"]), else_=job.c.state),
                waits_for=sa.case(
                    (placed.c.is_head, ready["waits_for"]), else_=word(WaitsFor.TURN)
                ),
                admitted=sa.case((placed.c.is_head, sa.true())),
                updated_at=self.now(),
            )
            .returning(*self._placed)
        )

    def _heads(self) -> sa.CTE:
        """Each key of the listed jobs, and its head, if any."""
        given = self.syntax.rows("keys", KEYS)
        head = self._head_of(given.c.key, given).label("head")
        return select(given.c.key, head).cte("heads")

    def _locked_heads(self, heads: sa.CTE) -> sa.FromClause:
        job = self.job.alias("held_head")
        held: Any = (
            select(job.c.id, job.c.sequence_key)
            .where(self.syntax.one_of(job.c.id, select(heads.c.head)), _is_set(job.c.admitted))
            .order_by(job.c.id)
        )
        return self.syntax.locked(held, job, "held")

    def _locked_firsts(self, heads: sa.CTE) -> sa.FromClause:
        """In order of keys, so that two admits never wait for each other in a circle."""
        job = self.job.alias("first_in_line")
        of_headless = select(self._first_of(heads.c.key, heads)).where(heads.c.head.is_(None))
        firsts: Any = (
            select(job.c.id, job.c.sequence_key)
            .where(self.syntax.one_of(job.c.id, of_headless), self._may_lead(job))
            .order_by(job.c.sequence_key)
        )
        return self.syntax.locked(firsts, job, "promoted")

    def _locked_incoming(self) -> sa.FromClause:
        given, job = self.syntax.rows("incoming", ID), self.job.alias("candidate")
        incoming: Any = (
            select(job.c.id, job.c.sequence_key)
            .where(
                self.syntax.one_of(job.c.id, select(given.c.id)),
                # Without the state, which it implies: with it, the index of all incoming jobs fits.
                job.c.waits_for == word(WaitsFor.ADMISSION),
                self._belongs(job),
            )
            .order_by(job.c.id)
        )
        return self.syntax.locked(incoming, job, "incoming_locked")

    # ---- hand on: the next of released heads -----------------------------------------------------

    @cached_property
    def admit_next(self) -> Any:
        """For each listed job that has left its line without a successor: the first in the line
        becomes the head, in whatever state it is.

        Only after the statement, in the same transaction, that released the listed jobs. A first
        that somebody has locked, or that has left the line since, is not waited for: what remains
        is a debt.
        """
        job, line = self._next_in_line()
        promoted = self.syntax.locked(line.order_by(job.c.id), job, "promoted")
        return (
            sa.update(self.job)
            .where(self.job.c.id == promoted.c.id)
            .values(**self._promotion(), admitted=sa.true(), updated_at=self.now())
            .returning(*self._placed)
        )

    def _next_in_line(self) -> tuple[sa.FromClause, sa.Select[Any]]:
        """For each listed job that has left its line without a successor: the id of the first in
        the line, if it may lead, and the alias of its row.
        """
        given, left = self.syntax.rows("released", ID), self.job.alias("left")
        first = self._first_of(left.c.sequence_key, left)
        firsts = (
            select(left.c.sequence_key, first.label("first"))
            .where(self.syntax.one_of(left.c.id, select(given.c.id)), self._has_left_headless(left))
            .cte("firsts")
        )
        job = self.job.alias("first_in_line")
        is_first = self.syntax.one_of(job.c.id, select(firsts.c.first))
        return job, select(job.c.id).where(is_first, self._may_lead(job))

    def ready_in_line(self, key: ColumnElement[Any]) -> tuple[sa.FromClause, sa.Select[Any]]:
        """Of a line without positions, that its head has just left: the id of the first, if it may
        lead and has nothing more to wait for, and the alias of its row.

        What :attr:`admit_next` asks of any number of lines, where each look at a table counts.
        """
        job = self.job.alias("first_in_line")
        first = self._first_open(key).scalar_subquery()
        is_headless = self._head_of(key, job).is_(None)
        return job, self._leading_now(job, job).where(job.c.id == first, is_headless)

    def ready_in_lines(self) -> tuple[sa.FromClause, sa.FromClause, sa.Select[Any]]:
        """The same of the lines that the listed jobs have just left, and the aliases of those that
        left and of the firsts.
        """
        given, left = self.syntax.rows("released", ID), self.job.alias("left")
        job = self.job.alias("first_in_line")
        first = self._first_open(left.c.sequence_key).correlate(left).lateral("first")
        firsts = left.join(first, sa.true()).join(job, job.c.id == first.c.id)
        is_given = self.syntax.one_of(left.c.id, select(given.c.id))
        ready = self._leading_now(job, firsts).where(is_given, self._has_left_headless(left))
        return left, job, ready

    def _first_open(self, key: ColumnElement[Any]) -> sa.Select[Any]:
        line = self.job.alias("line")
        return (
            select(line.c.id)
            .where(line.c.sequence_key == key, line.c.sequence_open.is_not(None))
            .order_by(func.coalesce(line.c.position, line.c.id))
            .limit(1)
        )

    def _leading_now(self, job: sa.FromClause, firsts: sa.FromClause) -> sa.Select[Any]:
        """As far as they have nothing to wait for, and their keys no positions."""
        sequence = self.tables.sequence.alias("of_line")
        source = firsts.outerjoin(sequence, sequence.c.key == job.c.sequence_key)
        return (
            select(job.c.id)
            .select_from(source)
            .where(
                _is_set(job.c.sequence_open),
                job.c.admitted.is_(None),
                job.c.position.is_(None),
                sequence.c.released_through.is_(None),
                sequence.c.paused_at.is_(None),
                self._waited(job),
                job.c.run_at <= self.now(),
            )
        )

    @cached_property
    def keep_as_debt(self) -> Any:
        """Listed jobs that have left their line without a successor, although it goes on, keep
        their place for now.
        """
        given, job = self.syntax.rows("released", ID), self.job
        # Not EXISTS: as a join it walks the whole line.
        line_goes_on = self._first_of(job.c.sequence_key, job).is_not(None)
        return (
            sa.update(job)
            .where(
                self.syntax.one_of(job.c.id, select(given.c.id)),
                self._has_left_headless(job),
                line_goes_on,
            )
            .values(admitted=sa.true())
            .returning(job.c.id)
        )

    @cached_property
    def owe(self) -> Any:
        """Listed jobs that have left their line keep their place as a debt, whatever follows."""
        given, job = self.syntax.rows("released", ID), self.job
        return (
            sa.update(job)
            .where(
                self.syntax.one_of(job.c.id, select(given.c.id)),
                job.c.sequence_key.is_not(None),
                ~_is_set(job.c.sequence_open),
            )
            .values(admitted=sa.true())
            .returning(job.c.id)
        )

    def _has_left_headless(self, job: Any) -> ColumnElement[bool]:
        """Out of its line, and nobody is the head of that line."""
        head = self._head_of(job.c.sequence_key, job)
        return sa.and_(~_is_set(job.c.sequence_open), head.is_(None))

    # ---- debts -----------------------------------------------------------------------------------

    @cached_property
    def debts(self) -> Any:
        """Debts that can be paid now, after a place in the order.

        One whose next position has not arrived is left alone: its payment would change nothing.
        """
        job, first = self.job.alias("debt"), self.job.alias("first_in_line")
        line = sa.exists().where(
            first.c.id == self._first_of(job.c.sequence_key, job), ~self._may_lead(first)
        )
        return (
            select(job.c.id)
            .where(predicate(IS_DEBT), ~line, job.c.id > bindparam("after", type_=BigInteger()))
            .order_by(job.c.id)
            .limit(bindparam("limit", type_=sa.Integer()))
        )

    @cached_property
    def clear_debts(self) -> Any:
        """Take the place back from the listed debts, as far as nobody has them locked."""
        given, job = self.syntax.rows("wanted", ID), self.job.alias("debt")
        owing = (
            select(job.c.id)
            .select_from(given)
            .join(job, job.c.id == given.c.id)
            .where(job.c.admitted.is_not(None), job.c.sequence_open.is_(None))
            .order_by(job.c.id)
        )
        picked = self.syntax.locked(owing, job, "picked")
        return (
            sa.update(self.job)
            .where(self.job.c.id == picked.c.id)
            .values(admitted=None)
            .returning(self.job.c.id)
        )

    # ---- heads held back by a pause --------------------------------------------------------------

    @cached_property
    def let_go(self) -> Any:
        """Heads that wait for their turn in a sequence that is not paused are ready, or wait for
        their time.

        Whoever makes a head may look at the pause before its end is committed, and hold the head
        back after the resume has looked for it.
        """
        job = self.job.alias("candidate")
        held_back = (
            select(job.c.id)
            .where(predicate(IS_HELD_BACK), ~self.is_paused(job))
            .order_by(job.c.id)
            .limit(bindparam("limit", type_=sa.Integer()))
        )
        picked = self.syntax.locked(held_back, job, "picked")
        is_due = self.job.c.run_at <= self.now()
        return (
            sa.update(self.job)
            .where(self.job.c.id == picked.c.id)
            .values(
                state=sa.case((is_due, word(State.AVAILABLE)), else_=word(State.PENDING)),
                waits_for=sa.case((~is_due, word(WaitsFor.TIME))),
                updated_at=self.now(),
            )
            .returning(self.job.c.queue, self.job.c.state)
        )

    # ---- lines without a head --------------------------------------------------------------------

    @cached_property
    def sweep(self) -> Any:
        """A window of the keys after one, from line to line over the index, and whether each has
        lost its head: jobs wait for their turn, nobody is admitted, and the first could be.

        One snapshot, in which no step of this library ever leaves such a line.
        """
        after, limit = bindparam("after", type_=Text()), bindparam("limit", type_=sa.Integer())
        one = sa.literal_column("1", sa.Integer()).label("number")
        keys = select(self._key_after(after).label("key"), one).cte("keys", recursive=True)
        keys = keys.union_all(
            select(self._key_after(keys.c.key, keys), keys.c.number + 1).where(
                keys.c.key.is_not(None), keys.c.number < limit
            )
        )
        # CASE: the line is looked into only where there is no head.
        is_headless = sa.case((self._head_of(keys.c.key, keys).is_(None), self._is_stuck(keys)))
        return (
            select(keys.c.key, func.coalesce(is_headless, sa.false()).label("is_headless"))
            .where(keys.c.key.is_not(None))
            .order_by(keys.c.number)
        )

    def _key_after(self, key: ColumnElement[Any], *outer: sa.FromClause) -> sa.ScalarSelect[Any]:
        job = self.job.alias("next_line")
        return (
            select(job.c.sequence_key)
            .where(predicate(IS_IN_LINE), job.c.sequence_key > key)
            .order_by(job.c.sequence_key, func.coalesce(job.c.position, job.c.id))
            .limit(1)
            .correlate(*outer)
            .scalar_subquery()
        )

    def _is_stuck(self, keys: sa.CTE) -> ColumnElement[bool]:
        """The first in line could be the head, and one of the early ones waits for its turn."""
        job, first = self.job.alias("in_line"), self.job.alias("first_in_line")
        early = (
            select(job.c.waits_for)
            .where(
                job.c.sequence_key == keys.c.key,
                job.c.sequence_open.is_not(None),
                self._belongs(job),
            )
            .order_by(func.coalesce(job.c.position, job.c.id))
            .limit(EARLY)
            .correlate(keys)
            .subquery("early")
        )
        waits = sa.exists().where(early.c.waits_for == word(WaitsFor.TURN))
        leads = sa.exists().where(
            first.c.id == self._first_of(keys.c.key, keys), self._may_lead(first)
        )
        return sa.and_(waits, leads)

    # ---- explicit positions ----------------------------------------------------------------------

    @cached_property
    def number_new(self) -> Any:
        """Write down that these keys have positions, where nothing is known of them."""
        given = self.syntax.rows("keys", KEYS)
        none_yet = sa.literal_column("0", BigInteger()).label("released_through")
        source: Any = select(given.c.key.label("key"), none_yet)
        return self.syntax.insert_unless_held(self.tables.sequence, source.order_by(given.c.key))

    @cached_property
    def number_known(self) -> Any:
        """Write down that these keys have positions, where only a pause is known of them."""
        given, sequence = self.syntax.rows("keys", KEYS), self.tables.sequence
        return (
            sa.update(sequence)
            .where(sequence.c.key.in_(select(given.c.key)), sequence.c.released_through.is_(None))
            .values(released_through=0)
        )

    @cached_property
    def advance(self) -> Any:
        """Remember how far the positions in the lines of the listed jobs are released without a
        gap.

        A key that a person pauses or resumes just now is left for the next time: until then the
        row of the position before says that it is over.
        """
        given, sequence, job = self.syntax.rows("released", ID), self.tables.sequence, self.job
        numbered, left = sequence.alias("numbered"), job.alias("left")
        keys = select(left.c.sequence_key).where(
            self.syntax.one_of(left.c.id, select(given.c.id)), left.c.position.is_not(None)
        )
        wanted = (
            select(numbered.c.key)
            .where(numbered.c.key.in_(keys), numbered.c.released_through.is_not(None))
            .order_by(numbered.c.key)
        )
        picked = self.syntax.locked(wanted, numbered, "picked")
        number = func.row_number().over(order_by=job.c.position)
        released = (
            select(job.c.position.label("position"), number.label("number"))
            .where(
                job.c.sequence_key == sequence.c.key,
                job.c.position > sequence.c.released_through,
                job.c.sequence_open.is_(None),
            )
            .correlate(sequence)
            .subquery("released")
        )
        through = (
            select(func.max(released.c.position))
            .where(released.c.position == sequence.c.released_through + released.c.number)
            .correlate(sequence)
            .scalar_subquery()
        )
        return (
            sa.update(sequence)
            .where(sequence.c.key.in_(select(picked.c.key)))
            .values(released_through=func.coalesce(through, sequence.c.released_through))
        )

    @cached_property
    def position_facts(self) -> Any:
        """What an enqueue with a position has to know of its key."""
        key, position = bindparam("key", type_=Text()), bindparam("at", type_=BigInteger())
        job, sequence = self.job, self.tables.sequence
        of_key = job.c.sequence_key == key
        through = select(sequence.c.released_through).where(sequence.c.key == key)
        holder = select(job.c.id).where(of_key, job.c.position == position)
        before = sa.exists().where(of_key, job.c.position == position - 1)
        stray = sa.exists().where(
            of_key, job.c.sequence_open.is_not(None), job.c.position.is_(None)
        )
        return select(
            through.scalar_subquery().label("through"),
            holder.scalar_subquery().label("holder"),
            before.label("has_predecessor"),
            stray.label("has_unpositioned"),
        )

    # ---- pieces ----------------------------------------------------------------------------------

    @property
    def _placed(self) -> tuple[ColumnElement[Any], ...]:
        """What is told of a job that got its place."""
        job = self.job.c
        return (job.id, job.sequence_key, job.state, job.waits_for, job.queue)

    def _head_of(self, key: ColumnElement[Any], outer: sa.FromClause) -> sa.ScalarSelect[Any]:
        """The id of the admitted job of a key."""
        job = self.job.alias("head")
        return (
            select(job.c.id)
            .where(job.c.sequence_key == key, job.c.admitted.is_not(None))
            .limit(1)
            .correlate(outer)
            .scalar_subquery()
        )

    def _first_of(self, key: ColumnElement[Any], outer: sa.FromClause) -> ColumnElement[Any]:
        """The id of the first unreleased job of a key, in whatever state it is.

        ORDER BY the expression, not the id: ordered by id, PostgreSQL walks the primary key when
        one key dominates the statistics.
        """
        job = self.job.alias("line")
        return (
            select(job.c.id)
            .where(
                job.c.sequence_key == key,
                job.c.sequence_open.is_not(None),
                self._belongs(job),
            )
            .order_by(func.coalesce(job.c.position, job.c.id))
            .limit(1)
            .correlate(outer)
            .scalar_subquery()
        )

    def _belongs(self, job: Any) -> ColumnElement[bool]:
        """False for a job without a position in a key that has them: it has no place there."""
        sequence = self.tables.sequence.alias("numbered")
        has_positions = (
            sa.exists()
            .where(sequence.c.key == job.c.sequence_key, sequence.c.released_through.is_not(None))
            .correlate(job)
        )
        return sa.or_(job.c.position.is_not(None), ~has_positions)

    def _may_lead(self, job: Any) -> ColumnElement[bool]:
        """Still first in its line, no head yet; with a position only if the one before is over."""
        sequence, before = self.tables.sequence.alias("through"), self.job.alias("predecessor")
        through = (
            select(sequence.c.released_through)
            .where(sequence.c.key == job.c.sequence_key)
            .correlate(job)
            .scalar_subquery()
        )
        predecessor_is_over = (
            sa.exists()
            .where(
                before.c.sequence_key == job.c.sequence_key,
                before.c.position == job.c.position - 1,
                before.c.sequence_open.is_(None),
            )
            .correlate(job)
        )
        return sa.and_(
            _is_set(job.c.sequence_open),
            job.c.admitted.is_(None),
            sa.or_(
                job.c.position.is_(None),
                job.c.position - 1 <= func.coalesce(through, 0),
                predecessor_is_over,
            ),
        )

    def _promotion(self) -> dict[str, ColumnElement[Any]]:
        """State of a new head: what only waited for its turn is ready, or waits for its time.

        In a paused sequence it goes on waiting for its turn. Every other state stays: a paused head
        is paused, one that was cancelled in a halting sequence halts it.
        """
        job = self.job
        waited, is_paused = self._waited(job), self.is_paused(job)
        is_due = job.c.run_at <= self.now()
        return {
            "state": sa.case((self.is_ready(job), word(State.AVAILABLE)), else_=job.c.state),
            "waits_for": sa.case(
                (~waited, job.c.waits_for),
                (is_paused, word(WaitsFor.TURN)),
                (~is_due, word(WaitsFor.TIME)),
            ),
        }

    def is_ready(self, job: Any) -> ColumnElement[bool]:
        """Whether the job, as the head of its line, has nothing more to wait for."""
        return sa.and_(self._waited(job), job.c.run_at <= self.now(), ~self.is_paused(job))

    def _waited(self, job: Any) -> ColumnElement[bool]:
        return sa.and_(
            job.c.state == word(State.PENDING),
            job.c.waits_for.in_([word(WaitsFor.ADMISSION), word(WaitsFor.TURN)]),
        )

    def is_paused(self, job: Any) -> ColumnElement[bool]:
        """Whether the job's sequence is paused."""
        sequence = self.tables.sequence
        return sa.exists().where(
            sequence.c.key == job.c.sequence_key, sequence.c.paused_at.is_not(None)
        )


def _is_set(flag: ColumnElement[Any]) -> ColumnElement[bool]:
    """True for a flag of a row that is found by its id.

    IS NOT NULL would do, but is a partial index's own predicate: with statistics from before such
    rows were there, PostgreSQL walks that index in place of the primary key.
    """
    return func.coalesce(flag, sa.false())
