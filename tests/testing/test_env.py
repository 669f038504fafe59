"""The environment of an application's tests: what it promises of jobs, time and transactions."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from cyclone_sqla import (
    Context,
    Cyclone,
    Discard,
    DuplicateError,
    Retry,
    Snooze,
    UnknownKindError,
    begin_before_savepoints,
)
from cyclone_sqla.testing import CycloneEnv, NotIdleError
from tests.databases import Database
from tests.shop import Base, Order

MAIL = "mail"


class Application:
    """A shop with a few actions, and what they did."""

    def __init__(self) -> None:
        self.cyclone = Cyclone()
        self.sent: list[str] = []
        self.failures = 0

        @self.cyclone.action(queue=MAIL)
        def send(to: str) -> None:
            if self.failures:
                self.failures -= 1
                raise ConnectionError("the mail server is down")
            self.sent.append(to)

        @self.cyclone.action
        def order(ctx: Context, note: str, total: int = 0) -> None:
            ctx.session.add(Order(note=note, total=total))
            ctx.session.flush()
            send.enqueue(ctx.session, to=note)

        @self.cyclone.action
        async def later(to: str) -> None:
            await asyncio.sleep(0)
            self.sent.append(to)

        @self.cyclone.action
        def decide(how: str) -> None:
            raise {"discard": Discard("no"), "retry": Retry(in_=60), "snooze": Snooze(in_=60)}[how]

        self.send, self.order, self.later, self.decide = send, order, later, decide


@pytest.fixture
def app() -> Application:
    return Application()


@pytest.fixture
def engine(database: Database) -> sa.Engine:
    engine = database.engine()
    begin_before_savepoints(engine)
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture
def env(engine: sa.Engine, app: Application) -> Iterator[CycloneEnv]:
    """An environment whose jobs wait until they are told; nothing of it may remain."""
    with engine.connect() as connection:
        outer = connection.begin()
        with CycloneEnv(connection, app.cyclone, auto_start=False) as env:
            yield env
        assert outer.is_active
        outer.rollback()
    with engine.connect() as connection:
        for table in ("cyclone_job", "cyclone_history", "cyclone_sequence", "shop_order"):
            assert connection.scalar(sa.text(f"SELECT count(*) FROM {table}")) == 0


def test_jobs_wait_until_they_are_told_and_then_all_run(env: CycloneEnv, app: Application) -> None:
    app.send.enqueue(env.session, to="a")
    app.order.enqueue(env.session, note="b")
    assert app.sent == []
    assert [job.state for job in env.enqueued(app.send)] == ["available"]

    assert env.run_until_idle() == 3

    assert sorted(app.sent) == ["a", "b"]
    assert env.run_until_idle() == 0
    assert env.session.scalars(sa.select(Order.note)).all() == ["b"]


def test_a_job_sees_what_the_test_has_not_committed(env: CycloneEnv, app: Application) -> None:
    seen: list[str] = []

    @app.cyclone.action
    def look(ctx: Context) -> None:
        seen.extend(ctx.session.scalars(sa.select(Order.note)))

    env.session.add(Order(note="pending"))
    look.enqueue(env.session)
    env.run_until_idle()
    assert seen == ["pending"]


def test_auto_start_runs_what_the_application_commits(engine: sa.Engine, app: Application) -> None:
    with engine.connect() as connection, connection.begin() as outer:
        with CycloneEnv(connection, app.cyclone) as env:
            with env.session.begin():
                app.order.enqueue(env.session, note="b")
                assert app.sent == []
            assert app.sent == ["b"]
            with Session(connection, join_transaction_mode="create_savepoint") as other:
                app.send.enqueue(other, to="rolled back")
                other.rollback()
                app.send.using(process_in=60).enqueue(other, to="later")
                other.commit()
            assert app.sent == ["b"]
            env.advance(minutes=1)
            assert app.sent == ["b", "later"]
        outer.rollback()


def test_a_failure_raises_in_the_test_what_the_action_raised(
    env: CycloneEnv, app: Application
) -> None:
    app.failures = 1
    app.send.enqueue(env.session, to="a")
    with pytest.raises(ConnectionError, match="mail server") as raised:
        env.run_until_idle()
    assert raised.traceback[-1].name == "send"
    env.session.add(Order(note="the session is usable"))
    env.session.flush()
    (job,) = env.enqueued(app.send)
    assert (job.attempt, len(env.history(job))) == (1, 1)


def test_with_errors_kept_a_job_is_retried_as_the_clock_moves(
    env: CycloneEnv, app: Application
) -> None:
    env.raise_errors = False
    app.failures = 2
    app.send.enqueue(env.session, to="a")
    assert env.run_until_idle() == 1
    assert env.run_until_idle() == 0
    for _ in range(2):
        env.advance(minutes=5)
        assert env.run_until_idle() == 1
    assert app.sent == ["a"]
    assert env.assert_completed(app.send, to="a").attempt == 3


@pytest.mark.parametrize("how", ["discard", "retry", "snooze"])
def test_what_an_action_decides_is_no_failure(env: CycloneEnv, app: Application, how: str) -> None:
    app.decide.enqueue(env.session, how=how)
    assert env.run_until_idle() == 1
    if how == "discard":
        env.assert_discarded(app.decide, how=how)
    else:
        env.assert_enqueued(app.decide, how=how)


def test_a_job_that_enqueues_itself_for_ever_is_told(env: CycloneEnv, app: Application) -> None:
    runs: list[int] = []

    @app.cyclone.action
    def again(ctx: Context) -> None:
        runs.append(ctx.job.id)
        again.enqueue(ctx.session)

    again.enqueue(env.session)
    with pytest.raises(NotIdleError, match=r"after 20 runs .* 'again'"):
        env.run_until_idle(limit=20)
    assert len(runs) == 20


def test_jobs_of_any_queue_run_in_the_order_of_production(
    env: CycloneEnv, app: Application
) -> None:
    app.send.using(queue="elsewhere", priority=5).enqueue(env.session, to="later")
    app.send.using(queue="elsewhere").enqueue(env.session, to="sooner")
    assert env.run_until_idle() == 2
    assert app.sent == ["sooner", "later"]


def test_one_job_runs_on_demand_whatever_its_time_and_nothing_else(
    env: CycloneEnv, app: Application
) -> None:
    delayed = app.send.using(process_in=3600).enqueue(env.session, to="delayed")
    order = app.order.enqueue(env.session, note="b")
    app.send.enqueue(env.session, to="other")

    first = env.run(delayed)
    assert (first.state, app.sent) == ("completed", ["delayed"])
    assert [event.event for event in env.history(delayed)] == ["reschedule"]

    second = env.run(order)
    assert (second.state, app.sent) == ("completed", ["delayed"])
    assert second.lease > first.lease
    assert len(env.enqueued(app.send)) == 2


def test_a_job_that_waits_for_its_retry_runs_on_demand(env: CycloneEnv, app: Application) -> None:
    app.failures = 1
    ref = app.send.enqueue(env.session, to="a")
    with pytest.raises(ConnectionError):
        env.run(ref)
    assert env.run(env.assert_enqueued(app.send)).attempt == 2
    assert app.sent == ["a"]


def test_a_job_that_may_not_run_says_why(env: CycloneEnv, app: Application) -> None:
    in_turn = app.send.using(sequence="a")
    head, follower = (in_turn.enqueue(env.session, to=to) for to in ("head", "follower"))
    with pytest.raises(AssertionError, match=r"pending \(turn\)"):
        env.run(follower)
    app.cyclone.pause(env.connection, head.id)
    with pytest.raises(AssertionError, match="paused"):
        env.run(head)
    app.cyclone.resume(env.connection, head.id)
    env.run(head)
    with pytest.raises(AssertionError, match="completed"):
        env.run(head)
    assert env.run(follower).state == "completed"
    stranger = app.cyclone.enqueue(env.session, "unknown", {})
    with pytest.raises(UnknownKindError):
        env.run(stranger)


def test_savepoints_of_the_application_inside_each_other_leave_nothing(
    env: CycloneEnv, app: Application
) -> None:
    with Session(env.connection, join_transaction_mode="create_savepoint") as session:
        with session.begin_nested():
            app.order.enqueue(session, note="kept")
            undone = session.begin_nested()
            app.order.enqueue(session, note="undone")
            undone.rollback()
            with session.begin_nested():
                session.add(Order(note="inner"))
        assert env.run_until_idle() == 2
        session.rollback()
        assert app.sent == ["kept"]
        assert env.jobs(app.order) == []
        session.add(Order(note="usable"))
        session.commit()
    assert env.session.scalars(sa.select(Order.note)).all() == ["usable"]


def test_one_job_on_demand_starts_nothing_else_by_its_commit(
    engine: sa.Engine, app: Application
) -> None:
    with engine.connect() as connection, connection.begin() as outer:
        with CycloneEnv(connection, app.cyclone) as env:
            env.run(app.order.enqueue(env.session, note="b"))
            assert app.sent == []
            env.advance(seconds=1)
            assert app.sent == ["b"]
        outer.rollback()


def test_a_savepoint_that_is_released_is_no_commit(engine: sa.Engine, app: Application) -> None:
    with engine.connect() as connection, connection.begin() as outer:
        with CycloneEnv(connection, app.cyclone) as env:
            with env.session.begin():
                with env.session.begin_nested():
                    app.send.enqueue(env.session, to="a")
                assert app.sent == []
            assert app.sent == ["a"]
        outer.rollback()


def test_sequences_unique_keys_and_delays_are_those_of_production(
    env: CycloneEnv, app: Application
) -> None:
    in_turn = app.send.using(sequence="a")
    in_turn.using(process_in=timedelta(hours=1)).enqueue(env.session, to="first")
    in_turn.enqueue(env.session, to="second")
    app.send.using(unique="once").enqueue(env.session, to="only")
    with pytest.raises(DuplicateError):
        app.send.using(unique="once").enqueue(env.session, to="only")
    env.run_until_idle()
    assert app.sent == ["only"]
    env.advance(hours=1)
    env.run_until_idle()
    assert app.sent == ["only", "first", "second"]


def test_a_row_as_an_argument_arrives_and_is_found_again(env: CycloneEnv, app: Application) -> None:
    noted: list[str] = []

    @app.cyclone.action
    def ship(order: Order) -> None:
        noted.append(order.note)
        order.note = "shipped"

    order, other = Order(note="new"), Order(note="other")
    env.session.add_all([order, other])
    ship.enqueue(env.session, order=order)
    assert env.assert_enqueued(ship, order=order).kind == "ship"
    assert env.enqueued(ship, order=other) == []
    env.run_until_idle()
    assert (noted, order.note) == (["new"], "shipped")
    env.assert_completed(ship, order=order)


def test_an_async_action_runs_in_a_sync_test(env: CycloneEnv, app: Application) -> None:
    app.later.enqueue(env.session, to="a")
    env.run_until_idle()
    assert app.sent == ["a"]


def test_an_action_that_fails_leaves_nothing_of_its_own(env: CycloneEnv, app: Application) -> None:
    env.session.add(Order(note="the test's own"))
    app.order.enqueue(env.session, note="bad", total=-1)
    with pytest.raises(sa.exc.IntegrityError):
        env.run_until_idle()
    assert env.session.scalars(sa.select(Order.note)).all() == ["the test's own"]
    assert env.enqueued(app.send) == []


@pytest.mark.parametrize("at", ["claimed", "before_settle"])
def test_a_worker_that_dies_leaves_a_job_that_runs_again(
    env: CycloneEnv, app: Application, at: str
) -> None:
    app.order.enqueue(env.session, note="a")
    env.crash(at=at)  # type: ignore[arg-type]
    env.run_until_idle()
    assert env.session.scalars(sa.select(Order.note)).all() == []
    assert [job.state for job in env.enqueued(app.order)] == ["running"]
    env.advance(minutes=2)
    env.run_until_idle()
    assert env.session.scalars(sa.select(Order.note)).all() == ["a"]
    assert env.assert_completed(app.order).attempt == 2


def test_a_worker_that_dies_after_the_end_was_written_changes_nothing(
    env: CycloneEnv, app: Application
) -> None:
    app.order.enqueue(env.session, note="a")
    env.crash(at="after_settle")
    assert env.run_until_idle() == 2
    env.advance(minutes=2)
    assert env.run_until_idle() == 0
    assert env.assert_completed(app.order).attempt == 1


def test_a_worker_dies_in_the_run_of_the_job_that_was_named(
    env: CycloneEnv, app: Application
) -> None:
    app.send.enqueue(env.session, to="first")
    named = app.send.enqueue(env.session, to="named")
    env.crash(at="before_settle", job=named)
    env.run_until_idle()
    assert [job.id for job in env.enqueued(app.send)] == [named.id]
    env.advance(minutes=2)
    env.run_until_idle()
    assert app.sent == ["first", "named", "named"]


def test_a_deadline_goes_by_the_tests_clock(env: CycloneEnv, app: Application) -> None:
    env.raise_errors = False
    limited = app.send.using(deadline=env.now + timedelta(hours=1))
    limited.enqueue(env.session, to="in time")
    env.run_until_idle()
    limited.enqueue(env.session, to="late")
    env.advance(hours=1)
    env.run_until_idle()
    assert app.sent == ["in time"]
    assert "deadline" in (env.assert_discarded(app.send, to="late").last_error or "")


def test_the_clock_is_the_tests_own_and_the_applications_again_afterwards(
    engine: sa.Engine, app: Application
) -> None:
    before = app.cyclone.clock
    with engine.connect() as connection, connection.begin() as outer:
        with CycloneEnv(connection, app.cyclone, auto_start=False) as env:
            env.freeze(datetime(2031, 5, 1, tzinfo=UTC))
            env.freeze()
            app.send.enqueue(env.session, to="a")
            assert env.now == datetime(2031, 5, 1, tzinfo=UTC)
            assert env.assert_enqueued(app.send).created_at == env.now
            with pytest.raises(ValueError, match="run back"):
                env.advance(timedelta(seconds=-1))
        with CycloneEnv(connection, app.cyclone, auto_start=False) as env:
            env.freeze(datetime(2032, 5, 1, tzinfo=UTC))
            assert app.send.using(queue="x").enqueue(env.session, to="b").state == "available"
            assert [job.created_at.year for job in env.jobs(app.send)] == [2032]
        outer.rollback()
    assert app.cyclone.clock is before


def test_an_assertion_tells_what_there_is(env: CycloneEnv, app: Application) -> None:
    app.send.enqueue(env.session, to="a")
    with pytest.raises(AssertionError) as told:
        env.assert_enqueued(app.send, to="b")
    assert "0 jobs instead of one waits of 'send' with {'to': 'b'}" in str(told.value)
    assert "available" in str(told.value)
