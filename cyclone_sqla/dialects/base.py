"""What databases do differently, at the level of an operation; this is what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError
from sqlalchemy.orm import Session

from cyclone_sqla.clock import Clock
from cyclone_sqla.hint_senders import notify_channel
from cyclone_sqla.hints import HintSender, queue_after_commit
from cyclone_sqla.inspection_statements import InspectionStatements
from cyclone_sqla.intervention_statements import InterventionStatements
from cyclone_sqla.lifecycle import State
from cyclone_sqla.line_statements import LineStatements
from cyclone_sqla.models import Tables, tables_in
from cyclone_sqla.settings import DEFAULT_SETTINGS, WorkerSettings
from cyclone_sqla.statements import Statements, Syntax

AUTOCOMMIT = (
    "This connection is in AUTOCOMMIT: the job would be committed, and could run, before your own "
    "writes are. Enqueue in a transaction (an engine or connection without "
    'isolation_level="AUTOCOMMIT").'
)

HintMode: TypeAlias = Literal[True, False, "transaction"]
"""When workers are told of new jobs: after the commit, never, or (PostgreSQL) by the commit itself.
"""


class Dialect(ABC):
    """One database's way of doing what is not the same everywhere, for one schema."""

    name: str
    syntax: Syntax
    notifies = False
    """Whether the database itself calls other processes, by NOTIFY."""
    embedded = False
    """Whether it is a file of this host, which a worker sets up by itself."""
    one_writer = False
    """Whether a write transaction keeps every other one out."""

    def __init__(self, schema: str | None, clock: Clock) -> None:
        self.schema = schema
        self.clock = clock
        self.tables: Tables = tables_in(schema)
        self.sql = Statements(self.tables, self.syntax)
        self.lines = LineStatements(self.tables, self.syntax)
        self.acts = InterventionStatements(self.tables, self.syntax)
        self.looks = InspectionStatements(self.tables, self.syntax)
        self._prunes: dict[tuple[State, bool, bool], Any] = {}

    # ---- in the caller's transaction -------------------------------------------------------------

    @abstractmethod
    def now(self) -> datetime | None:
        """The value of every statement's ``:now``: None where the database's own clock is meant."""

    @abstractmethod
    def refuse_unfit(self, connection: Connection) -> None:
        """Raise TransactionError if an enqueue here would not commit with its caller."""

    @abstractmethod
    def has_tables(self, connection: Connection) -> bool:
        """Whether the queue's tables are there; never spoils the caller's transaction."""

    @abstractmethod
    def enqueueing(self, connection: Connection) -> AbstractContextManager[None]:
        """Turns the database's lock errors during an enqueue into this library's."""

    @abstractmethod
    def conflict_guard(
        self, connection: Connection, *, many: bool
    ) -> AbstractContextManager[object]:
        """Keeps the caller's transaction usable where a unique key's conflict is an error; of an
        enqueue of many jobs an exception leaves nothing.
        """

    @abstractmethod
    def savepoint(self, connection: Connection) -> AbstractContextManager[object]:
        """Around a statement whose conflict with a unique key would end the transaction."""

    @abstractmethod
    def draw_ids(self, connection: Connection, count: int) -> list[int]:
        """The next job ids, rising."""

    @abstractmethod
    def lock_sequence(self, connection: Connection, key: str) -> None:
        """Keep other transactions that ask for this lock out until this one ends."""

    @abstractmethod
    def hint_sender(self, engine: Engine, url: sa.URL | None) -> HintSender:
        """The way to the workers on the database of an application's engine."""

    def tell_workers(
        self,
        connection: Connection,
        session: Session | None,
        queues: Collection[str],
        *,
        mode: HintMode,
        url: sa.URL | None,
    ) -> None:
        """Have workers told of new jobs in these queues when the caller's transaction has
        committed.
        """
        if mode is not False:
            sender = self.hint_sender(connection.engine, url)
            channel = notify_channel(self.schema)
            queue_after_commit(connection, channel, queues, sender, session=session)

    # ---- statements ------------------------------------------------------------------------------

    def prune_statement(self, state: State, dead_letters: bool, *, only_look: bool = False) -> Any:
        """The statement that prunes, or looks for, ended jobs: built at its first use."""
        key = (state, dead_letters, only_look)
        if key not in self._prunes:
            build = self.sql.oldest_prunable if only_look else self.sql.prune
            self._prunes[key] = build(state, dead_letters=dead_letters)
        return self._prunes[key]

    # ---- in a worker's own transactions ----------------------------------------------------------

    @abstractmethod
    def worker_engine(
        self, database: Engine | sa.URL, settings: WorkerSettings = DEFAULT_SETTINGS
    ) -> Engine:
        """An engine of the worker's own for the application's database."""

    @abstractmethod
    def command_engine(self, database: Engine | sa.URL) -> Engine:
        """An engine for a person's command, whose transactions are like an application's."""

    @abstractmethod
    def refuse_unfit_for_work(self, connection: Connection) -> None:
        """Raise ConfigurationError if a worker can't keep its promises on this database."""

    def file_of(self, connection: Connection) -> Path | None:
        """The file that the database is; None where it is a server's."""
        return None

    @abstractmethod
    def hold(self, engine: Engine, settings: WorkerSettings) -> WorkerConnection:
        """A connection that a loop keeps for its life."""

    def may_find_work(
        self, connection: Connection, queues: Collection[str], kinds: Collection[str]
    ) -> bool:
        """Whether a claim is worth its transaction: asked where one keeps all others out."""
        return True

    @abstractmethod
    def claim(
        self, connection: Connection, slots: Mapping[str, int], params: Mapping[str, Any]
    ) -> list[sa.Row[Any]]:
        """Claim up to ``slots[queue]`` available jobs of each queue."""

    def call_workers(  # noqa: B027 - some have nobody to tell
        self, connection: Connection, queues: Collection[str]
    ) -> None:
        """Tell other workers of jobs in these queues, where the database is what tells them."""

    @abstractmethod
    def together(self, connection: Connection) -> AbstractContextManager[None]:
        """A worker's statements that commit together, inside a step or a transaction."""

    @abstractmethod
    def is_passing(self, error: BaseException) -> bool:
        """Whether a worker's own transaction that met this error is simply run again."""

    def is_of_the_data(self, error: BaseException) -> bool:
        """Whether the values or a row were refused, so that the rest of a batch may well pass."""
        if isinstance(error, DBAPIError):
            return isinstance(error, DataError | IntegrityError)
        return isinstance(error, StatementError | UnicodeError | OverflowError)


class WorkerConnection(ABC):
    """A connection that a worker's loop keeps: remade after an error, closed with the loop."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[Connection]:
        """For reads: takes no lock that others could wait for."""

    @abstractmethod
    def step(self) -> AbstractContextManager[Connection]:
        """For statements of a worker's cycle: each a transaction by itself on a server, all one on
        SQLite.
        """

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Connection]:
        """For several statements that commit together."""

    @abstractmethod
    def close(self) -> None:
        """Give the connection back."""
