"""Keeps the leases of healthy runs alive, from a thread and connection of its own."""

from __future__ import annotations

import logging
from datetime import timedelta

from cyclone_sqla import operations
from cyclone_sqla.dialects import Dialect, WorkerConnection
from cyclone_sqla.worker.executor import Executor
from cyclone_sqla.worker.holdings import Holdings
from cyclone_sqla.worker.rhythm import Rhythm
from cyclone_sqla.worker.runs import Interruption

log = logging.getLogger("cyclone_sqla.worker")


class Leases:
    """Renews at a third of the lease, so that one lost renewal does no harm."""

    def __init__(
        self,
        *,
        dialect: Dialect,
        held: WorkerConnection,
        executor: Executor,
        holdings: Holdings,
        lease: timedelta,
        rhythm: Rhythm,
    ) -> None:
        self._dialect = dialect
        self._held = held
        self._executor = executor
        self._holdings = holdings
        self._lease = lease
        self._rhythm = rhythm

    def round(self) -> None:
        """Wait for the turn, then renew."""
        if self._rhythm.wait():
            self.renew()
            self._rhythm.done()

    def renew(self) -> None:
        """Renew everything held; tell runs that they lost their lease or were asked to stop."""
        runs = self._holdings.runs()
        if not runs:
            return
        with self._held.step() as connection:
            renewal = operations.renew(connection, self._dialect, runs, self._lease)
        for run in renewal.cancel_requested:
            self._executor.cancel(*run, Interruption.CANCELLED)
        self._holdings.drop(renewal.lost)
        for run in renewal.lost:
            if self._executor.cancel(*run, Interruption.LEASE_LOST):
                log.warning(
                    "lease lost: job %s runs on and will change nothing",
                    run.job_id, extra={"job_id": run.job_id},
                )  # fmt: skip
