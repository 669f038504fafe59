"""Money moved by jobs whose workers are killed and frozen: each transfer is applied once."""

import random
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.crashes.bank import Account, Applied, Base
from tests.crashes.fleet import Fleet
from tests.databases import Database

LEASE = {"lease": 2.0, "rescue_interval": 0.2, "concurrency": 8}
START = 1_000_000


@pytest.fixture
def fleet(tmp_path: Path, database: Database) -> Fleet:
    """Workers on each database, with two accounts in it."""
    fleet = Fleet(tmp_path, database)
    Base.metadata.create_all(fleet.site.engine)
    with Session(fleet.site.engine) as session, session.begin():
        session.add_all([Account(id=1, balance=START), Account(id=2, balance=START)])
    return fleet


def enqueue_transfers(fleet: Fleet, kind: str, count: int) -> int:
    """Enqueue transfers in both directions; what account 1 has after all of them."""
    balance, chance = START, random.Random(count)
    with Session(fleet.site.engine) as session, session.begin():
        for _ in range(count):
            debit, amount = chance.choice([1, 2]), chance.randint(1, 100)
            arguments = {"debit": debit, "credit": 3 - debit, "amount": amount}
            fleet.site.cyclone.enqueue(session, kind, arguments)
            balance += amount if debit == 2 else -amount
    return balance


def balances(fleet: Fleet) -> list[int]:
    with Session(fleet.site.engine) as session:
        return list(session.scalars(sa.select(Account.balance).order_by(Account.id)))


def times_applied(fleet: Fleet) -> Counter[int]:
    with Session(fleet.site.engine) as session:
        return Counter(session.scalars(sa.select(Applied.job_id)))


class Freezer:
    """Freezes one worker for longer than its lease, and lets it go on."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._thread = threading.Thread(target=self._freeze)

    def __enter__(self) -> None:
        self._process = self._fleet.start(**LEASE, name="frozen")
        self._thread.start()

    def _freeze(self) -> None:
        process = psutil.Process(self._process.pid)
        time.sleep(1.5)
        process.suspend()
        time.sleep(3.0)
        process.resume()

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._process.kill()
        self._process.join()


# The full size is what this is about; the small one finds most faults in a few seconds.
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "size", [pytest.param("small"), pytest.param("full", marks=pytest.mark.soak)]
)
def test_each_transfer_is_applied_once_though_workers_are_killed_and_frozen(
    fleet: Fleet, size: str
) -> None:
    is_sqlite = fleet.site.database.dialect == "sqlite"
    count = 5_000 if size == "full" else 600
    workers, every = (2, 3.0 if size == "full" else 0.5) if is_sqlite else (4, 0.5)
    expected = enqueue_transfers(fleet, "transfer", count)

    with Freezer(fleet):
        kills = fleet.drain_under_fire(workers, every, **LEASE)

    assert kills >= 1
    assert balances(fleet) == [expected, 2 * START - expected]
    assert set(times_applied(fleet).values()) == {1}
    assert len(times_applied(fleet)) == count
    assert "Traceback" not in fleet.output()


def test_in_a_transaction_of_its_own_the_same_transfer_is_applied_again(fleet: Fleet) -> None:
    """What the test above would see if the promise were broken."""
    enqueue_transfers(fleet, "transfer_apart", 300)
    workers = 2 if fleet.site.database.dialect == "sqlite" else 4
    fleet.drain_under_fire(workers, 0.3, **LEASE)

    assert max(times_applied(fleet).values()) > 1
