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

WINDOW = 200
"""Incoming jobs of one look. It locks the heads of their lines, whose ends can't be written
meanwhile: so it must not take long.
"""

DEBTS = 500
"""Debts of one look."""

TRIES = 10
"""How often a transaction that met others of its kind is run again before it waits for the poll."""

FIRST_PAUSE = 0.005
"""Seconds until the next look where nothing moved, because rows were locked; doubles each time."""


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
        self._pause = FIRST_PAUSE

    def admit(self) -> float | None:
        """One window of incoming jobs; seconds until the next look, None if none was left over."""
        window = self._again(
            lambda connection: admission.admit(connection, self._dialect, self._after, WINDOW)
        )
        has_more = window.looked_at == WINDOW
        self._after = window.last_id if has_more else 0
        if window.queues:
            self._on_admitted()
        if has_more or window.has_delayed:
            return 0.0
        return None if window.changed == window.looked_at else self._paced(window.changed > 0)

    def pay(self) -> float | None:
        """One window of debts; seconds until the next look, None if there was nothing to pay."""
        with self._held.reading() as connection:
            debts = admission.payable_debts(connection, self._dialect, self._after_debt, DEBTS)
        has_more = len(debts) == DEBTS
        self._after_debt = debts[-1] if has_more else 0
        if not debts:
            return None
        queues = self._again(lambda connection: admission.pay(connection, self._dialect, debts))
        if queues:
            self._on_admitted()
        return 0.0 if has_more else self._paced(bool(queues))

    def let_go(self) -> float | None:
        """Heads that a pause held back and its end missed; seconds until the next look, if any."""
        queues = self._again(lambda connection: admission.let_go(connection, self._dialect, DEBTS))
        if queues:
            self._on_admitted()
        return 0.0 if len(queues) == DEBTS else None

    def _paced(self, moved: bool) -> float:
        """What is locked now is free soon; what can't move is not looked at all the time."""
        self._pause = FIRST_PAUSE if moved else self._pause * 2
        return self._pause

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
