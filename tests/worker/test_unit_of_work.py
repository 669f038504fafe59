"""The session of a run: what it writes commits together with the run's own end, or not at all."""

import random
import threading
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, sessionmaker

from cyclone_sqla import ConfigurationError, Context, Discard, LeaseLostError, Snooze
from cyclone_sqla.backoff import Constant
from cyclone_sqla.worker.runs import Interruption
from tests.databases import Database
from tests.shop import Base, Order
from tests.waiting import wait_until
from tests.worker.site import Gate, Site, messages, tracebacks

LATER = Constant(3_600)


@pytest.fixture
def site(database: Database) -> Site:
    return with_orders(Site(database))


@pytest.fixture
def postgresql_site(postgresql_database: Database) -> Site:
    return with_orders(Site(postgresql_database))


def with_orders(site: Site) -> Site:
    Base.metadata.create_all(site.database.engine())
    return site


def notes(site: Site) -> list[str]:
    """The orders that are committed."""
    with Session(site.database.engine()) as session:
        return sorted(session.scalars(sa.select(Order.note)))


# ---- one transaction -----------------------------------------------------------------------------


def test_writes_enqueued_jobs_and_the_completion_commit_together(site: Site) -> None:
    gate = Gate()

    def work(ctx: Context) -> str:
        ctx.session.add(Order(note="first"))
        ctx.session.flush()
        site.cyclone.enqueue(ctx.session, "follow", {})
        gate()
        return "done"

    site.action(work)
    site.action(gate.passing(), kind="follow")
    job_id = site.enqueue()
    with site.worker():
        gate.await_arrival()
        assert notes(site) == []
        assert site.states() == {"running": 1}
        gate.open()
        site.wait_for(job_id, "completed")
        assert notes(site) == ["first"]
        site.wait_until_all_are("completed")
    assert site.job(job_id).result == '"done"'
    assert site.states() == {"completed": 2}


def test_it_is_one_transaction_of_the_database(postgresql_site: Site) -> None:
    site = postgresql_site

    def work(ctx: Context) -> None:
        ctx.session.add(Order(note="first"))

    site.action(work)
    ids = [site.enqueue(sequence=key) for key in (None, "a")]
    with site.worker():
        site.wait_until_all_are("completed")
    with site.engine.connect() as connection:
        of_orders = connection.scalars(sa.text("SELECT xmin::text FROM shop_order"))
        of_jobs = connection.scalars(sa.text("SELECT xmin::text FROM cyclone_job"))
        assert sorted(of_orders) == sorted(of_jobs)
    assert len(ids) == 2


@pytest.mark.parametrize("ending", ["raises", "snoozes", "discards", "exits"])
def test_of_an_action_that_does_not_return_nothing_stays(site: Site, ending: str) -> None:
    endings = {
        "raises": ValueError("it broke"),
        "snoozes": Snooze(in_=3_600),
        "discards": Discard("no use"),
        "exits": SystemExit(1),
    }

    def work(ctx: Context) -> None:
        ctx.session.add(Order(note="first"))
        ctx.session.flush()
        raise endings[ending]

    site.action(work, backoff=LATER)
    job_id = site.enqueue()
    with site.worker():
        site.wait_for(job_id, "discarded" if ending == "discards" else "pending")
    assert notes(site) == []
    assert len(site.history(job_id)) == 1


@pytest.mark.parametrize("ending", ["snoozes", "discards"])
def test_an_action_may_keep_its_writes_though_its_job_goes_on_or_fails(
    site: Site, ending: str
) -> None:
    def work(ctx: Context) -> None:
        ctx.session.add(Order(note=ending))
        if ending == "snoozes":
            raise Snooze(in_=3_600, keep_writes=True)
        raise Discard("no use", keep_writes=True)

    site.action(work)
    job_id = site.enqueue(sequence="a")
    with site.worker():
        wait_until(lambda: len(site.history(job_id)) == 1, "the run has ended")
    assert notes(site) == [ending]
    assert site.job(job_id).state == ("pending" if ending == "snoozes" else "discarded")


def test_a_constraint_that_fails_at_the_commit_fails_the_attempt(site: Site) -> None:
    def work(ctx: Context) -> None:
        ctx.session.add(Order(note="first", total=-1))  # flushed by the commit alone

    site.action(work, backoff=LATER)
    job_id = site.enqueue()
    with site.worker():
        site.wait_for(job_id, "pending")
    assert notes(site) == []
    assert "IntegrityError" in (site.job(job_id).last_error or "")


def test_a_run_that_lost_its_lease_changes_nothing(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    gate, seen = Gate(), list[bool]()

    def work(ctx: Context) -> None:
        if ctx.attempt > 1:
            return
        ctx.session.scalars(sa.select(Order)).all()
        ctx.check_lease()
        gate()
        try:
            ctx.check_lease()
        except LeaseLostError:
            seen.append(True)
        ctx.session.add(Order(note="late"))

    site.action(work)
    job_id = site.enqueue()
    with site.worker(lease=600.0, rescue_interval=600.0, poll=60.0, listen=False):
        gate.await_arrival()
        site.execute("UPDATE cyclone_job SET lease = lease + 1000, worker = 'somebody'")
        gate.open()
        wait_until(lambda: any("lease lost" in text for text in messages(caplog.records)), "told")
    assert notes(site) == []
    assert seen == [True]
    assert site.job(job_id).state == "running"


def test_a_run_that_was_asked_to_stop_commits_nothing(site: Site) -> None:
    gate = Gate()

    def work(ctx: Context) -> None:
        ctx.session.add(Order(note="late"))
        gate()

    site.action(work)
    job_id = site.enqueue()
    with site.worker(lease=600.0, listen=False):
        gate.await_arrival()
        with Session(site.engine) as session, session.begin():
            site.cyclone.cancel(session, job_id)
        gate.open()
        site.wait_for(job_id, "cancelled")
    assert notes(site) == []


def test_heads_hand_their_line_on_in_the_same_transaction(site: Site) -> None:
    order: list[int] = []

    def work(ctx: Context, n: int) -> None:
        ctx.session.add(Order(note=str(n)))
        order.append(n)

    site.action(work)
    for n in range(30):
        site.enqueue("work", {"n": n}, sequence="a")
    with site.worker():
        site.wait_until_all_are("completed")
    assert order == list(range(30))
    assert len(notes(site)) == 30


def test_outside_read_committed_a_worker_hands_the_line_on(postgresql_database: Database) -> None:
    engine = postgresql_database.engine(isolation_level="REPEATABLE READ")
    site = with_orders(Site(postgresql_database, engine=engine))
    order: list[int] = []

    def work(ctx: Context, n: int) -> None:
        ctx.session.scalars(sa.select(Order)).all()
        if n == 0:  # what comes behind it is not in its snapshot
            gate()
        ctx.session.add(Order(note=str(n)))
        order.append(n)

    gate = Gate()
    site.action(work)
    site.enqueue("work", {"n": 0}, sequence="a")
    with site.worker():
        gate.await_arrival()
        for n in range(1, 6):
            site.enqueue("work", {"n": n}, sequence="a")
        waiting = sa.text("SELECT count(*) FROM cyclone_job WHERE waits_for = 'turn'")
        with postgresql_database.engine().connect() as connection:
            wait_until(lambda: connection.scalar(waiting) == 5, "they wait for their turn")
        gate.open()
        site.wait_until_all_are("completed")
    assert order == list(range(6))


# ---- what the action may do ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["commit", "rollback", "close", "begin", "with"])
def test_the_action_may_not_end_the_transaction_itself(site: Site, how: str) -> None:
    def work(ctx: Context) -> None:
        if how == "begin":
            with ctx.session.begin():
                ctx.session.add(Order(note="first"))
        elif how == "with":
            with ctx.session as session:
                session.add(Order(note="first"))
                session.flush()
        else:
            ctx.session.add(Order(note="first"))
            ctx.session.flush()
            getattr(ctx.session, how)()

    site.action(work, backoff=LATER)
    job_id = site.enqueue()
    with site.worker():
        site.wait_for(job_id, "pending")
    assert notes(site) == []
    assert "the action ended the transaction of its session by itself" in (
        site.job(job_id).last_error or ""
    )


def test_a_part_may_fail_in_a_savepoint(site: Site) -> None:
    def work(ctx: Context) -> None:
        for total in (1, -1, 2):
            try:
                with ctx.session.begin_nested():
                    ctx.session.add(Order(note=str(total), total=total))
            except sa.exc.IntegrityError:
                continue

    site.action(work)
    job_id = site.enqueue()
    with site.worker():
        site.wait_for(job_id, "completed")
    assert notes(site) == ["1", "2"]


def test_an_action_that_asks_for_the_wrong_kind_of_session_is_told(site: Site) -> None:
    async def work(ctx: Context) -> None:
        ctx.session.add(Order(note="first"))

    site.action(work, discard_on=[ConfigurationError])
    job_id = site.enqueue()
    with site.worker():
        assert "ctx.async_session" in (site.wait_for(job_id, "discarded").last_error or "")


# ---- conflicts with other transactions -----------------------------------------------------------


@pytest.fixture
def strict_site(postgresql_database: Database) -> Site:
    """An application whose transactions are REPEATABLE READ."""
    engine = postgresql_database.engine(isolation_level="REPEATABLE READ")
    site = with_orders(Site(postgresql_database, engine=engine))
    with Session(site.engine) as session, session.begin():
        session.add(Order(note="contended", total=0))
    return site


def meddle(site: Site) -> None:
    """Change the contended row, from another connection."""
    site.execute("UPDATE shop_order SET total = total + 100")


def add_one(ctx: Context) -> None:
    ctx.session.scalars(sa.select(Order)).one().total += 1
    ctx.session.flush()


def test_a_serialization_failure_starts_the_action_over_in_the_same_attempt(
    strict_site: Site,
) -> None:
    runs: list[int] = []

    def work(ctx: Context) -> None:
        runs.append(ctx.attempt)
        ctx.session.scalars(sa.select(Order)).one()
        if len(runs) < 4:
            meddle(strict_site)
        add_one(ctx)

    strict_site.action(work)
    job_id = strict_site.enqueue()
    with strict_site.worker():
        strict_site.wait_for(job_id, "completed")
    assert runs == [1, 1, 1, 1]
    with Session(strict_site.engine) as session:
        assert session.scalars(sa.select(Order.total)).one() == 301


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_jobs_that_contend_for_one_row_all_end_and_each_counts_once(
    postgresql_database: Database, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = postgresql_database.engine(isolation_level=level)
    site = with_orders(Site(postgresql_database, engine=engine))
    with Session(site.engine) as session, session.begin():
        session.add(Order(note="contended", total=0))
    site.action(add_one, backoff=Constant(0.05))
    jobs = site.enqueue_many(30, max_attempts=100)
    with site.worker(concurrency=3), site.worker(concurrency=3):
        site.wait_until_all_are("completed")
    with Session(site.engine) as session:
        assert session.scalars(sa.select(Order.total)).one() == len(jobs)
    assert tracebacks(caplog.records) == []


def test_after_five_starts_it_is_a_failed_attempt(strict_site: Site) -> None:
    runs: list[int] = []

    def work(ctx: Context) -> None:
        runs.append(ctx.attempt)
        ctx.session.scalars(sa.select(Order)).one()
        meddle(strict_site)
        add_one(ctx)

    strict_site.action(work, backoff=LATER)
    job_id = strict_site.enqueue()
    with strict_site.worker():
        strict_site.wait_for(job_id, "pending")
    assert runs == [1] * 5
    assert len(strict_site.history(job_id)) == 1


def test_a_conflict_of_another_connection_is_a_failed_attempt(strict_site: Site) -> None:
    runs: list[int] = []

    def work(ctx: Context) -> None:
        runs.append(ctx.attempt)
        ctx.session.add(Order(note="own"))
        ctx.session.flush()
        with Session(strict_site.engine) as other, other.begin():
            row = other.scalars(sa.select(Order).where(Order.note == "contended")).one()
            meddle(strict_site)
            row.total += 1

    strict_site.action(work, backoff=LATER)
    job_id = strict_site.enqueue()
    with strict_site.worker():
        strict_site.wait_for(job_id, "pending")
    assert runs == [1]
    assert notes(strict_site) == ["contended"]


def test_on_sqlite_a_unit_of_work_may_read_and_then_write(sqlite_database: Database) -> None:
    site = with_orders(Site(sqlite_database))

    def work(ctx: Context) -> None:
        ctx.session.scalars(sa.select(Order)).all()
        with Session(site.engine) as other, other.begin():
            other.add(Order(note="theirs"))
        ctx.session.add(Order(note="ours"))

    site.action(work)
    job_id = site.enqueue()
    with site.worker():
        site.wait_for(job_id, "completed")
    assert site.job(job_id).attempt == 1
    assert notes(site) == ["ours", "theirs"]


# ---- the connection is lost ----------------------------------------------------------------------


def test_a_commit_whose_answer_is_lost_happens_once(
    postgresql_site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site, lost, runs = postgresql_site, list[bool](), list[int]()

    @event.listens_for(site.engine, "connect")
    def lose(connection: Any, _record: object) -> None:
        commit = connection.commit

        def commit_and_vanish() -> None:
            commit()
            if runs and not lost:
                lost.append(True)
                connection.close()
                raise psycopg.OperationalError("the answer was lost")

        connection.commit = commit_and_vanish

    site.engine.dispose()

    def work(ctx: Context) -> None:
        ctx.session.add(Order(note="first"))
        ctx.session.flush()
        runs.append(ctx.attempt)

    site.action(work)
    job_id = site.enqueue()
    with site.worker():
        site.wait_for(job_id, "completed")
        wait_until(
            lambda: any("is not known" in text for text in messages(caplog.records)), "it says so"
        )
    assert lost == [True]
    assert (runs, notes(site)) == ([1], ["first"])


def test_an_action_whose_connection_was_lost_is_a_failed_attempt(postgresql_site: Site) -> None:
    site = postgresql_site

    def work(ctx: Context) -> None:
        ctx.session.add(Order(note=f"attempt {ctx.attempt}"))
        ctx.session.flush()
        if ctx.attempt == 1:
            ctx.session.connection().connection.driver_connection.close()  # type: ignore[union-attr]

    site.action(work, backoff=Constant(0.05))
    job_id = site.enqueue()
    with site.worker():
        site.wait_for(job_id, "completed")
    assert notes(site) == ["attempt 2"]


# ---- async actions -------------------------------------------------------------------------------


@pytest.fixture
def async_site(bare_async_site: Site) -> Site:
    return with_orders(bare_async_site)


def test_an_async_action_commits_in_the_same_way(async_site: Site) -> None:
    async def work(ctx: Context) -> None:
        session = ctx.async_session
        session.add(Order(note="first"))
        await session.flush()
        await async_site.cyclone.enqueue(session, "follow", {})
        async with session.begin_nested():
            session.add(Order(note="second"))

    async def follow(ctx: Context) -> None:
        (await ctx.async_session.scalars(sa.select(Order))).first()

    async_site.action(work)
    async_site.action(follow, kind="follow")
    job_id = async_site.enqueue(sequence="a")
    with async_site.worker():
        async_site.wait_for(job_id, "completed")
        async_site.wait_until_all_are("completed")
    assert notes(async_site) == ["first", "second"]
    assert async_site.states() == {"completed": 2}


def test_of_an_async_action_that_fails_or_ends_it_itself_nothing_stays(async_site: Site) -> None:
    async def work(ctx: Context, how: str) -> None:
        ctx.async_session.add(Order(note="first"))
        await ctx.async_session.flush()
        if how == "raises":
            raise ValueError("it broke")
        if how == "loses its lease":
            async_site.execute("UPDATE cyclone_job SET lease = lease + 1 WHERE kind = 'work'")
        await getattr(ctx.async_session, "commit" if how == "commits" else "flush")()

    async_site.action(work, backoff=LATER)
    ids = [async_site.enqueue("work", {"how": how}) for how in ("raises", "commits")]
    with async_site.worker():
        for job_id in ids:
            async_site.wait_for(job_id, "pending")
    assert notes(async_site) == []
    assert "by itself" in (async_site.job(ids[1]).last_error or "")


COMMITS_WAIT = """
    CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock(28); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON shop_order
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait();
"""


@pytest.mark.parametrize(
    "bare_async_site", [("postgresql", "asyncpg"), ("postgresql", "psycopg")], indirect=True
)
def test_a_commit_that_has_begun_is_not_cancelled(
    async_site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Else nobody would know whether it had happened, and a warning would say so."""

    async def work(ctx: Context) -> None:
        ctx.async_session.add(Order(note=f"attempt {ctx.attempt}"))

    async_site.action(work, backoff=LATER)
    async_site.execute(COMMITS_WAIT)
    job_id = async_site.enqueue()
    waiting = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    with async_site.database.engine().connect() as other, async_site.worker() as worker:
        other.execute(sa.text("SELECT pg_advisory_xact_lock(28)"))
        wait_until(lambda: other.scalar(waiting) == 1, "it commits")
        assert worker._parts is not None
        lease = async_site.job(job_id).lease
        assert worker._parts.executor.cancel(job_id, lease, Interruption.TIMED_OUT)
        other.rollback()
        async_site.wait_for(job_id, "completed")
    assert notes(async_site) == ["attempt 1"]
    assert messages(caplog.records) == []


@pytest.mark.parametrize(
    "bare_async_site", [("postgresql", "asyncpg"), ("postgresql", "psycopg")], indirect=True
)
def test_runs_that_are_cancelled_in_the_middle_of_a_query_leave_no_connection_behind(
    async_site: Site,
) -> None:
    chance = random.Random(28)

    async def work(ctx: Context) -> None:
        for n in range(5):
            ctx.async_session.add(Order(note=f"{ctx.job.id}.{n}"))
            await ctx.async_session.flush()
            await ctx.async_session.execute(sa.text("SELECT pg_sleep(0.02)"))

    async def after(ctx: Context) -> None:
        ctx.async_session.add(Order(note="after"))

    async_site.action(work)
    async_site.action(after, kind="after")
    engine = async_site.database.engine()
    with Session(engine) as session, session.begin():
        for _ in range(150):
            limit = timedelta(seconds=chance.uniform(0.001, 0.09))
            async_site.cyclone.enqueue(session, "work", {}, max_attempts=1, timeout=limit)
    with async_site.worker(queues={"default": 30}) as worker:
        async_site.wait_until_all_are("discarded")
        async_site.enqueue_many(50, "after")
        wait_until(lambda: async_site.states()["completed"] == 50, "later ones run")
        assert worker._parts is not None
        own = worker._parts.sessions._own_async
        assert own is not None
        wait_until(lambda: own.pool.checkedout() == 0, "no connection is checked out")
        with engine.connect() as connection:
            idle = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
            assert connection.scalar(sa.text(idle)) == 0
    assert notes(async_site) == ["after"] * 50


# ---- where sessions come from --------------------------------------------------------------------


class ShopSession(Session):
    """The application's own kind of session."""


def test_the_session_is_of_the_applications_own_kind(database: Database) -> None:
    site = with_orders(Site(database))
    site.cyclone.database = sessionmaker(
        site.engine, class_=ShopSession, info={"of": "the application"}
    )
    seen: list[Any] = []

    def work(ctx: Context) -> None:
        seen.append((isinstance(ctx.session, ShopSession), ctx.session.info["of"]))
        ctx.session.add(Order(note="first"))

    site.action(work)
    job_id = site.enqueue()
    with site.worker():
        site.wait_for(job_id, "completed")
    assert seen == [(True, "the application")]
    assert notes(site) == ["first"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_url_is_enough(database: Database, kind: str) -> None:
    site = with_orders(Site(database))
    site.cyclone.database = database.url

    def work(ctx: Context) -> None:
        ctx.session.add(Order(note="sync"))

    async def awork(ctx: Context) -> None:
        ctx.async_session.add(Order(note="async"))

    site.action(work if kind == "sync" else awork)
    site.enqueue_many(30)
    with site.worker(queues={"default": 30}):
        site.wait_until_all_are("completed")
    assert notes(site) == [kind] * 30


def test_actions_that_wait_for_a_connection_keep_their_leases(
    postgresql_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    engine = postgresql_database.engine(pool_size=1, max_overflow=0)
    site = with_orders(Site(postgresql_database, engine=engine))
    rest = threading.Event()

    def work(ctx: Context) -> None:
        ctx.session.add(Order(note="first"))
        ctx.session.flush()
        rest.wait(0.7)

    site.action(work)
    with Session(postgresql_database.engine()) as session, session.begin():
        for _ in range(4):
            site.cyclone.enqueue(session, "work", {})
    with site.worker(lease=1.0, rescue_interval=0.1, queues={"default": 4}):
        wait_until(lambda: len(notes(site)) == 4, "all ran")
        wait_until(lambda: site.states() == {"completed": 4}, "and are completed")
    with postgresql_database.engine().connect() as connection:
        assert connection.scalar(sa.text("SELECT max(attempt) FROM cyclone_job")) == 1
    assert any("pool has 1 connections" in text for text in messages(caplog.records))


def test_a_thread_that_outlives_its_stopped_worker_commits_nothing_more(database: Database) -> None:
    site, gate, threads = with_orders(Site(database)), Gate(), list[threading.Thread]()

    def work(ctx: Context) -> None:
        threads.append(threading.current_thread())
        if ctx.attempt == 1:
            gate()
        ctx.session.add(Order(note=f"attempt {ctx.attempt}", total=1))

    site.action(work)
    job_id = site.enqueue()
    with site.worker(lease=1.0) as first:
        gate.await_arrival()
        assert not first.stop(grace=0.0)
        with site.worker():
            site.wait_for(job_id, "completed")
            gate.open()
            threads[0].join(30.0)
            assert not threads[0].is_alive()
    with Session(site.engine) as session:
        assert list(session.scalars(sa.select(Order.note))) == ["attempt 2"]
