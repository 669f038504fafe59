"""The main job measured: enqueue, drain and pickup, beside hand-written SQL in the same run.

Run by `nox -s benchmarks`. Ratios are worth more than absolute numbers: both sides of one are
measured in turn, several times, and the medians are compared.
"""

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone, Worker
from tests.databases import Database

ROUNDS = 5

RAW_INSERT = text(
    "INSERT INTO cyclone_job (kind, queue, priority, state, arguments, run_at, max_attempts, "
    "created_at, updated_at) VALUES ('tick', 'default', 0, 'available', :arguments, {now}, 25, "
    "{now}, {now}) RETURNING id"
)


def say(database: Database, what: str, figure: str) -> None:
    print(f"{database.dialect:<11} {what:<52} {figure}")  # noqa: T201 - the result of a benchmark


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Site:
    """An application with one action of each kind, and a count of what ran."""

    def __init__(self, database: Database) -> None:
        self.engine = database.engine()
        self.cyclone = Cyclone(database=self.engine)
        self.ran = 0
        self.all_ran = threading.Event()
        self.expected = 0
        self.started_at: list[float] = []

        @self.cyclone.action(kind="tick")
        def tick(sent: float) -> None:
            self.started_at.append(time.perf_counter() - sent)
            self.count()

        @self.cyclone.action(kind="atick")
        async def atick(sent: float) -> None:
            self.count()

        self.tick, self.atick = tick, atick

    def count(self) -> None:
        self.ran += 1
        if self.ran >= self.expected:
            self.all_ran.set()

    def expect(self, count: int) -> None:
        self.ran, self.expected = 0, count
        self.all_ran.clear()


@pytest.fixture
def site(database: Database) -> Site:
    return Site(database)


def test_enqueue_one_per_transaction(database: Database, site: Site) -> None:
    now = "clock_timestamp()" if database.dialect == "postgresql" else "0"
    raw = text(RAW_INSERT.text.format(now=now))

    def ours() -> None:
        for _ in range(300):
            with Session(site.engine) as session, session.begin():
                site.tick.enqueue(session, sent=0.0)

    def by_hand() -> None:
        for _ in range(300):
            with Session(site.engine) as session, session.begin():
                session.execute(raw, {"arguments": '{"sent":0.0}'})

    ours(), by_hand()
    pairs = [(seconds(by_hand), seconds(ours)) for _ in range(ROUNDS)]
    ratio = statistics.median(hand / own for hand, own in pairs)
    rate = 300 / statistics.median(own for _, own in pairs)
    say(database, "enqueue, one a transaction, Session", f"{rate:,.0f}/s, {ratio:.2f} of by hand")


def test_enqueue_in_an_open_session(database: Database, site: Site) -> None:
    now = "clock_timestamp()" if database.dialect == "postgresql" else "0"
    raw = text(RAW_INSERT.text.format(now=now))

    def cost(work: Callable[[Session], object]) -> float:
        with Session(site.engine) as session, session.begin():
            session.execute(text("SELECT 1"))
            work(session)
            return seconds(lambda: [work(session) for _ in range(500)])

    def ours(session: Session) -> object:
        return site.tick.enqueue(session, sent=0.0)

    def by_hand(session: Session) -> object:
        return session.execute(raw, {"arguments": '{"sent":0.0}'}).scalar()

    pairs = [(cost(by_hand), cost(ours)) for _ in range(7)]
    times = statistics.median(own / hand for hand, own in pairs)
    per_job = statistics.median(own for _, own in pairs) / 500 * 1e6
    say(database, "enqueue in an open Session", f"{per_job:.0f} us, {times:.2f} x by hand")


def test_enqueue_many(database: Database, site: Site) -> None:
    def bulk() -> None:
        with Session(site.engine) as session, session.begin():
            site.cyclone.enqueue_many(session, (site.tick.job(sent=0.0) for _ in range(10_000)))

    rate = 10_000 / statistics.median(seconds(bulk) for _ in range(3))
    say(database, "enqueue 10,000 in one transaction", f"{rate:,.0f}/s")


@pytest.mark.parametrize("kind", ["tick", "atick"])
def test_drain(database: Database, site: Site, kind: str) -> None:
    action: Any = getattr(site, kind)
    count = 20_000
    with Session(site.engine) as session, session.begin():
        site.cyclone.enqueue_many(session, [action.job(sent=0.0) for _ in range(count)])
    site.expect(count)
    with Worker(site.cyclone, concurrency=200):
        took = seconds(lambda: site.all_ran.wait(120))
    assert site.ran == count
    name = "sync" if kind == "tick" else "async"
    say(database, f"drain {count:,} {name} jobs, one process", f"{count / took:,.0f}/s")


def test_pickup_of_an_idle_worker(database: Database, site: Site) -> None:
    with Worker(site.cyclone):
        time.sleep(1)
        for _ in range(55):
            site.expect(1)
            with Session(site.engine) as session, session.begin():
                site.tick.enqueue(session, sent=time.perf_counter())
            assert site.all_ran.wait(10)
            time.sleep(0.05)
    waits = sorted(site.started_at[5:])
    say(
        database,
        "from before the commit to the action, 50 jobs",
        f"median {waits[25] * 1000:.1f} ms, 90 % below {waits[45] * 1000:.1f} ms",
    )


def test_statements_of_an_idle_worker(database: Database, site: Site) -> None:
    sent: list[str] = []
    worker = Worker(site.cyclone)
    with worker:
        assert worker._parts is not None
        event.listen(worker._parts.engine, "before_cursor_execute", lambda *a: sent.append(a[2]))
        time.sleep(1)
        sent.clear()
        time.sleep(10)
    say(database, "statements of an idle worker", f"{len(sent) / 10:.1f}/s")
