"""Sequences in a crowd: twelve workers, jobs that fail, workers that are shot, dead letters that
come back; the full size is for long runs.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.crashes.crew import PROCESSES, Crew, Monitor
from tests.databases import Database
from tests.servers.postgres import Postgres, PostgresServer
from tests.waiting import wait_until

IS_FULL = os.environ.get("CYCLONE_TEST_CROWD") == "full"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 if IS_FULL else 300)]

PATIENCE = 600.0 if IS_FULL else 200.0


@pytest.fixture
def crew(tmp_path: Path, postgres: Postgres, postgresql_database: Database) -> Crew:
    """Workers on PostgreSQL, none of them started."""
    server_log = postgres.log_path if isinstance(postgres, PostgresServer) else None
    return Crew(tmp_path, postgresql_database, server_log)


@pytest.mark.parametrize(
    ("keys", "count", "kills"),
    [(1, 300, 1), (50, 100, 3)] if IS_FULL else [(1, 40, 0), (12, 20, 1)],
    ids=["one key", "many keys"],
)
def test_each_key_runs_in_order_and_alone_whoever_fails_or_is_killed(
    crew: Crew, keys: int, count: int, kills: int
) -> None:
    crew.enqueue(keys, range(count // 2))
    with ExitStack() as stack:
        stack.enter_context(Monitor(crew.database).watching())
        processes = [stack.enter_context(crew.process()) for _ in range(PROCESSES)]
        wait_until(crew.runs_begun, "the first run", within=PATIENCE)
        crew.enqueue(keys, range(count // 2, count))
        for number in range(kills):
            enough = keys * count * (number + 1) // (kills + 2)
            wait_until(lambda n=enough: crew.runs_begun() > n, "runs", within=PATIENCE)
            crew.replay_dead_letters()
            crew.kill(processes[number])
            processes.append(stack.enter_context(crew.process()))
        wait_until(crew.is_done, "every job is completed", within=PATIENCE, every=0.05)
    crew.check(keys, count)
