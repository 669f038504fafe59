"""Hearing what a channel of PostgreSQL says."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import Notify
from sqlalchemy import make_url


class Ear:
    """A connection that listens to a channel."""

    def __init__(self, connection: psycopg.Connection[Any], channel: str) -> None:
        """Listen from now on."""
        self._connection = connection
        connection.execute(f'LISTEN "{channel}"'.encode())

    def hear_until(self, *queues: str, within: float = 30.0) -> list[Notify]:
        """All calls, in order, up to the one that completes `queues`.

        Raises:
            TimeoutError: not all of them were called.
        """
        missing = set(queues)
        calls: list[Notify] = []
        deadline = time.monotonic() + within
        while missing:
            if time.monotonic() > deadline:
                raise TimeoutError(f"never called: {sorted(missing)}; heard {calls}")
            for call in self._connection.notifies(timeout=1.0, stop_after=1):
                calls.append(call)
                missing.discard(call.payload)
        return calls


@contextmanager
def listening(url: str, channel: str) -> Iterator[Ear]:
    """An ear at the database of this SQLAlchemy `url`."""
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as connection:
        yield Ear(connection, channel)
