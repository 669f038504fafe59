"""The statements of what people do to jobs: each one UPDATE whose new state follows from the row as
it is when the UPDATE gets it, which may be later than when it was last read.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy import BigInteger, ColumnElement, Text, bindparam, select

from cyclone_sqla import lifecycle as life
from cyclone_sqla.lifecycle import State, Transition, WaitsFor
from cyclone_sqla.models import Duration, Timestamp
from cyclone_sqla.statements import StatementSet, plus, word


class InterventionStatements(StatementSet):
    """The statements of people's verbs for one schema in one database's words."""

    # ---- one job ---------------------------------------------------------------------------------

    @cached_property
    def cancel(self) -> Any:
        """A waiting job ends here; a running one is asked to.

        In a halting sequence a cancelled job keeps its place, and halts the sequence there. A head
        that leaves its line still owes the hand-over, which a worker does.
        """
        job = self.job
        runs = job.c.state == word(State.RUNNING)
        halts = job.c.on_failure == word("halt")
        return self._act(
            life.CANCEL_ASKED,
            state=sa.case((runs, job.c.state), else_=word(State.CANCELLED)),
            waits_for=sa.null(),
            finished_at=sa.case((~runs, self.now())),
            cancel_requested_at=self.now(),
            sequence_open=sa.case((sa.or_(runs, halts), job.c.sequence_open)),
        )

    @cached_property
    def pause(self) -> Any:
        """A waiting job is kept from running; in a line it keeps its place."""
        return self._act(life.PAUSE, state=word(State.PAUSED), waits_for=sa.null())

    @cached_property
    def resume(self) -> Any:
        """Back to where it would be: due, delayed, or in need of a place in its line."""
        return self._act(life.RESUME, **self._back_in_line(self.job.c.run_at))

    @cached_property
    def replay(self) -> Any:
        """A failed or cancelled job begins afresh, in its old place; its lease only ever rises."""
        job, twin = self.job, self.job.alias("twin")
        is_free = ~sa.exists(
            select(twin.c.id).where(
                twin.c.kind == job.c.kind,
                twin.c.unique_key == job.c.unique_key,
                twin.c.id != job.c.id,
                self._holds_key(twin),
            )
        ).correlate(job)
        text = self.syntax.json(bindparam("new_arguments", type_=Text()))
        return self._act(
            life.REPLAY,
            is_free,
            **self._back_in_line(self.now()),
            arguments=sa.func.coalesce(text, job.c.arguments),
            run_at=self.now(),
            attempt=0,
            snoozes=0,
            crashes=0,
            finished_at=None,
            dead_letter=None,
            cancel_requested_at=None,
            result=None,
            sequence_open=sa.case((job.c.sequence_key.is_not(None), sa.true())),
        )

    @cached_property
    def skip_head(self) -> Any:
        """The head that halts its sequence is passed over; the next one gets its place."""
        job = self.job
        return self._act(
            life.SKIP,
            job.c.sequence_open.is_not(None),
            state=word(State.COMPLETED),
            dead_letter=None,
            sequence_open=None,
        )

    @cached_property
    def skip_dead_letter(self) -> Any:
        """A dead letter is dealt with: it stays discarded, and retention may have it."""
        return self._act(life.DEAL_WITH, self.job.c.dead_letter.is_not(None), dead_letter=None)

    @cached_property
    def reschedule(self) -> Any:
        """A waiting job gets another time; in a line it keeps its place."""
        at = bindparam("process_at", type_=Timestamp())
        delay = bindparam("delay", type_=Duration())
        run_at = sa.func.coalesce(at, plus(self.now(), delay), type_=Timestamp())
        return self._act(life.RESCHEDULE, **self._back_in_line(run_at), run_at=run_at)

    @cached_property
    def look(self) -> Any:
        """The row that a verb did not fit, as it is now."""
        job = self.job
        return select(
            job.c.id, job.c.kind, job.c.queue, job.c.state, job.c.unique_key, job.c.sequence_open
        ).where(job.c.id == bindparam("job_id", type_=BigInteger()))

    def _act(self, transition: Transition, *guards: ColumnElement[bool], **values: Any) -> Any:
        job = self.job
        sources = [word(state) for state in transition.sources]
        return (
            sa.update(job)
            .where(
                job.c.id == bindparam("job_id", type_=BigInteger()),
                job.c.state.in_(sources),
                *guards,
            )
            .values(updated_at=self.now(), **values)
            .returning(job.c.id, job.c.kind, job.c.queue, job.c.state, job.c.sequence_key)
        )

    def _back_in_line(self, run_at: ColumnElement[Any]) -> dict[str, Any]:
        """State of a job that waits again: one that is not its line's head has to be admitted."""
        job, sequence = self.job, self.tables.sequence
        is_paused = sa.exists().where(
            sequence.c.key == job.c.sequence_key, sequence.c.paused_at.is_not(None)
        )
        is_placeless = sa.and_(job.c.sequence_key.is_not(None), job.c.admitted.is_(None))
        is_delayed = run_at > self.now()
        waits = sa.or_(is_placeless, is_paused, is_delayed)
        return {
            "state": sa.case((waits, word(State.PENDING)), else_=word(State.AVAILABLE)),
            "waits_for": sa.case(
                (is_placeless, word(WaitsFor.ADMISSION)),
                (is_paused, word(WaitsFor.TURN)),
                (is_delayed, word(WaitsFor.TIME)),
            ),
        }

    def _holds_key(self, job: Any) -> ColumnElement[bool]:
        """The predicate of the unique index, of an alias."""
        return sa.and_(
            job.c.unique_key.is_not(None),
            job.c.state.in_([word(state) for state in life.ACTIVE]),
        )

    # ---- a queue ---------------------------------------------------------------------------------

    @cached_property
    def pause_queue(self) -> Any:
        """Claims leave the queue alone from now on."""
        queue = self.tables.queue
        return self.syntax.upsert(
            queue,
            {"name": bindparam("name", type_=Text())},
            {"paused_at": self.now(), "paused_by": bindparam("by", type_=Text())},
        )

    @cached_property
    def resume_queue(self) -> Any:
        """Claims look into the queue again."""
        queue = self.tables.queue
        return (
            sa.update(queue)
            .where(queue.c.name == bindparam("of_name"), queue.c.paused_at.is_not(None))
            .values(paused_at=None, paused_by=None)
            .returning(queue.c.name)
        )

    # ---- a sequence ------------------------------------------------------------------------------

    @cached_property
    def pause_sequence(self) -> Any:
        """Whoever becomes head from now on waits for its turn."""
        return self.syntax.upsert(
            self.tables.sequence,
            {"key": bindparam("of_key", type_=Text())},
            {"paused_at": self.now(), "paused_by": bindparam("by", type_=Text())},
        )

    @cached_property
    def resume_sequence(self) -> Any:
        """The sequence goes on."""
        sequence = self.tables.sequence
        return (
            sa.update(sequence)
            .where(sequence.c.key == bindparam("of_key"), sequence.c.paused_at.is_not(None))
            .values(paused_at=None, paused_by=None)
            .returning(sequence.c.key)
        )

    @cached_property
    def lock_head(self) -> Any:
        """The present head of a sequence, locked: nobody hands its place on meanwhile."""
        job = self.job
        return (
            select(job.c.id)
            .where(
                job.c.sequence_key == bindparam("key", type_=Text()), job.c.admitted.is_not(None)
            )
            .with_for_update(key_share=True)
        )

    @cached_property
    def hold_back_head(self) -> Any:
        """A head that is ready waits for its turn, because its sequence is paused."""
        return self._turn_head(
            self.job.c.state == word(State.AVAILABLE),
            state=word(State.PENDING),
            waits_for=word(WaitsFor.TURN),
        )

    @cached_property
    def let_head_go(self) -> Any:
        """A head that was held back is ready, or waits for its time."""
        is_due = self.job.c.run_at <= self.now()
        return self._turn_head(
            sa.and_(
                self.job.c.state == word(State.PENDING),
                self.job.c.waits_for == word(WaitsFor.TURN),
            ),
            state=sa.case((is_due, word(State.AVAILABLE)), else_=word(State.PENDING)),
            waits_for=sa.case((~is_due, word(WaitsFor.TIME))),
        )

    def _turn_head(self, guard: ColumnElement[bool], **values: Any) -> Any:
        job = self.job
        return (
            sa.update(job)
            .where(
                job.c.sequence_key == bindparam("of_key", type_=Text()),
                job.c.admitted.is_not(None),
                guard,
            )
            .values(updated_at=self.now(), **values)
            .returning(job.c.id, job.c.queue, job.c.state)
        )
