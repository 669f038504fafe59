"""This library's side of a benchmark that runs the same workloads on several queues.

The harness copies it among its own adapters, hence the imports that are not of this project.
"""

import threading
from typing import Any

import sqlalchemy as sa
from adapters.base import Base, key_of, paced
from harness import REC
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone, Worker

META = {
    "package": "cyclone-sqla",
    "requires": ["PROJECT[binary,async]"],
    "features": ["schedule", "key"],
    "table": "cyclone_job",
    "id_column": "id",
    "unfinished_sql": (
        "SELECT EXISTS (SELECT 1 FROM cyclone_job WHERE queue = 'bench' "
        "AND state IN ('available', 'running') OR waits_for IN ('admission', 'turn'))"
    ),
    "settings": (
        "psycopg, defaults, 500 slots, async actions (option sync: threads), sync ones of the "
        "keys, which are sequences; enqueue on a Connection (option session: in a Session)"
    ),
}


class Adapter(Base):
    """What the harness asks for, done as an application would do it."""

    def setup(self) -> None:
        from cyclone_sqla.migrations import upgrade  # 9 MB that no worker has in its memory

        with self._engine().begin() as connection:
            upgrade(connection)

    def enqueue_each(self, n: int, sw: Any) -> None:
        engine, cyclone = self._engine(), Cyclone()
        if self.opt("session", None):
            self._enqueue_each_in_a_session(engine, n, sw)
            return
        self._define(cyclone)
        with engine.connect() as connection:
            for i in range(-3, n):
                if i == 0:
                    sw.start()
                with connection.begin():
                    self.work.enqueue(connection, seq=i)

    def _enqueue_each_in_a_session(self, engine: sa.Engine, n: int, sw: Any) -> None:
        self._define(Cyclone())
        for i in range(-3, n):
            if i == 0:
                sw.start()
            with Session(engine) as session, session.begin():
                self.work.enqueue(session, seq=i)

    def enqueue_bulk(self, n: int, *, sw: Any, delay: Any, keys: Any, first: int) -> None:
        cyclone = Cyclone()
        self._define(cyclone)
        with Session(self._engine()) as session:
            session.connection()
            sw.start()
            if delay:
                self.work = self.work.using(process_in=delay)
            numbers = range(first, first + n)
            if keys is None:
                jobs = (self.work.job(seq=i) for i in numbers)
            else:
                jobs = (self._keyed_job(i, key_of(i, keys)) for i in numbers)
            cyclone.enqueue_many(session, jobs)
            session.commit()

    def _keyed_job(self, i: int, key: str) -> Any:
        return self.keyed.using(sequence=key).job(key=key, seq=i)

    def enqueue_paced(self, n: int, spacing: float) -> Any:
        engine, cyclone = self._engine(), Cyclone()
        self._define(cyclone)
        with engine.connect() as connection:

            def put(i: int) -> None:
                with connection.begin():
                    self.work.enqueue(connection, seq=i)

            return paced(n, spacing, put)

    def run_worker(self) -> None:
        cyclone = Cyclone(database=self._engine())
        self._define(cyclone)
        REC.begin()
        Worker(cyclone, queues={"bench": self.opt("slots", 500)}).start()
        threading.Event().wait()

    def _engine(self) -> sa.Engine:
        return sa.create_engine(sa.make_url(self.dsn).set(drivername="postgresql+psycopg"))

    def _define(self, cyclone: Cyclone) -> None:
        if self.opt("sync", None):

            def work(seq: int) -> None:
                REC.tick(seq)
        else:

            async def work(seq: int) -> None:
                REC.tick(seq)

        def keyed(key: str, seq: int) -> None:
            if key == "hot":
                threading.Event().wait()
            REC.enter(key)
            REC.tick(seq)
            REC.leave(key)

        self.work = cyclone.action(kind="work", queue="bench")(work)
        self.keyed = cyclone.action(kind="keyed", queue="bench")(keyed)
