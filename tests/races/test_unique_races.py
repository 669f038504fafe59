"""Who enqueues a key that somebody else is just enqueueing ends with a job or with its holder."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from psycopg.errors import DeadlockDetected
from sqlalchemy import Engine, event, func, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from cyclone_sqla import DuplicateError, Job, JobRef, Worker, operations
from cyclone_sqla.lifecycle import ACTIVE
from tests.databases import Database
from tests.shop import Shop, statements_of
from tests.waiting import wait_until

Enqueue = Callable[[Shop, Session], JobRef]

WAYS: dict[str, Enqueue] = {
    "one": lambda s, t: s.mail.using(unique="k").enqueue(t, "a"),
    "many": lambda s, t: s.cyclone.enqueue_many(t, [s.mail.using(unique="k").job("a")])[0],
    "one, once": lambda s, t: s.mail.using(idempotency_key="k").enqueue(t, "a"),
    "many, once": lambda s, t: s.cyclone.enqueue_many(
        t, [s.mail.job("a"), s.mail.using(idempotency_key="k").job("a")]
    )[1],
}

either_way = pytest.mark.parametrize(("first", "second"), [
    ("one", "one"), ("one", "many"), ("many", "one"), ("one, once", "one, once"),
    ("many, once", "one, once"), ("one, once", "many, once"),
])  # fmt: skip


def patient_engine(database: Database) -> Engine:
    """An engine whose SQLite connections wait long, and leave the disk to look after itself."""
    if database.dialect == "postgresql":
        return database.engine(pool_size=10)
    engine = database.engine(connect_args={"timeout": 60}, pool_size=10)

    @event.listens_for(engine, "connect")
    def _hurry(dbapi_connection: Any, _record: Any) -> None:
        dbapi_connection.execute("PRAGMA synchronous = OFF")

    return engine


@contextmanager
def running_into(shop: Shop, call: Callable[[Session], Any]) -> Iterator["Future[Any]"]:
    """`call`, with a session of its own in a thread, which commits; it waits for somebody now."""
    engine = patient_engine(shop.database)
    has_sent = threading.Event()
    event.listen(engine, "before_cursor_execute", lambda *_: has_sent.set())

    def story() -> Any:
        with Session(engine) as session, session.begin():
            return call(session)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(story)
        has_sent.wait(30)
        if shop.database.dialect == "postgresql":
            wait_until(lambda: future.done() or _somebody_waits(shop), "the second one waits")
        yield future


def _somebody_waits(shop: Shop) -> bool:
    with shop.engine.connect() as connection:
        return bool(connection.scalar(text(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )))  # fmt: skip


@either_way
def test_when_the_winner_commits_the_other_is_told_of_it(
    shop: Shop, first: str, second: str
) -> None:
    with shop.session() as session:
        winner = WAYS[first](shop, session)
        with running_into(shop, lambda other: WAYS[second](shop, other)) as future:
            session.commit()
            if "once" in second:
                found = future.result(60)
                assert (found.id, found.created) == (winner.id, False)
            else:
                with pytest.raises(DuplicateError) as refused:
                    future.result(60)
                assert refused.value.job_id == winner.id
    assert winner.id in shop.job_ids()


@either_way
def test_when_the_winner_rolls_back_the_other_has_its_job(
    shop: Shop, first: str, second: str
) -> None:
    with shop.session() as session:
        WAYS[first](shop, session)
        with running_into(shop, lambda other: WAYS[second](shop, other)) as future:
            session.rollback()
            ref = future.result(60)
    assert ref.created
    assert ref.id in shop.job_ids()


# ---- between two statements ----------------------------------------------------------------------


@contextmanager
def right_after(engine: Engine, words: str, act: Callable[[], None]) -> Iterator[None]:
    """Act once, right after the first statement that has these words."""
    acts = [act]

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if words in statement and acts:
            acts.pop()()

    event.listen(engine, "after_cursor_execute", note)
    try:
        yield
    finally:
        event.remove(engine, "after_cursor_execute", note)
    assert not acts, "the moment never came"


def test_a_holder_that_ends_before_it_is_named_has_freed_the_key(
    postgresql_database: Database,
) -> None:
    shop = Shop(postgresql_database)
    with shop.session() as session, session.begin():
        old = shop.mail.using(unique="k").enqueue(session, "holder")
    engine = patient_engine(postgresql_database)
    with (
        right_after(engine, "INSERT INTO", lambda: shop.set_state(old.id, "completed")),
        Session(engine) as session,
    ):
        new = shop.mail.using(unique="k").enqueue(session, "a")
        session.commit()
    assert new.created
    assert shop.job_ids() == [old.id, new.id]


def test_a_holder_that_comes_and_ends_during_a_call_of_many_leaves_no_trace_in_it(
    postgresql_database: Database,
) -> None:
    shop = Shop(postgresql_database)
    engine = patient_engine(postgresql_database)
    holders: list[int] = []

    def come() -> None:
        with shop.session() as session, session.begin():
            holders.append(shop.mail.using(unique="k").enqueue(session, "holder").id)

    def end() -> None:
        shop.set_state(holders[0], "completed")

    specs = [shop.mail.using(unique=key, idempotency_key=key).job("a") for key in "zka"]
    with (
        right_after(engine, "SELECT cyclone_job.id, cyclone_job.kind", come),
        right_after(
            engine, "INSERT INTO cyclone_job", lambda: shop.set_state(*holders, "completed")
        ),
        Session(engine) as session,
    ):
        refs = shop.cyclone.enqueue_many(session, specs)
        session.commit()
    assert all(ref.created for ref in refs)
    assert shop.job_ids() == [*holders, *(ref.id for ref in refs)]


@pytest.mark.parametrize("way", ["one, once", "many, once"])
def test_a_key_that_is_pruned_before_its_job_is_named_is_free(
    postgresql_database: Database, way: str
) -> None:
    shop = Shop(postgresql_database)
    with shop.session() as session, session.begin():
        shop.mail.using(idempotency_key="k").enqueue(session, "first")
    engine = patient_engine(postgresql_database)
    with right_after(engine, "INSERT INTO", shop.clear), Session(engine) as session:
        new = WAYS[way](shop, session)
        session.commit()
    assert new.created
    with shop.session() as session:
        again = WAYS[way](shop, session)
    assert (again.id, again.created) == (new.id, False)


# ---- a deadlock of the caller's own --------------------------------------------------------------


@pytest.mark.parametrize("way", ["one", "many"])
def test_a_deadlock_is_the_callers_to_hear_of_and_nothing_is_tried_again(
    postgresql_database: Database, way: str
) -> None:
    """Two transactions that each enqueue in an order of their own: nobody else can end it."""
    shop = Shop(postgresql_database)
    mine, theirs = shop.mail.using(unique="a"), shop.mail.using(unique="k")

    def enqueue_in_the_other_order(other: Session) -> list[JobRef]:
        other.execute(text("SET LOCAL deadlock_timeout = '1min'"))  # the other one is to lose
        return [theirs.enqueue(other, "a"), mine.enqueue(other, "a")]

    with shop.session() as session:
        session.execute(text("SET LOCAL deadlock_timeout = '10ms'"))
        mine.enqueue(session, "a")
        with running_into(shop, enqueue_in_the_other_order) as future:
            with statements_of(shop.engine) as sent, pytest.raises(OperationalError) as failed:
                WAYS[way](shop, session)
            assert isinstance(failed.value.orig, DeadlockDetected)
            assert len([sql for sql in sent if "INSERT INTO cyclone_job" in sql]) == 1
            session.rollback()
            refs = future.result(60)
    assert [ref.created for ref in refs] == [True, True]
    assert shop.job_ids() == [ref.id for ref in refs]


# ---- many at a time ------------------------------------------------------------------------------


def test_every_call_ends_with_a_job_or_its_holder(shop: Shop) -> None:
    """8 threads on 5 keys; holders end, transactions roll back, calls ask for one job or many."""
    engine = patient_engine(shop.database)
    threads, rounds = (8, 200) if shop.database.dialect == "postgresql" else (4, 100)
    barrier = threading.Barrier(threads)

    def play(number: int) -> Counter[str]:
        dice, score = random.Random(number), Counter[str]()
        barrier.wait()
        for _ in range(rounds):
            score[_one_call(shop, engine, dice)] += 1
        return score

    with ThreadPoolExecutor(threads) as pool:
        scores = sum(pool.map(play, range(threads)), Counter[str]())
    assert scores.total() == threads * rounds
    assert set(scores) == {"created", "duplicate", "returned", "rolled back"}
    assert len(shop.jobs()) == scores["created"]
    live = Counter(job.unique_key for job in shop.jobs() if job.state in ACTIVE)
    assert set(live.values()) <= {1}


def _one_call(shop: Shop, engine: Engine, dice: random.Random) -> str:
    key, on_duplicate = f"{dice.randrange(5)}", dice.choice(["raise", "return"])
    mail = shop.mail.using(unique=key, on_duplicate=on_duplicate)  # type: ignore[arg-type]
    with Session(engine) as session:
        try:
            if dice.random() < 0.5:
                ref = mail.enqueue(session, "a")
            else:
                (ref,) = shop.cyclone.enqueue_many(session, [mail.job("a")])
        except DuplicateError as error:
            _end(session, error.job_id)
            session.commit()
            return "duplicate"
        if ref.created and dice.random() < 0.3:
            session.rollback()
            return "rolled back"
        session.commit()
        return "created" if ref.created else "returned"


def _end(session: Session, job_id: int | None) -> None:
    session.execute(
        update(Job)
        .where(Job.id == job_id, Job.state == "available")
        .values(state="completed", finished_at=Job.created_at)
        .execution_options(synchronize_session=False)
    )


def test_opposite_orders_don_t_deadlock_while_a_worker_settles(shop: Shop) -> None:
    ran: Counter[int] = Counter()

    @shop.cyclone.action
    def count(number: int) -> None:
        ran[number] += 1

    keys = range(60)
    engine = patient_engine(shop.database)

    def produce(order: Sequence[int]) -> int:
        created = 0
        for _ in range(100):
            specs = [count.using(unique=f"{i}", on_duplicate="return").job(i) for i in order]
            with Session(engine) as session, session.begin():
                created += sum(ref.created for ref in shop.cyclone.enqueue_many(session, specs))
        return created

    with Worker(shop.cyclone, poll=0.02) as worker, ThreadPoolExecutor(2) as pool:
        created = sum(pool.map(produce, [keys, keys[::-1]]))
        wait_until(lambda: _left(shop) == 0, "every job has run", within=60)
        assert worker.is_healthy
    assert ran.total() == created
    assert set(ran) == set(keys)


def _left(shop: Shop) -> int | None:
    with shop.session() as session:
        return session.scalar(select(func.count()).select_from(Job).where(~Job.is_terminal))


def test_more_than_one_statement_takes_go_in_in_one_order_too(
    postgresql_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call has inserted one batch of several when the second one runs into it."""
    monkeypatch.setattr(operations, "INSERT_BATCH", 2)
    shop = Shop(postgresql_database)
    engine = patient_engine(postgresql_database)
    keys = ["ä", "a", "B", "b", "A", "z"]  # which a collation may order in other ways
    specs = [shop.mail.using(unique=key, on_duplicate="return").job("a") for key in keys]

    def second(session: Session) -> list[JobRef]:
        return shop.cyclone.enqueue_many(session, specs[::-1])

    racing: list[Any] = []

    def let_the_second_begin() -> None:
        racing.append(running_into(shop, second))
        racing.append(racing[0].__enter__())

    with right_after(engine, "INSERT INTO", let_the_second_begin), Session(engine) as session:
        first = shop.cyclone.enqueue_many(session, specs)
        session.commit()
    found = racing[1].result(60)
    racing[0].__exit__(None, None, None)
    assert [ref.id for ref in found] == [ref.id for ref in first[::-1]]


def test_idempotency_keys_and_unique_keys_in_opposite_orders_don_t_deadlock(
    postgresql_database: Database,
) -> None:
    shop = Shop(postgresql_database)
    engine = patient_engine(postgresql_database)
    barrier = threading.Barrier(2)

    def produce(sign: int) -> None:
        for round_ in range(40):
            numbers = range(20)[::sign]
            specs = [
                shop.mail.using(
                    idempotency_key=f"{round_}/{sign * i}",
                    unique=f"{round_}/{i}",
                    on_duplicate="return",
                ).job("a")
                for i in numbers
            ]
            specs.append(shop.mail.using(unique=f"{round_}/7", on_duplicate="return").job("b"))
            barrier.wait(30)
            with Session(engine) as session, session.begin():
                shop.cyclone.enqueue_many(session, specs)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(produce, [1, -1]))
    assert len(shop.jobs()) == 40 * 20
