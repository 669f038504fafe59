"""What a job writes from its enqueue to its end, counted by the server in row versions."""

from collections.abc import Iterator
from contextlib import closing

import pytest
import sqlalchemy as sa

from cyclone_sqla import operations
from cyclone_sqla.dialects import WorkerConnection
from cyclone_sqla.operations import Claiming, Settlement
from cyclone_sqla.settings import DEFAULT_SETTINGS
from tests.databases import Database
from tests.life.hands import DONE, MINUTE, Hands
from tests.waiting import wait_until
from tests.worker.site import Site, nothing

COUNT = 24

WRITTEN = sa.text(
    "SELECT coalesce(sum(n_tup_ins + n_tup_upd), 0) FROM pg_stat_user_tables "
    "WHERE relname LIKE 'cyclone%' AND relname <> 'cyclone_worker'"  # which is not about jobs
)

OTHERS = sa.text(
    "SELECT count(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


class Meter:
    """Counts from its making on. A session tells what it wrote when it ends, at the latest."""

    def __init__(self, database: Database) -> None:
        self._engine = database.engine(isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        self._before = self._written()

    def versions_per_job(self) -> float:
        """Row versions of all our tables, once everybody else has disconnected."""
        with self._engine.connect() as connection:
            wait_until(lambda: connection.scalar(OTHERS) == 0, "all others have disconnected")
        return (self._written() - self._before) / COUNT

    def _written(self) -> int:
        with self._engine.connect() as connection:
            return int(connection.scalar(WRITTEN) or 0)


@pytest.fixture
def hands(postgresql_database: Database) -> Iterator[Hands]:
    with closing(Hands(postgresql_database)) as hands:
        yield hands


@pytest.fixture
def turns(hands: Hands) -> Iterator[WorkerConnection]:
    """A connection that takes a worker's turns: settles, hands on and claims by one call."""
    held = hands.dialect.hold(hands.worker_engine, DEFAULT_SETTINGS, takes_turns=True)
    yield held
    held.close()


def take_all_turns(hands: Hands, held: WorkerConnection, *, hands_over: bool) -> int:
    """Run what is available one by one, each settled together with the next claim."""
    wanted = Claiming({"default": 1}, ["work"], "worker-1", MINUTE, hands_over)
    ended, batch = 0, list[Settlement]()
    while True:
        with held.step() as connection:
            settled, claimed = operations.settle_and_claim(
                connection, hands.dialect, batch, wanted, history_limit=25
            )
        ended += len(settled.states)
        if not claimed:
            return ended
        batch = [
            Settlement(job.id, job.lease, job.attempt, "worker-1", DONE, job.sequence_key)
            for job in claimed
        ]


@pytest.mark.parametrize(
    ("is_sequenced", "most"), [(False, 3), (True, 4)], ids=["plain", "alone in its line"]
)
def test_a_job_that_waits_for_nobody_costs(
    postgresql_database: Database, is_sequenced: bool, most: int
) -> None:
    meter = Meter(postgresql_database)
    site = Site(postgresql_database, hints=False)
    site.action(nothing)
    for number in range(COUNT):
        site.enqueue(**({"sequence": f"key-{number}"} if is_sequenced else {}))
    with site.worker():
        site.wait_until_all_are("completed")
    site.engine.dispose()

    assert 3 <= meter.versions_per_job() <= most


@pytest.mark.parametrize(
    ("hands_over", "most"), [(True, 4), (False, 5)], ids=["handed over", "claimed in its turn"]
)
def test_a_job_that_waits_for_its_turn_costs(
    postgresql_database: Database,
    hands: Hands,
    turns: WorkerConnection,
    hands_over: bool,
    most: int,
) -> None:
    meter = Meter(postgresql_database)
    hands.enqueue_many(COUNT, sequence="a", on_failure="dead-letter")
    hands.admit()

    assert take_all_turns(hands, turns, hands_over=hands_over) == COUNT
    turns.close()
    hands.close()
    hands.engine.dispose()

    assert 3 <= meter.versions_per_job() <= most
