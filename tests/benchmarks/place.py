"""A database to measure in: filled by one statement, watched by one cheap look, made fresh."""

import sqlite3
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import make_url

from tests.benchmarks import by_hand
from tests.databases import Database

PATIENCE = 900.0
"""Seconds after which a drain has gone wrong."""

LOOK = 0.005
"""Seconds between two looks whether a drain has ended."""


@dataclass(frozen=True)
class Jobs:
    """Rows that were filled in, by their ids."""

    table: str
    done: str
    first: int
    last: int


class Place(ABC):
    """One database with our tables, and those of the loops by hand."""

    number: str
    """What numbers the rows of a fill, in SQL."""
    present: str

    def __init__(self, database: Database) -> None:
        self.database = database
        self.url = database.url
        self.name = database.dialect

    @abstractmethod
    def run(self, statement: str, *values: object) -> Any:
        """Run one statement by itself; its first row."""

    @abstractmethod
    def tidy(self) -> None:
        """Have the database in order before a measurement: statistics, dead rows, its log."""

    @abstractmethod
    def empty(self) -> None:
        """Remove all jobs."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""

    # ---- filling ---------------------------------------------------------------------------------

    def fill(self, count: int, kind: str = "tick", **columns: str) -> Jobs:
        """Insert jobs, available unless ``columns`` (SQL by column; ``n`` numbers the rows from 0)
        say something else.
        """
        values = {
            "kind": f"'{kind}'",
            "queue": "'default'",
            "priority": "0",
            "state": "'available'",
            "arguments": "'{}'",
            "run_at": self.present,
            "max_attempts": "25",
            "created_at": self.present,
            "updated_at": self.present,
            **columns,
        }
        self.run(
            f"INSERT INTO cyclone_job ({', '.join(values)}) "
            f"SELECT {', '.join(values.values())} FROM {self.number.format(count=count)}"
        )
        return self._filled("cyclone_job", "state = 'completed'", count)

    def fill_lines(self, count: int, keys: int, kind: str = "tick") -> Jobs:
        """Sequenced jobs as an enqueue leaves them, the keys in turn."""
        return self.fill(
            count,
            kind,
            state="'pending'",
            waits_for="'admission'",
            sequence_key=f"'key-' || (n % {keys})",
            sequence_open="true",
            on_failure="'dead-letter'",
        )

    def fill_by_hand(self, count: int) -> Jobs:
        """Rows for the loops by hand."""
        self.run(
            "INSERT INTO hand_job (queue, arguments) "
            f"SELECT 'default', '{{}}' FROM {self.number.format(count=count)}"
        )
        return self._filled("hand_job", "state = 2", count)

    def _filled(self, table: str, done: str, count: int) -> Jobs:
        last = int(self.run(f"SELECT max(id) FROM {table}")[0])
        return Jobs(table, done, last - count + 1, last)

    # ---- watching --------------------------------------------------------------------------------

    def wait_done(self, jobs: Jobs) -> None:
        """Return once all of them have ended well.

        Only the last one is looked at until it has: what other looks cost grows with the drain.
        """
        one = f"SELECT {jobs.done} FROM {jobs.table} WHERE id = {jobs.last}"
        rest = (
            f"SELECT NOT EXISTS (SELECT 1 FROM {jobs.table} "
            f"WHERE id BETWEEN {jobs.first} AND {jobs.last} AND NOT ({jobs.done}))"
        )
        deadline = time.monotonic() + PATIENCE
        for question in (one, rest):
            while not self.run(question)[0]:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not drained after {PATIENCE:g} s: {jobs}")
                time.sleep(LOOK)


class PostgresPlace(Place):
    """A database of a PostgreSQL server."""

    number = "generate_series(0, {count} - 1) AS n"
    present = "clock_timestamp()"

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        url = make_url(database.url).set(drivername="postgresql")
        self.dsn = url.render_as_string(hide_password=False)
        self._connection = psycopg.connect(self.dsn, autocommit=True)
        for statement in by_hand.POSTGRESQL_TABLES:
            self._connection.execute(statement)

    def run(self, statement: str, *values: object) -> Any:
        cursor = self._connection.execute(statement.encode(), values or None)
        return cursor.fetchone() if cursor.description else None

    def tidy(self) -> None:
        self.run("VACUUM (ANALYZE)")
        self.run("CHECKPOINT")

    def empty(self) -> None:
        self.run("TRUNCATE cyclone_job, cyclone_history, cyclone_sequence, hand_job, hand_effect")
        self.run("DELETE FROM cyclone_worker")

    def close(self) -> None:
        self._connection.close()


class SqlitePlace(Place):
    """A SQLite file."""

    number = (
        "(WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers "
        "WHERE n + 1 < {count}) SELECT n FROM numbers)"
    )
    present = "(strftime('%s', 'now') * 1000000)"

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.path = make_url(database.url).database or ""
        self._connection = sqlite3.connect(self.path, isolation_level=None, timeout=60)
        for statement in by_hand.SQLITE_TABLES:
            self._connection.execute(statement)

    def run(self, statement: str, *values: object) -> Any:
        return self._connection.execute(statement, values).fetchone()

    def tidy(self) -> None:
        self.run("ANALYZE")
        self.run("PRAGMA wal_checkpoint(TRUNCATE)")

    def empty(self) -> None:
        for table in ("job", "history", "sequence", "worker"):
            self.run(f"DELETE FROM cyclone_{table}")
        self.run("DELETE FROM hand_job")

    def close(self) -> None:
        self._connection.close()
