"""A streaming replica answers every look, and takes no job."""

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection

from cyclone_sqla import Cyclone
from cyclone_sqla.migrations import migrate_database
from tests.servers.postgres import PostgresServer
from tests.waiting import wait_until


class Replica(PostgresServer):
    """A server that follows another one."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__({"hot_standby_feedback": "off"})
        self._primary = primary

    def _copy(self) -> list[str]:
        source = f"host=127.0.0.1 port={self._primary.port} user=postgres"
        return [str(self._bindir / "pg_basebackup"), "-R", "-D", str(self.data), "-d", source]

    def _initialise(self) -> None:
        run_as: Any = self._account.run_as
        subprocess.run(
            [*self._copy(), "--checkpoint=fast", "--no-sync"],
            check=True,
            cwd=self.directory,
            **run_as,
        )
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write(f"port = {self.port}\nunix_socket_directories = '{self.directory}'\n")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[sa.Engine, sa.Engine]]:
    """The primary and its replica, with our tables."""
    with PostgresServer() as primary:
        primary.create_database("shop")
        migrate_database(primary.url("shop"))
        with Replica(primary) as replica:
            engines = (sa.create_engine(primary.url("shop")), sa.create_engine(replica.url("shop")))
            yield engines
            for engine in engines:
                engine.dispose()


cyclone = Cyclone()

LOOKS: dict[str, Callable[[Connection, int], Any]] = {
    "get": lambda connection, job_id: cyclone.get(connection, job_id).state,
    "explain": lambda connection, job_id: cyclone.explain(connection, job_id).reason,
    "history": cyclone.history,
    "jobs": lambda connection, _: [job.id for job in cyclone.jobs(connection)],
    "queues": lambda connection, _: [queue.name for queue in cyclone.queues(connection)],
    "sequences": lambda connection, _: [line.key for line in cyclone.sequences(connection)],
    "halted_sequences": lambda connection, _: cyclone.halted_sequences(connection),
    "stats": lambda connection, _: cyclone.stats(connection).jobs,
}


def test_a_replica_answers_every_look_as_its_primary_does(
    pair: tuple[sa.Engine, sa.Engine],
) -> None:
    primary, replica = pair
    with primary.begin() as connection:
        job_id = cyclone.enqueue(connection, "work", {}, sequence="a").id

    looking = replica.execution_options(isolation_level="AUTOCOMMIT")
    with primary.connect() as here, looking.connect() as there:
        exists = sa.exists().where(cyclone.job_class.id == job_id)
        wait_until(lambda: there.scalar(sa.select(exists)), "the replica has the job")
        for name, look in LOOKS.items():
            assert look(there, job_id) == look(here, job_id), name


def test_a_replica_takes_no_job(pair: tuple[sa.Engine, sa.Engine]) -> None:
    _, replica = pair
    with replica.connect() as there, pytest.raises(sa.exc.DBAPIError, match="read-only"):
        cyclone.enqueue(there, "work", {})
