"""The statements of a look at a queue's health: each reads a bounded number of rows by an index."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from sqlalchemy import ColumnElement, bindparam, func, select

from cyclone_sqla.figures import MOST_COUNTED
from cyclone_sqla.inspection_statements import at_most
from cyclone_sqla.models import IS_DUE_BY_TIME, IS_INCOMING, IS_RUNNING, Timestamp
from cyclone_sqla.statements import StatementSet, predicate


class DoctorStatements(StatementSet):
    """Those of one schema, in one database's words."""

    @cached_property
    def lapsed(self) -> Any:
        """How many runs there are whose lease ran out before a time."""
        return self._count(IS_RUNNING, self.job.c.leased_until)

    @cached_property
    def overdue(self) -> Any:
        """How many jobs wait for a time that came before another one."""
        return self._count(IS_DUE_BY_TIME, self.job.c.run_at)

    def _count(self, which: str, since: ColumnElement[Any]) -> Any:
        rows = (
            select(self.job.c.id)
            .where(predicate(which), since < bindparam("before", type_=Timestamp()))
            .order_by(since)
            .limit(at_most(MOST_COUNTED))
        )
        return select(func.count()).select_from(rows.subquery("late"))

    @cached_property
    def incoming(self) -> Any:
        """The first incoming jobs, and how far the positions of their sequences are released."""
        job, sequence = self.job, self.tables.sequence
        first = (
            select(job.c.id, job.c.sequence_key, job.c.position, job.c.updated_at)
            .where(predicate(IS_INCOMING))
            .order_by(job.c.id)
            .limit(at_most(MOST_COUNTED))
            .subquery("incoming")
        )
        return (
            select(first, sequence.c.released_through)
            .select_from(first.outerjoin(sequence, sequence.c.key == first.c.sequence_key))
            .order_by(first.c.id)
        )
