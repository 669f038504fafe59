"""Leases under fire: the locks of others, two workers, two transactions at the same moment."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection

from cyclone_sqla import ClaimedJob, State, WorkerSettings, admission, operations
from cyclone_sqla.clock import DatabaseClock
from cyclone_sqla.dialects import Turn
from cyclone_sqla.dialects.hand_over import TurnFunction
from cyclone_sqla.models import EPOCH
from cyclone_sqla.operations import Claiming, Retention, Settlement
from cyclone_sqla.outcomes import GivenBack, Retried
from tests.databases import Database
from tests.life.hands import BROKE, DONE, FAILED, Hands
from tests.waiting import wait_until

NOTHING = timedelta(0)


@pytest.fixture
def hands(postgresql_database: Database) -> Iterator[Hands]:
    """A queue on PostgreSQL, with the manual clock."""
    with closing(Hands(postgresql_database)) as hands:
        yield hands


@contextmanager
def locked(hands: Hands, job_id: int, strength: str = "UPDATE") -> Iterator[Connection]:
    """An application's transaction that holds a job's row and stays open."""
    sql = f"SELECT id FROM cyclone_job WHERE id = :id FOR {strength}"
    with hands.engine.begin() as connection:
        connection.execute(sa.text(sql), {"id": job_id})
        yield connection


def test_a_row_that_others_hold_delays_neither_the_settling_nor_the_renewal_of_the_rest(
    hands: Hands,
) -> None:
    ids = hands.enqueue_many(20)
    jobs = hands.claim(20)
    held = jobs[7]
    hands.clock.advance(seconds=50)
    with locked(hands, held.id):
        renewal = hands.renew(*jobs)
        assert (renewal.lost, renewal.cancel_requested) == ([], [])
        hands.clock.advance(seconds=20)
        assert [run.id for run in hands.expired()] == [held.id]
        assert hands.rescue().states == {}

        plain = hands.settle_all([(job, DONE) for job in jobs[:10]])
        failed = hands.settle_all([(job, FAILED) for job in (held, *jobs[10:])])
        assert (plain.busy, failed.busy) == ([held.id], [held.id])
        assert (plain.refused, failed.refused) == ({}, {})
        assert [hands.job(i).state for i in ids if i != held.id] == (
            ["completed"] * 9 + ["pending"] * 10
        )
    assert hands.settle(held, DONE).states == {held.id: State.COMPLETED}


@pytest.mark.parametrize("strength", ["KEY SHARE", "SHARE"])
def test_a_reference_to_a_job_hides_it_from_nobody(hands: Hands, strength: str) -> None:
    """KEY SHARE is what an application's foreign key takes when it inserts a row."""
    job_id = hands.enqueue()
    with locked(hands, job_id, strength):
        claimed = hands.claim()
    if strength == "SHARE":
        assert claimed == []
    else:
        assert [job.id for job in claimed] == [job_id]


def test_a_reference_to_a_running_job_delays_neither_renewal_settling_nor_rescue(
    hands: Hands,
) -> None:
    hands.enqueue_many(3)
    renewed, ended, lapsed = hands.claim(3)
    hands.execute("CREATE TABLE receipt (job_id bigint REFERENCES cyclone_job)")
    with hands.engine.begin() as connection:
        for job in (renewed, ended, lapsed):
            connection.execute(sa.text("INSERT INTO receipt VALUES (:id)"), {"id": job.id})
        hands.clock.advance(seconds=61)
        hands.renew(renewed)
        assert hands.settle(ended, DONE).states == {ended.id: State.COMPLETED}
        assert hands.rescue().states == {lapsed.id: State.AVAILABLE}


def test_pruning_steps_over_a_job_that_an_open_transaction_refers_to(hands: Hands) -> None:
    ids = hands.enqueue_many(3)
    hands.settle_all([(job, DONE) for job in hands.claim(3)])
    hands.clock.advance(days=2)
    hands.execute("CREATE TABLE receipt (job_id bigint REFERENCES cyclone_job)")
    with hands.engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO receipt VALUES (:id)"), {"id": ids[1]})
        assert prune(hands) is not None
    assert [hands.job(ids[1]).state] == ["completed"]
    with hands.engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM cyclone_job")) == 1


def prune(hands: Hands) -> object:
    retention = Retention(State.COMPLETED, timedelta(days=1))
    with hands.transaction() as connection:
        connection.execute(sa.text("SET LOCAL lock_timeout = '2s'"))
        return operations.prune(connection, hands.dialect, retention, None, 100)


def test_a_job_put_back_while_it_is_pruned_stays(hands: Hands) -> None:
    """The replay has written when prune comes, and commits when prune is done."""
    ids = hands.enqueue_many(2)
    hands.settle_all([(job, DONE) for job in hands.claim(2)])
    hands.clock.advance(days=2)
    put_back = "UPDATE cyclone_job SET state = 'available', finished_at = NULL WHERE id = :id"
    with hands.engine.begin() as connection:
        connection.execute(sa.text(put_back), {"id": ids[0]})
        prune(hands)
    assert hands.job(ids[0]).state == "available"


@pytest.mark.parametrize("verb", ["claim", "stage", "rescue", "settle", "renew"])
def test_no_statement_of_a_worker_waits_for_a_row(hands: Hands, verb: str) -> None:
    """Of two rows one is held; the verb does its work on the other, under a lock timeout."""
    held, free = two_rows_for(hands, verb)
    before = hands.job(held).updated_at
    with locked(hands, held):
        if verb == "claim":
            assert [job.id for job in hands.claim()] == [free]
        elif verb == "stage":
            assert len(hands.stage()) == 1
        elif verb == "rescue":
            assert list(hands.rescue().states) == [free]
        elif verb == "renew":
            assert hands.renew(*running(hands, held, free)).lost == []
        else:
            settled = hands.settle_all([(job, FAILED) for job in running(hands, held, free)])
            assert (list(settled.states), settled.busy) == ([free], [held])
    assert hands.job(held).updated_at == before


def two_rows_for(hands: Hands, verb: str) -> tuple[int, int]:
    hands.execute(
        "ALTER ROLE CURRENT_USER IN DATABASE " + database_of(hands) + " SET lock_timeout = '2s'"
    )
    if verb == "stage":
        first, second = (hands.enqueue(process_in=timedelta(seconds=1)) for _ in range(2))
    else:
        first, second = hands.enqueue_many(2)
    if verb != "claim" and verb != "stage":
        hands.claim()
    hands.clock.advance(seconds=61 if verb in ("stage", "rescue") else 1)
    return first, second


def database_of(hands: Hands) -> str:
    return f'"{hands.engine.url.database}"'


def running(hands: Hands, *ids: int) -> list[ClaimedJob]:
    with hands.engine.connect() as connection:
        jobs = [hands.cyclone.get(connection, job_id) for job_id in ids]
    return [
        ClaimedJob(
            id=job.id, kind=job.kind, queue=job.queue, priority=0, arguments="{}",
            attempt=job.attempt, max_attempts=job.max_attempts, snoozes=0, lease=job.lease,
            run_at=job.run_at, created_at=job.created_at,
        )
        for job in jobs
    ]  # fmt: skip


def test_the_history_of_an_end_waits_for_nobody(hands: Hands) -> None:
    """Its foreign key needs the job's row, which is free again once the end is committed.

    The trigger stands for whoever takes the row just then.
    """
    job_id = hands.enqueue()
    job = hands.claim_one()
    with hands.held.step() as connection:
        batch = [operations.Settlement(job.id, job.lease, 1, "w", FAILED, None)]
        statuses: list[str] = []

        @sa.event.listens_for(connection, "after_cursor_execute")
        def look(conn: Connection, *_: object) -> None:
            driver = conn.connection.driver_connection
            assert driver is not None
            statuses.append(driver.info.transaction_status.name)

        operations.settle(connection, hands.dialect, batch, history_limit=25)
    assert statuses == ["INTRANS", "INTRANS", "INTRANS", "IDLE"]
    assert len(hands.history(job_id)) == 1


# ---- many at once --------------------------------------------------------------------------------


def in_threads(*works: Callable[[], None]) -> None:
    """Run all at once; raise what the first one raised that failed."""
    barrier, errors = threading.Barrier(len(works)), list[BaseException]()

    def run(work: Callable[[], None]) -> None:
        try:
            barrier.wait(30.0)
            work()
        except BaseException as exc:  # noqa: BLE001 - it is raised again in the test
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    if errors:
        raise errors[0]


@pytest.fixture
def two(database: Database) -> Iterator[tuple[Hands, Hands]]:
    """Two workers' hands on one queue, on each database."""
    with closing(Hands(database)) as first, closing(Hands(database)) as second:
        second.clock = first.clock
        second.cyclone.clock = first.clock
        yield first, second


def test_two_workers_never_claim_one_job(two: tuple[Hands, Hands]) -> None:
    ids = two[0].enqueue_many(400)
    claimed: tuple[list[int], list[int]] = ([], [])

    def drain(number: int) -> Callable[[], None]:
        def work() -> None:
            while len(claimed[0]) + len(claimed[1]) < len(ids):
                jobs = two[number].claim(7, worker=str(number))
                claimed[number].extend(job.id for job in jobs)

        return work

    in_threads(drain(0), drain(1))

    assert sorted(claimed[0] + claimed[1]) == ids
    assert len({row.lease for row in two[0].rows()}) == len(ids)


def test_renewals_and_settles_in_any_order_never_deadlock(two: tuple[Hands, Hands]) -> None:
    ids = two[0].enqueue_many(300)
    jobs = two[0].claim(300)
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.is_set():
            assert two[1].renew(*reversed(jobs[150:]), *jobs[:150]).cancel_requested == []

    def settle() -> None:
        waiting = list(reversed(jobs))
        while waiting:
            batch, waiting = waiting[:25], waiting[25:]
            settled = two[0].settle_all([(job, DONE if job.id % 2 else FAILED) for job in batch])
            assert settled.refused == {}
            waiting += [job for job in batch if job.id in settled.busy]
        is_over.set()

    in_threads(renew, settle)

    assert {two[0].job(i).state for i in ids} == {"completed", "pending"}


def test_of_a_late_settle_and_a_rescue_exactly_one_happens(two: tuple[Hands, Hands]) -> None:
    for _ in range(20):
        job_id = two[0].enqueue()
        job = two[0].claim_one()
        two[0].clock.advance(minutes=2)
        done: list[State] = []
        rescued: list[State] = []

        def settle(job: ClaimedJob = job, done: list[State] = done) -> None:
            while not done:
                settled = two[0].settle(job, DONE)
                done.extend(settled.states.values())
                if settled.refused:
                    return

        def rescue(rescued: list[State] = rescued) -> None:
            rescued.extend(two[1].rescue().states.values())

        in_threads(settle, rescue)

        assert [*done, *rescued] in ([State.COMPLETED], [State.AVAILABLE])
        row = two[0].job(job_id)
        assert row.state == (done or rescued)[0]
        two[0].forget(job_id)


def test_two_rescuers_rescue_each_job_once(two: tuple[Hands, Hands]) -> None:
    ids = two[0].enqueue_many(60)
    two[0].claim(60)
    two[0].clock.advance(minutes=2)
    rescued: list[int] = []

    def rescue(hands: Hands) -> Callable[[], None]:
        return lambda: rescued.extend(hands.rescue().states)

    in_threads(rescue(two[0]), rescue(two[1]))
    rescued += two[0].rescue().states  # those that both had locked for the other

    assert sorted(rescued) == ids
    assert {two[0].job(i).crashes for i in ids} == {1}


def test_two_stagers_stage_each_job_once(two: tuple[Hands, Hands]) -> None:
    for _ in range(60):
        two[0].enqueue(process_in=timedelta(seconds=1))
    two[0].clock.advance(seconds=1)
    staged: list[str] = []

    def stage(hands: Hands) -> Callable[[], None]:
        return lambda: staged.extend(hands.stage())

    in_threads(stage(two[0]), stage(two[1]))
    staged += two[0].stage()

    assert len(staged) == 60


def test_a_job_given_back_and_claimed_at_once_is_never_held_twice(
    two: tuple[Hands, Hands],
) -> None:
    two[0].enqueue(max_attempts=10_000)
    holders = threading.Semaphore(1)
    leases: list[int] = []

    def work(hands: Hands, worker: str) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(100):
                for job in hands.claim(1, worker=worker):
                    assert holders.acquire(blocking=False), "two hold it"
                    leases.append(job.lease)
                    holders.release()
                    settle_now(hands, job)

        return loop

    def settle_now(hands: Hands, job: ClaimedJob) -> None:
        outcome = GivenBack() if job.lease % 2 else Retried(NOTHING, BROKE)
        wait_until(lambda: hands.settle(job, outcome).states, "it is put back", every=0.0)

    in_threads(work(two[0], "a"), work(two[1], "b"))

    assert leases == sorted(set(leases))


def test_a_pause_during_a_claim_comes_after_that_claim_and_before_the_next(
    postgresql_database: Database,
) -> None:
    wanted = Claiming({"default": 1}, ["work"], "worker-1", timedelta(minutes=1))
    with (
        closing(Hands(postgresql_database)) as hands,
        closing(Hands(postgresql_database)) as person,
    ):
        first, _ = hands.enqueue_many(2)
        with hands.transaction() as connection:
            claimed = operations.claim(connection, hands.dialect, wanted)
            person.act("pause_queue", "default")
            assert operations.claim(connection, hands.dialect, wanted) == []
        assert [job.id for job in claimed] == [first]
        assert hands.claim() == []


def test_no_worker_gives_its_own_time_to_a_server(
    postgresql_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a host whose clock is wrong takes over nothing early and starts nothing late."""
    given: list[object] = []

    def call(turns: TurnFunction, connection: Connection, values: Mapping[str, Any]) -> Turn:
        given.append(values)
        return take_turn(turns, connection, values)

    take_turn = TurnFunction.call
    monkeypatch.setattr(TurnFunction, "call", call)
    with closing(Hands(postgresql_database, DatabaseClock())) as hands:
        hands.enqueue_many(2)
        hands.enqueue(process_in=timedelta(milliseconds=1))
        with hands.held.step() as connection:
            sa.event.listen(
                connection.engine,
                "before_cursor_execute",
                lambda _conn, _cursor, _sql, parameters, *_: given.append(parameters),
            )
        done, failed = hands.claim()
        hands.renew(done, failed)
        hands.settle_all([(done, DONE), (failed, FAILED)])
        hands.rescue()
        hands.stage()
        hands.enqueue(sequence="a")
        hands.admit()
        one_turn(hands)
        one_prune_and_sweep(hands)

    values = [value for parameters in given for value in dict(parameters).values()]
    assert len(values) > 20
    times = {value for value in values if isinstance(value, datetime)}
    assert times == {EPOCH}, "but for the beginning of a prune, which is the same for all"


def one_turn(hands: Hands) -> None:
    """Claim, settle and claim, as a worker's loop does."""
    wanted = Claiming({"default": 5}, ["work"], "worker-1", timedelta(minutes=1))
    held = hands.dialect.hold(hands.worker_engine, WorkerSettings(), takes_turns=True)
    with closing(held), held.step() as connection:
        job = operations.claim(connection, hands.dialect, wanted)[0]
        end = Settlement(job.id, job.lease, job.attempt, "worker-1", DONE, job.sequence_key)
        settled, _ = operations.settle_and_claim(
            connection, hands.dialect, [end], wanted, history_limit=5
        )
    assert settled.states == {job.id: State.COMPLETED}


def one_prune_and_sweep(hands: Hands) -> None:
    """Retention, and a look along the lines."""
    retention = Retention(State.COMPLETED, timedelta(0))
    with hands.transaction() as connection:
        operations.prune(connection, hands.dialect, retention, None, 10)
        operations.prune_idempotency_keys(connection, hands.dialect, timedelta(0), 10)
        operations.forget_workers(connection, hands.dialect, timedelta(0))
        admission.sweep(connection, hands.dialect, "", 10)
