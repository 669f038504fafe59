"""Writes how runs ended: in batches, fenced, and never held up by one bad row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import Connection

from cyclone_sqla import operations
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.dialects import Dialect, WorkerConnection
from cyclone_sqla.failures import Failure
from cyclone_sqla.lifecycle import State
from cyclone_sqla.operations import Claiming, Settled, Settlement
from cyclone_sqla.outcomes import CancelledOutcome, Completed, Discarded, GivenBack, Outcome
from cyclone_sqla.worker.holdings import Holdings
from cyclone_sqla.worker.loop import brief
from cyclone_sqla.worker.runs import Finished, log_fields

log = logging.getLogger("cyclone_sqla.worker")

BATCH = 500
"""Ends written at once: bounds how long SQLite's write lock and a statement's row locks are held.
"""

_Key = tuple[int, int]


class Settler:
    """Keeps finished runs until the database has taken note of each."""

    def __init__(
        self, dialect: Dialect, holdings: Holdings, worker: str, history_limit: int
    ) -> None:
        self._dialect = dialect
        self._holdings = holdings
        self._worker = worker
        self._history_limit = history_limit
        self._waiting: dict[_Key, Finished] = {}
        self._tried: list[_Key] = []
        self._doubtful: set[_Key] = set()

    def add(self, finished: Sequence[Finished]) -> None:
        """Runs have ended; their slots are free. Those that wrote it down themselves are done."""
        self._holdings.finish(run.job for run in finished)
        for run in finished:
            key = (run.job.id, run.job.lease)
            if run.written is not None:
                self._holdings.drop([key])
                continue
            self._waiting[key] = run
            if run.is_doubtful:
                self._doubtful.add(key)

    def __len__(self) -> int:
        return len(self._waiting)

    def next_batch(self) -> list[Settlement]:
        """The ends to write now, the oldest first; of one job's runs only the oldest."""
        chosen: dict[int, Finished] = {}
        for run in self._waiting.values():
            chosen.setdefault(run.job.id, run)
            if len(chosen) == BATCH:
                break
        return [self._settlement_of(run.job, run.outcome) for run in chosen.values()]

    def _settlement_of(self, job: ClaimedJob, outcome: Outcome) -> Settlement:
        return Settlement(job.id, job.lease, job.attempt, self._worker, outcome, job.sequence_key)

    def write(self, connection: Connection, batch: Sequence[Settlement]) -> Settled:
        """The statements for a batch.

        What they did counts when the step that ran them has ended.
        """
        self._tried = [(s.job_id, s.lease) for s in batch]
        return operations.settle(
            connection, self._dialect, batch, history_limit=self._history_limit
        )

    def write_and_claim(
        self, connection: Connection, batch: Sequence[Settlement], wanted: Claiming
    ) -> tuple[Settled, list[ClaimedJob]]:
        """:meth:`write`, and a claim in the same round trip where that can be."""
        if not batch:
            return Settled(), operations.claim(connection, self._dialect, wanted)
        self._tried = [(s.job_id, s.lease) for s in batch]
        return operations.settle_and_claim(
            connection, self._dialect, batch, wanted, history_limit=self._history_limit
        )

    def note(self, batch: Sequence[Settlement], settled: Settled) -> int:
        """Forget what was written or refused; the number of those that somebody has locked."""
        over = list[_Key]()
        for s in batch:
            key = (s.job_id, s.lease)
            run = self._waiting.pop(key)
            if s.job_id in settled.busy:
                self._waiting[key] = run  # behind the others, so that it never keeps them waiting
                continue
            if s.job_id in settled.refused:
                self._log_refused(run, settled.refused[s.job_id])
            over.append(key)
        self._doubtful.difference_update(over)
        self._holdings.drop(over)
        self._tried = []
        return len(settled.busy)

    def doubt(self) -> None:
        """The step that wrote the latest batch has failed; some of it may be written even so."""
        self._doubtful.update(self._tried)
        self._tried = []

    def write_carefully(
        self, held: WorkerConnection, batch: Sequence[Settlement], *, is_minimal: bool = False
    ) -> None:
        """After an error of the data: halve the batch until the bad row is alone, and write its end
        without what made it bad.
        """
        try:
            with held.transaction() as connection:
                settled = self.write(connection, batch)
        except Exception as exc:
            if not self._dialect.is_of_the_data(exc):
                raise
            self._write_in_parts(held, batch, exc, is_minimal=is_minimal)
        else:
            self.note(batch, settled)

    def _write_in_parts(
        self,
        held: WorkerConnection,
        batch: Sequence[Settlement],
        exc: Exception,
        *,
        is_minimal: bool,
    ) -> None:
        if len(batch) > 1:
            middle = len(batch) // 2
            self.write_carefully(held, batch[:middle])
            self.write_carefully(held, batch[middle:])
        elif is_minimal:
            self._set_aside(batch[0], exc)
        elif batch:
            log.error(
                "the end of job %s could not be stored as it is: %s",
                batch[0].job_id, brief(exc), extra={"job_id": batch[0].job_id},
            )  # fmt: skip
            self.write_carefully(held, [_minimal(batch[0])], is_minimal=True)

    def _set_aside(self, settlement: Settlement, exc: Exception) -> None:
        """Nothing can be written to this row now: don't try for ever, let its lease run out."""
        key = (settlement.job_id, settlement.lease)
        run = self._waiting.pop(key)
        self._doubtful.discard(key)
        self._holdings.drop([key])
        log.error(
            "job %s can't be settled at all, so its lease will run out: %s",
            run.job.id, brief(exc), extra=log_fields(run.job),
        )  # fmt: skip

    def _log_refused(self, run: Finished, state: State | None) -> None:
        job = run.job
        if (job.id, job.lease) not in self._doubtful:
            text = "lease lost: the end of job %s, attempt %s (%s) was not written"
            level = logging.WARNING
        elif state is not None and (
            state == State.CANCELLED or state.is_terminal == _is_final(run)
        ):
            text = "the end of job %s, attempt %s (%s) was written before the connection was lost"
            level = logging.DEBUG
        else:
            text = "whether the end of job %s, attempt %s (%s) was written is not known"
            level = logging.WARNING
        log.log(level, text, job.id, job.attempt, type(run.outcome).__name__, extra=log_fields(job))


def _is_final(run: Finished) -> bool:
    return isinstance(run.outcome, Completed | Discarded | CancelledOutcome)


def _minimal(settlement: Settlement) -> Settlement:
    """The same end in plain ASCII words of our own."""
    failure = Failure.because("what this attempt left could not be stored", kind="Unstorable")
    outcome = settlement.outcome
    if isinstance(outcome, Completed):
        return settlement._replace(outcome=Completed(failure=failure))
    if isinstance(outcome, GivenBack):
        return settlement
    return settlement._replace(outcome=replace(outcome, failure=failure))
