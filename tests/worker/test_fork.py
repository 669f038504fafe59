"""An application that has used its engine and its queue forks: nobody uses another's connection."""

import subprocess
import sys

import sqlalchemy as sa

from tests.databases import Database

APPLICATION = """
import os, sys, time, warnings
import sqlalchemy as sa
from sqlalchemy.orm import Session
from cyclone_sqla import Cyclone, Worker

warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is the point
engine = sa.create_engine(sys.argv[1])
cyclone = Cyclone(engine)

@cyclone.action
def work() -> None: ...

def enqueue(count: int) -> None:
    for _ in range(count):
        with Session(engine) as session, session.begin():
            work.enqueue(session)

def run() -> None:
    with Worker(cyclone, poll=0.1), engine.connect() as connection:
        open = sa.text("SELECT count(*) FROM cyclone_job WHERE state <> 'completed'")
        for _ in range(600):
            with connection.begin():
                if connection.scalar(open) == 0:
                    return
            time.sleep(0.1)
    raise TimeoutError("not all jobs ran")

with engine.connect() as connection:
    connection.scalar(sa.text("SELECT 1"))
enqueue(5)
time.sleep(0.2)  # the hints have gone, by a connection that the children must not use
children = []
for _ in range(4):
    if (child := os.fork()) == 0:
        try:
            engine.dispose(close=False)  # as SQLAlchemy says
            enqueue(40)
            run()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    children.append(child)
enqueue(5)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
enqueue(5)
run()
"""


def test_forked_processes_enqueue_and_work_on_connections_of_their_own(
    postgresql_database: Database,
) -> None:
    command = [sys.executable, "-c", APPLICATION, postgresql_database.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with postgresql_database.engine().connect() as connection:
        runs = sa.text("SELECT count(*), sum(attempt) FROM cyclone_job WHERE state = 'completed'")
        assert tuple(connection.execute(runs).one()) == (175, 175)
