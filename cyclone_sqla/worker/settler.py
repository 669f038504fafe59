"""Writes how runs ended: in batches, fenced, and never held up by one bad row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import Connection
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    ProgrammingError,
    StatementError,
)

from cyclone_sqla import operations
from cyclone_sqla.dialects import Dialect, WorkerConnection
from cyclone_sqla.failures import Failure
from cyclone_sqla.operations import Settled, Settlement
from cyclone_sqla.outcomes import Completed, GivenBack
from cyclone_sqla.worker.holdings import Holdings
from cyclone_sqla.worker.runs import Finished, log_fields

log = logging.getLogger("cyclone_sqla.worker")

BATCH = 500
"""Ends written at once: bounds how long SQLite's write lock and a statement's row locks are held.
"""


class Settler:
    """Keeps finished runs until the database has taken note of each."""

    def __init__(
        self, dialect: Dialect, holdings: Holdings, worker: str, history_limit: int
    ) -> None:
        self._dialect = dialect
        self._holdings = holdings
        self._worker = worker
        self._history_limit = history_limit
        self._waiting: dict[tuple[int, int], Finished] = {}

    def add(self, finished: Sequence[Finished]) -> None:
        """Runs have ended; their slots are free."""
        self._holdings.finish(run.job for run in finished)
        for run in finished:
            self._waiting[run.job.id, run.job.lease] = run

    def __len__(self) -> int:
        return len(self._waiting)

    def next_batch(self) -> list[Settlement]:
        """The ends to write now, the oldest first."""
        oldest = list(self._waiting.values())[:BATCH]
        return [
            Settlement(
                run.job.id,
                run.job.lease,
                run.job.attempt,
                self._worker,
                run.outcome,
                run.job.sequence_key,
            )
            for run in oldest
        ]

    def write(self, connection: Connection, batch: Sequence[Settlement]) -> list[Settled]:
        """The statements for a batch.

        What they did counts when the step that ran them has ended.
        """
        plain = [s for s in batch if operations.is_plain(s)]
        others = [s for s in batch if not operations.is_plain(s)]
        settled: list[Settled] = []
        if plain:
            settled.append(operations.complete(connection, self._dialect, plain))
        if others:
            settled.append(
                operations.release(
                    connection, self._dialect, others, history_limit=self._history_limit
                )
            )
        return settled

    def note(self, batch: Sequence[Settlement], settled: Sequence[Settled]) -> int:
        """Forget what was written or refused; the number of those that somebody has locked just
        now.
        """
        busy = {job_id for result in settled for job_id in result.busy}
        refused = {job_id for result in settled for job_id in result.refused}
        over = [(s.job_id, s.lease) for s in batch if s.job_id not in busy]
        for key in over:
            run = self._waiting.pop(key)
            if run.job.id in refused:
                log.warning(
                    "lease lost: the end of job %s, attempt %s (%s) was not written",
                    run.job.id,
                    run.job.attempt,
                    type(run.outcome).__name__,
                    extra=log_fields(run.job),
                )
        self._holdings.drop(over)
        return len(busy)

    def write_carefully(self, held: WorkerConnection, batch: Sequence[Settlement]) -> None:
        """After an error of the data: halve the batch until the bad row is alone, and write that
        without it.
        """
        try:
            with held.transaction() as connection:
                settled = self.write(connection, batch)
        except DBAPIError as exc:
            if not is_of_the_data(exc):
                raise
            if len(batch) > 1:
                middle = len(batch) // 2
                self.write_carefully(held, batch[:middle])
                self.write_carefully(held, batch[middle:])
                return
            log.error(
                "the end of job %s could not be stored as it is: %s", batch[0].job_id, exc.orig
            )
            with held.transaction() as connection:
                settled = self.write(connection, [_minimal(batch[0])])
        self.note(batch, settled)


def is_of_the_data(exc: BaseException) -> bool:
    """Whether the database refused the values, so that trying again as before can't help."""
    if isinstance(exc, DBAPIError):
        return isinstance(exc, DataError | IntegrityError | ProgrammingError)
    return isinstance(exc, StatementError | UnicodeError)


def _minimal(settlement: Settlement) -> Settlement:
    """The same end in plain ASCII words of our own."""
    failure = Failure.because("what this attempt left could not be stored", kind="Unstorable")
    outcome = settlement.outcome
    if isinstance(outcome, Completed):
        return replace(settlement, outcome=Completed(failure=failure))
    if isinstance(outcome, GivenBack):
        return settlement
    return replace(settlement, outcome=replace(outcome, failure=failure))
