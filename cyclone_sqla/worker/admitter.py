"""Gives incoming jobs their places in their lines, and pays what released heads owe."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from cyclone_sqla import admission
from cyclone_sqla.dialects import Dialect, WorkerConnection

T = TypeVar("T")

log = logging.getLogger("cyclone_sqla.worker")

WINDOW = 1_000
"""Incoming jobs of one look."""

DEBTS = 500
"""Debts of one look."""

TRIES = 10
"""How often a transaction that met others of its kind is run again before it waits for the poll."""

SOON = 0.01
"""Seconds until the next look for jobs whose head was locked just now."""


class Admitter:
    """One look covers one window of the incoming jobs; the next goes on from there, then around."""

    def __init__(
        self, dialect: Dialect, held: WorkerConnection, on_admitted: Callable[[], None]
    ) -> None:
        self._dialect = dialect
        self._held = held
        self._on_admitted = on_admitted
        self._after = 0
        self._after_debt = 0

    def admit(self) -> float | None:
        """One window of incoming jobs; seconds until the next look, None if it is not for sooner
        than any poll.
        """
        window = self._again(
            lambda connection: admission.admit(connection, self._dialect, self._after, WINDOW)
        )
        has_more = window.looked_at == WINDOW
        self._after = window.last_id if has_more else 0
        if window.queues:
            self._on_admitted()
        if has_more:
            return 0.0
        return SOON if window.changed < window.looked_at else None

    def pay(self) -> float | None:
        """One window of debts; seconds until the next look, None if it is not for sooner."""
        with self._held.reading() as connection:
            debts = admission.payable_debts(connection, self._dialect, self._after_debt, DEBTS)
        self._after_debt = debts[-1] if len(debts) == DEBTS else 0
        if not debts:
            return None
        if self._again(lambda connection: admission.pay(connection, self._dialect, debts)):
            self._on_admitted()
        return 0.0 if self._after_debt else SOON

    def _again(self, step: Callable[[Connection], T]) -> T:
        """A transaction with a fresh snapshot each time, while it meets others of its kind."""
        for _ in range(TRIES - 1):
            try:
                with self._held.transaction() as connection:
                    return step(connection)
            except DBAPIError as exc:
                if not self._dialect.is_passing(exc):
                    raise
                log.debug("an admission met another one and is tried again: %s", exc.orig)
        with self._held.transaction() as connection:
            return step(connection)
