"""What can be put right without asking: each step is one that any worker takes by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import sqlalchemy as sa
from sqlalchemy import Engine

from cyclone_sqla import admission, operations
from cyclone_sqla.app import Cyclone
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.dialects.base import WorkerConnection
from cyclone_sqla.doctor.findings import DEFAULT_LIMITS, Limits
from cyclone_sqla.doctor.queue import Queue
from cyclone_sqla.figures import MOST_COUNTED
from cyclone_sqla.operations import LostRun
from cyclone_sqla.settings import DEFAULT_SETTINGS
from cyclone_sqla.urls import url_of


def mend(
    database: Engine | sa.URL, cyclone: Cyclone, *, limits: Limits = DEFAULT_LIMITS
) -> list[str]:
    """Take back jobs whose lease ran out long ago, give lines that have lost it their head, and
    hand on places that nobody did; a sentence about each thing that was done.

    At most 1,000 things of each kind at a time.
    """
    dialect = cyclone.dialect(url_of(database).get_backend_name())
    engine = dialect.worker_engine(database)
    try:
        with closing(dialect.hold(engine, DEFAULT_SETTINGS)) as held:
            return list(_Mender(cyclone, dialect, held, limits).run())
    finally:
        engine.dispose()


class _Mender:
    def __init__(
        self, cyclone: Cyclone, dialect: Dialect, held: WorkerConnection, limits: Limits
    ) -> None:
        self._cyclone = cyclone
        self._dialect = dialect
        self._held = held
        self._limits = limits

    def run(self) -> Iterator[str]:
        yield from self._rescue()
        yield from self._mend_lines()
        yield from self._pay_debts()

    def _rescue(self) -> Iterator[str]:
        runs = self._lapsed()
        if not runs:
            return
        with self._held.transaction() as connection:
            settled = operations.rescue(
                connection,
                self._dialect,
                runs,
                lambda run: self._cyclone.registry.backoff_of(run.kind).delay(run.crashes),
                history_limit=DEFAULT_SETTINGS.history_limit,
            )
        for run in runs:
            if run.id in settled.states:
                yield f"Took job {run.id} back from {run.worker}: now {settled.states[run.id]}."

    def _lapsed(self) -> list[LostRun]:
        with self._held.reading() as connection:
            number = Queue(connection, self._dialect, self._limits).count_lapsed()
            limit = min(number, MOST_COUNTED)
            # The longest lapsed come first, so these are they.
            return operations.expired_runs(connection, self._dialect, limit) if limit else []

    def _mend_lines(self) -> Iterator[str]:
        with self._held.reading() as connection:
            keys = Queue(connection, self._dialect, self._limits).headless()[:MOST_COUNTED]
        if not keys:
            return
        with self._held.transaction() as connection:
            mended = admission.mend(connection, self._dialect, keys)
        for key, job_id in mended:
            yield f"Made job {job_id} the head of sequence {key!r}."

    def _pay_debts(self) -> Iterator[str]:
        with self._held.reading() as connection:
            debts = Queue(connection, self._dialect, self._limits).old_debts()
        if not debts:
            return
        with self._held.transaction() as connection:
            admission.pay(connection, self._dialect, debts)
        yield f"Handed on the place of {len(debts)} job(s) that had left their sequence."
