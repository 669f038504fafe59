"""The faults: each is a function that does harm for a while and ends it before it returns."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from cyclone_sqla.hint_senders import notify_channel

if TYPE_CHECKING:
    from tests.soak.arena import Arena, PostgresArena

LOW_LIMITS = {
    "statement_timeout": ("statement_timeout", "25ms"),
    "lock_timeout": ("lock_timeout", "10ms"),
    "idle in transaction": ("idle_in_transaction_session_timeout", "20ms"),
    "idle session": ("idle_session_timeout", "150ms"),
}


# ---- workers ---------------------------------------------------------------------------------


def kill_worker(arena: Arena) -> None:
    """SIGKILL."""
    arena.crowd.victim().kill()


def freeze_worker(arena: Arena) -> None:
    """SIGSTOP until its lease has run out, then SIGCONT."""
    with arena.crowd.frozen():
        time.sleep(arena.lease * arena.chance.uniform(1.2, 2.0))


def exit_in_action(arena: Arena) -> None:
    """`os._exit` in an action, with whatever else the process is running."""
    before = arena.crowd.ended
    arena.enqueue("exit_once", {})
    give_up = time.monotonic() + 20.0
    while arena.crowd.ended == before and time.monotonic() < give_up:
        time.sleep(0.02)


# ---- PostgreSQL ------------------------------------------------------------------------------


def restart_fast(arena: PostgresArena) -> None:
    """As an administrator does it."""
    _down(arena, "fast")


def restart_immediate(arena: PostgresArena) -> None:
    """Crash and recovery."""
    _down(arena, "immediate")


def _down(arena: PostgresArena, mode: str) -> None:
    arena.server.stop(mode)
    time.sleep(arena.chance.uniform(0, 2.0))
    arena.server.start()


def terminate_all(arena: PostgresArena) -> None:
    """Every session, several times."""
    for _ in range(arena.chance.randint(1, 4)):
        arena.administer(TERMINATE)
        time.sleep(arena.chance.uniform(0.1, 1.0))


def freeze_server(arena: PostgresArena) -> None:
    """SIGSTOP to all its processes: connections stay open and nothing answers."""
    try:
        arena.server.freeze()
        time.sleep(arena.chance.uniform(1.0, 6.0))
    finally:
        arena.server.thaw()


def read_only(arena: PostgresArena) -> None:
    """Sessions that may only read, as after a failover, and back."""
    with _setting(arena, "default_transaction_read_only", "on"):
        time.sleep(arena.chance.uniform(0.5, 3.0))


def low_limit(name: str) -> Callable[[PostgresArena], None]:
    """One of the server's limits so low that some statements and transactions meet it."""
    setting, value = LOW_LIMITS[name]

    def limit(arena: PostgresArena) -> None:
        with _setting(arena, setting, value), locked_rows(arena):
            time.sleep(arena.chance.uniform(1.0, 3.0))

    return limit


@contextmanager
def _setting(arena: PostgresArena, name: str, value: str) -> Iterator[None]:
    """A default of the database that every session has from now on, until the end of the block."""
    arena.administer(f"ALTER DATABASE {arena.name} SET {name} = '{value}'", TERMINATE)
    yield
    arena.administer(f"ALTER DATABASE {arena.name} RESET {name}", TERMINATE)


def silence(arena: PostgresArena) -> None:
    """The workers' connections look alive and bring no answers, until they are closed at last."""
    arena.proxy.hush(takes_new=arena.chance.random() < 0.5)
    time.sleep(arena.chance.uniform(2.0, 5.0))
    arena.proxy.speak()
    arena.proxy.hang_up()


def flood(arena: PostgresArena) -> None:
    """Thousands of notifications on the workers' channel, sensible ones and others."""
    channel = notify_channel(None)
    for number in range(20):
        payload = "'default' || i" if number % 2 else "repeat(chr(65 + i % 26), 7000)"
        notify = f"SELECT pg_notify('{channel}', {payload}) FROM generate_series(1, 300) AS i"
        with suppress(DBAPIError), arena.outside.begin() as connection:
            connection.exec_driver_sql(notify)


def lock_rows(arena: PostgresArena) -> None:
    """Somebody's transaction holds the rows of jobs in every state."""
    with locked_rows(arena):
        time.sleep(arena.chance.uniform(0.5, 3.0))


@contextmanager
def locked_rows(arena: PostgresArena) -> Iterator[None]:
    """Rows of jobs are locked until the end of the block, or of the session that holds them."""
    with arena.outside.connect() as connection:
        with suppress(DBAPIError):
            connection.exec_driver_sql(LOCK_SOME)
        yield
        with suppress(DBAPIError):
            connection.rollback()
            return
        connection.invalidate()


def deadlocks(arena: PostgresArena) -> None:
    """Others lock the accounts in the other order than the transfers do."""
    until = time.monotonic() + arena.chance.uniform(1.0, 2.5)
    while time.monotonic() < until:
        with suppress(DBAPIError), arena.outside.begin() as connection:
            connection.exec_driver_sql("SELECT FROM account WHERE id = 2 FOR UPDATE")
            time.sleep(0.02)
            connection.exec_driver_sql("SELECT FROM account WHERE id = 1 FOR UPDATE")
        time.sleep(0.02)


TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname IS NOT NULL AND pid <> pg_backend_pid()
"""

LOCK_SOME = """
SELECT FROM cyclone_job WHERE id IN (
    SELECT id FROM cyclone_job WHERE finished_at IS NULL ORDER BY random() LIMIT 25
) FOR UPDATE SKIP LOCKED
"""


# ---- SQLite ----------------------------------------------------------------------------------


def hold_write_lock(arena: Arena) -> None:
    """Nobody else may write for longer than a worker waits."""
    _hold(arena, "BEGIN IMMEDIATE")


def hold_snapshot(arena: Arena) -> None:
    """A reader keeps the write-ahead log from being written back, and it grows."""
    _hold(arena, "BEGIN", "SELECT count(*) FROM cyclone_job")


def _hold(arena: Arena, *statements: str) -> None:
    with suppress(DBAPIError), arena.outside.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement).close()
        time.sleep(arena.chance.uniform(0.5, 4.0))


Fault = Callable[..., None]

OF_WORKERS: dict[str, Fault] = {
    "worker killed": kill_worker,
    "worker frozen past its lease": freeze_worker,
    "os._exit in an action": exit_in_action,
}

OF_POSTGRESQL: dict[str, Fault] = {
    "server restarted (fast)": restart_fast,
    "server restarted (immediate)": restart_immediate,
    "all sessions terminated": terminate_all,
    "server frozen": freeze_server,
    "read-only and back": read_only,
    "connections silent": silence,
    "notification flood": flood,
    "rows locked by others": lock_rows,
    "deadlocks": deadlocks,
    **{f"{name} low": low_limit(name) for name in LOW_LIMITS},
}

OF_SQLITE: dict[str, Fault] = {
    "write lock held by others": hold_write_lock,
    "snapshot held by others": hold_snapshot,
}


def rounds(faults: dict[str, Fault], chance: random.Random) -> Iterator[str]:
    """Names of faults for ever, in random order; each comes once before any comes again."""
    while True:
        yield from chance.sample(sorted(faults), len(faults))


@contextmanager
def beside(arena: Arena, fault: Fault | None) -> Iterator[None]:
    """Another fault at the same time, which has ended with the block."""
    if fault is None:
        yield
        return
    thread = threading.Thread(target=fault, args=(arena,))
    thread.start()
    try:
        yield
    finally:
        thread.join()
