"""A whole worker in this process: what it promises of the jobs that it runs."""

import asyncio
import logging
import os
import socket
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from cyclone_sqla import (
    ConfigurationError,
    Context,
    Discard,
    DuplicateError,
    Job,
    JobSpec,
    Retry,
    Snooze,
    Worker,
    WorkerSettings,
)
from cyclone_sqla.actions import Action
from cyclone_sqla.backoff import Constant
from tests.databases import Database
from tests.waiting import wait_until
from tests.worker.site import Gate, Site, messages, nothing, tracebacks

SOON = 0.01


@pytest.fixture
def site(database: Database) -> Site:
    return Site(database)


# ---- running -------------------------------------------------------------------------------------


def test_the_attempt_is_counted_and_committed_before_any_code_of_the_action(site: Site) -> None:
    seen: list[tuple[str, int, str | None]] = []

    def look(ctx: Context) -> None:
        row = site.job(ctx.job.id)
        seen.append((row.state, row.attempt, row.worker))

    site.action(look)
    job_id = site.enqueue()
    with site.worker() as worker:
        site.wait_for(job_id, "completed")

    assert seen == [("running", 1, worker.id)]


def test_no_queue_runs_more_at_once_than_its_slots_and_none_starves(site: Site) -> None:
    lock, now, most = threading.Lock(), Counter[str](), Counter[str]()
    stuck, three_at_once = Gate(), threading.Barrier(3)

    def work(ctx: Context) -> None:
        queue = ctx.job.queue
        with lock:
            now[queue] += 1
            most[queue] = max(most[queue], now[queue])
        if queue == "stuck":
            stuck()
        else:
            three_at_once.wait(60.0)
        with lock:
            now[queue] -= 1

    site.action(work)
    site.enqueue_many(10, queue="stuck")
    free = site.enqueue_many(60, queue="free")
    with site.worker(queues={"stuck": 2, "free": 3}):
        stuck.await_arrival(2)
        wait_until(lambda: site.states()["completed"] == len(free), "the free queue is empty")
        assert site.states() == {"completed": 60, "running": 2, "available": 8}
        stuck.open()
        site.wait_until_all_are("completed")

    assert most == {"stuck": 2, "free": 3}


def test_a_worker_never_claims_more_than_it_can_run(site: Site) -> None:
    gate = Gate()
    site.action(gate.passing())
    site.enqueue_many(9)
    with site.worker(queues={"default": 4}):
        gate.await_arrival(4)
        for _ in range(20):
            assert site.states() == {"running": 4, "available": 5}
        gate.open()
        site.wait_until_all_are("completed")


def test_to_enqueue_the_key_of_a_running_job_changes_nothing_of_it(site: Site) -> None:
    gate = Gate()
    site.action(gate.passing())
    site.action(nothing, "other")
    holder = site.enqueue(unique="k", priority=3, headers={"a": "b"})
    again = JobSpec(kind="work", arguments='{"other": 1}', unique="k", priority=9)
    or_holder = again._replace(on_duplicate="return")
    with site.worker(queues={"default": 5}, poll=0.02):
        gate.await_arrival()
        before = _columns_that_no_renewal_moves(site, holder)
        for _ in range(20):
            with Session(site.engine) as session, session.begin():
                with pytest.raises(DuplicateError):
                    site.cyclone.enqueue_spec(session, again)
                refs = [site.cyclone.enqueue_spec(session, or_holder)]
                refs += site.cyclone.enqueue_many(session, [again] * 2, on_duplicate="return")
            assert [(ref.id, ref.created) for ref in refs] == [(holder, False)] * 3
        site.wait_for(site.enqueue("other"), "completed")  # it has looked for work meanwhile
        assert _columns_that_no_renewal_moves(site, holder) == before
        assert not gate.arrived.acquire(blocking=False)
        gate.open()
        assert site.wait_for(holder, "completed").attempt == 1
    assert site.states() == {"completed": 2}


def _columns_that_no_renewal_moves(site: Site, job_id: int) -> dict[str, object]:
    with site.engine.connect() as connection:
        row = connection.execute(sa.select(Job.__table__).where(Job.id == job_id)).one()
    moved = ("leased_until", "updated_at")
    return {name: value for name, value in row._mapping.items() if name not in moved}


def test_a_kind_without_an_action_here_is_left_to_others(site: Site) -> None:
    site.action(nothing)
    unknown, known = site.enqueue("of-another-release"), site.enqueue()
    with site.worker():
        site.wait_for(known, "completed")
    assert (site.job(unknown).state, site.job(unknown).attempt) == ("available", 0)


def test_a_queue_paused_by_a_row_starts_nothing_until_it_is_resumed(site: Site) -> None:
    site.action(nothing)
    job_id = site.enqueue()
    paused_at = 1 if site.database.dialect == "sqlite" else datetime.now(UTC)
    site.execute("INSERT INTO cyclone_queue VALUES ('default', :at, NULL)", at=paused_at)
    other = site.enqueue(queue="other")
    with site.worker(queues={"default": 5, "other": 5}, poll=0.02):
        site.wait_for(other, "completed")
        assert site.job(job_id).state == "available"
        site.execute("UPDATE cyclone_queue SET paused_at = NULL")
        site.wait_for(job_id, "completed")


def test_a_delayed_job_starts_when_it_is_due_though_the_poll_is_long(site: Site) -> None:
    """The hint of the enqueue wakes the stager, which had nothing to wait for."""
    started: list[datetime] = []

    def work() -> None:
        started.append(datetime.now(UTC))

    site.action(work)
    with site.worker(poll=600.0) as worker:
        wait_until(lambda: worker.is_healthy, "it works")
        job_id = site.enqueue(process_in=timedelta(seconds=0.3))
        site.wait_for(job_id, "completed")
    assert started[0] >= site.job(job_id).run_at


# ---- outcomes ------------------------------------------------------------------------------------


def test_every_way_to_end_is_in_the_row_and_in_the_history(site: Site) -> None:
    ended: list[int] = []

    def work(ctx: Context, how: str) -> str:
        ended.append(ctx.job.id)
        if ctx.attempt > 1:
            return "at last"
        if how == "retry":
            raise Retry("once more", in_=SOON) from KeyError("the cause")
        if how == "snooze":
            raise Snooze("not now", in_=SOON)
        if how == "discard":
            raise Discard("no hope")
        if how == "fail":
            raise ValueError("a bug")
        return "at once"

    site.action(work, backoff=Constant(SOON))
    ids = {
        how: site.enqueue("work", {"how": how}, max_attempts=2)
        for how in ("return", "retry", "snooze", "discard", "fail")
    }
    with site.worker():
        for how, job_id in ids.items():
            site.wait_for(job_id, "discarded" if how == "discard" else "completed")

    rows = {how: site.job(job_id) for how, job_id in ids.items()}
    assert (rows["return"].result, rows["return"].attempt) == ('"at once"', 1)
    assert {how: rows[how].result for how in ("retry", "snooze", "fail")} == dict.fromkeys(
        ("retry", "snooze", "fail"), '"at last"'
    )
    assert (rows["snooze"].attempt, rows["snooze"].snoozes) == (2, 1)
    assert (rows["discard"].dead_letter, rows["discard"].last_error) == (True, "Discard: no hope")
    written = {how: [(e.event, e.error) for e in site.history(ids[how])] for how in ids}
    assert written == {
        "return": [],
        "retry": [("retry", "Retry: once more")],
        "snooze": [("snooze", "Snooze: not now")],
        "discard": [("discard", "Discard: no hope")],
        "fail": [("retry", "ValueError: a bug")],
    }
    (entry,) = site.history(ids["retry"])
    assert entry.details is not None
    assert "the cause" in entry.details


def test_no_exception_of_an_action_ends_the_worker(site: Site) -> None:
    exceptions = {
        "exit": SystemExit(1),
        "interrupt": KeyboardInterrupt(),
        "cancel": asyncio.CancelledError(),
        "generator": GeneratorExit(),
        "group": BaseExceptionGroup("all", [SystemExit(2), ValueError("x")]),
    }

    def work(name: str) -> None:
        raise exceptions[name]

    async def work_async(name: str) -> None:
        raise exceptions[name]

    site.action(work, "sync", max_attempts=1)
    site.action(work_async, "async", max_attempts=1)
    site.action(nothing)
    ids = [site.enqueue(kind, {"name": name}) for kind in ("sync", "async") for name in exceptions]
    with site.worker() as worker:
        for job_id in ids:
            assert site.wait_for(job_id, "discarded").last_error
        site.wait_for(site.enqueue(), "completed")
        assert worker.is_healthy


def test_the_history_of_a_job_is_bounded(site: Site) -> None:
    def fail() -> None:
        raise ValueError("again")

    site.action(fail, backoff=Constant(0))
    job_id = site.enqueue(max_attempts=9)
    with site.worker(history_limit=3):
        site.wait_for(job_id, "discarded")
    assert [entry.attempt for entry in site.history(job_id)] == [7, 8, 9]


@pytest.mark.parametrize("reaction", ["stops", "returns", "raises"])
def test_a_run_that_was_asked_to_stop_ends_as_cancelled_whatever_it_does(
    site: Site, reaction: str
) -> None:
    def work(ctx: Context) -> None:
        assert ctx.wait_cancelled(60.0)
        if reaction == "stops":
            ctx.raise_if_cancelled()
        if reaction == "raises":
            raise ValueError("in the middle")

    site.action(work)
    job_id = site.enqueue()
    with site.worker(lease=1.0):
        site.wait_for(job_id, "running")
        site.execute("UPDATE cyclone_job SET cancel_requested_at = updated_at")
        row = site.wait_for(job_id, "cancelled")
    assert (row.dead_letter, row.attempt) == (None, 1)
    assert [entry.event for entry in site.history(job_id)] == ["cancel"]


def test_a_cancel_that_is_rolled_back_stops_nobody(site: Site) -> None:
    gate = Gate()
    site.action(gate.passing())
    running, waiting = site.enqueue(), site.enqueue(process_in=3_600)
    with site.worker():
        gate.await_arrival()
        with Session(site.engine) as session:
            for job_id in (running, waiting):
                site.cyclone.cancel(session, job_id)
            session.rollback()
        gate.open()
        site.wait_for(running, "completed")
    assert site.job(waiting).state == "pending"
    assert site.history(running) == site.history(waiting) == []


def test_a_job_past_its_deadline_is_discarded_before_and_during_its_run(site: Site) -> None:
    ran: list[int] = []

    def work(ctx: Context) -> None:
        ran.append(ctx.job.id)
        assert ctx.wait_cancelled(60.0)
        ctx.raise_if_cancelled()

    site.action(work)
    late = site.enqueue(deadline=datetime.now(UTC) - timedelta(hours=1))
    with site.worker():
        first = site.wait_for(late, "discarded")
        during = site.enqueue(deadline=datetime.now(UTC) + timedelta(seconds=0.2))
        second = site.wait_for(during, "discarded")
    assert ran in ([during], [])  # it may have expired before it began
    for row in (first, second):
        assert row.last_error is not None
        assert row.last_error.startswith("Expired")


def test_an_async_run_is_cancelled_at_its_timeout_and_tried_again(site: Site) -> None:
    async def work(ctx: Context) -> str:
        if ctx.attempt == 1:
            await asyncio.sleep(60.0)
        return "in time"

    site.action(work, timeout=0.05, backoff=Constant(0))
    job_id = site.enqueue()
    with site.worker():
        site.wait_for(job_id, "completed")
    (entry,) = site.history(job_id)
    assert entry.error is not None
    assert "timed out" in entry.error


def test_a_sync_run_beyond_its_timeout_keeps_slot_and_lease_while_its_thread_lives(
    site: Site,
) -> None:
    gate, overlap = Gate(), threading.Semaphore(1)
    overlapped: list[int] = []

    def stubborn(ctx: Context) -> None:
        if not overlap.acquire(blocking=False):
            overlapped.append(ctx.attempt)
        if ctx.attempt == 1:
            assert ctx.wait_cancelled(60.0)  # its time is up, and it does not care
            gate()
        overlap.release()

    site.action(stubborn, timeout=0.05, backoff=Constant(0))
    job_id = site.enqueue()
    with site.worker(lease=1.0, concurrency=1), site.worker(lease=1.0):
        gate.await_arrival()
        before = site.job(job_id).leased_until
        wait_until(lambda: site.job(job_id).leased_until != before, "the lease is renewed")
        assert (site.job(job_id).state, site.job(job_id).attempt) == ("running", 1)
        gate.open()
        site.wait_for(job_id, "completed")
    assert overlapped == []


def test_a_worker_starts_while_another_process_writes_for_long(sqlite_database: Database) -> None:
    site = Site(sqlite_database)
    site.action(nothing)
    job_id = site.enqueue()
    writer = site.database.engine(isolation_level="AUTOCOMMIT").connect()
    writer.exec_driver_sql("BEGIN IMMEDIATE")
    try:
        with site.worker(lock_timeout=0.05):
            writer.exec_driver_sql("COMMIT")
            site.wait_for(job_id, "completed")
    finally:
        writer.close()


# ---- leases --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["returns", "raises"])
@pytest.mark.parametrize("other", ["has completed it", "runs it"])
def test_a_late_finisher_changes_nothing_and_says_that_its_lease_was_lost(
    site: Site, ending: str, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    late_gate, other_gate = Gate(), Gate()

    def work(ctx: Context) -> str:
        if ctx.attempt == 1:
            late_gate()
            if ending == "raises":
                raise ValueError("too late")
            return "late"
        other_gate()
        return "other"

    site.action(work)
    job_id = site.enqueue()
    with site.worker(name="late", rescue_interval=600.0, lease=600.0):
        late_gate.await_arrival()
        lapse(site, job_id)
        with site.worker(name="other"):
            other_gate.await_arrival()
            if other == "has completed it":
                other_gate.open()
                site.wait_for(job_id, "completed")
            before = vars(site.job(job_id)) | {"_sa_instance_state": None}
            history = len(site.history(job_id))
            late_gate.open()
            wait_until(
                lambda: any("lease lost" in text for text in messages(caplog.records)), "it is told"
            )
            assert vars(site.job(job_id)) | {"_sa_instance_state": None} == before
            assert len(site.history(job_id)) == history
            other_gate.open()
            site.wait_for(job_id, "completed")
    assert site.job(job_id).result == '"other"'


def test_a_run_learns_that_its_own_worker_has_the_job_again(site: Site) -> None:
    told, second = threading.Event(), threading.Event()

    def work(ctx: Context) -> None:
        if ctx.attempt > 1:
            second.set()
            assert told.wait(60.0)
        elif ctx.wait_cancelled(60.0):
            told.set()

    site.action(work)
    job_id = site.enqueue()
    with site.worker(lease=3.0, rescue_interval=0.1):
        site.wait_for(job_id, "running")

        def has_it_again() -> bool:
            if not second.is_set():
                lapse(site, job_id)
            return second.wait(0.2)

        wait_until(has_it_again, "the worker rescues its own job, and claims it")
        assert told.wait(60.0)
        site.wait_for(job_id, "completed")


def test_a_run_learns_that_its_lease_is_lost(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    told, gate = threading.Event(), Gate()

    def work(ctx: Context) -> None:
        if ctx.attempt > 1:
            gate()
            return
        assert ctx.wait_cancelled(60.0)
        told.set()

    site.action(work)
    job_id = site.enqueue()
    with site.worker(lease=1.0, rescue_interval=600.0):
        site.wait_for(job_id, "running")
        site.execute("UPDATE cyclone_job SET lease = lease + 1000, worker = 'somebody'")
        assert told.wait(30.0)
        wait_until(
            lambda: sum("lease lost" in text for text in messages(caplog.records)) == 2,
            "it says so",
        )
        gate.open()


def lapse(site: Site, job_id: int) -> None:
    """Make the lease of a job run out now, if it is running."""
    of_run = "WHERE id = :id AND state = 'running'"
    site.execute(f"UPDATE cyclone_job SET leased_until = created_at {of_run}", id=job_id)


def test_a_healthy_long_job_keeps_its_lease_though_renewals_are_late_and_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second renewal is lost with its connection, every other one takes 0.3 s longer."""
    from cyclone_sqla import operations

    renew, tries, gate = operations.renew, iter(range(1_000)), Gate()

    def troubled(connection: sa.Connection, *args: object) -> object:
        threading.Event().wait(0.3)
        if next(tries) % 2:
            raise sa.exc.OperationalError("renew", {}, OSError("the connection is gone"))
        return renew(connection, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(operations, "renew", troubled)
    runs: list[int] = []

    def work(ctx: Context) -> None:
        runs.append(ctx.attempt)
        threading.Event().wait(5.0)
        gate.open()

    site.action(work)
    job_id = site.enqueue()
    with site.worker(lease=1.5), site.worker(lease=1.5):
        site.wait_for(job_id, "completed")
    assert runs == [1]
    assert next(tries) >= 4


@pytest.mark.parametrize("settings", [{"lease": 0.5}, {"lease": 0}, {"lease": -1.0}])
def test_a_lease_that_cannot_be_renewed_in_time_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="lease"):
        WorkerSettings(**settings)


# ---- bad data ------------------------------------------------------------------------------------


def test_a_result_that_the_database_refuses_costs_only_itself(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check of results is taken out, as if it had a hole."""
    monkeypatch.setattr(Action, "encode_result", lambda _self, value: value)
    gate = Gate()
    bad = {19: '"guarded"'}
    if site.database.dialect == "postgresql":
        bad |= {3: '"a\0b"', 11: '"\ud800"', 17: "not JSON"}
    guard_results(site)

    def work(ctx: Context, number: int) -> str:
        gate()
        return bad.get(number, str(number))

    site.action(work)
    ids = [site.enqueue("work", {"number": number}) for number in range(20)]
    with site.worker(concurrency=20):
        gate.await_arrival(20)
        gate.open()
        site.wait_until_all_are("completed")

    for number, job_id in enumerate(ids):
        row = site.job(job_id)
        if number in bad:
            assert (row.result, row.attempt) == (None, 1)
            assert row.last_error == "Unstorable: what this attempt left could not be stored"
        else:
            assert row.result == str(number)
    complaints = [text for text in messages(caplog.records) if "could not be stored" in text]
    assert len(complaints) == len(bad)
    assert not any("lease lost" in text for text in messages(caplog.records))


def guard_results(site: Site) -> None:
    """A constraint of the application's on our table; SQLite can add it only as a trigger."""
    if site.database.dialect == "sqlite":
        site.execute(
            "CREATE TRIGGER guard BEFORE UPDATE ON cyclone_job WHEN new.result = '\"guarded\"' "
            "BEGIN SELECT RAISE(ABORT, 'guarded'); END"
        )
    else:
        site.execute(
            "ALTER TABLE cyclone_job ADD CONSTRAINT guard CHECK (result::text <> '\"guarded\"')"
        )


def test_a_job_that_cannot_be_written_at_all_keeps_no_other_from_being_settled(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    site.action(gate.passing())
    ids = site.enqueue_many(8)
    with site.worker(lease=600.0):
        gate.await_arrival(8)
        forbid_ends_of(site, ids[2])
        gate.open()
        wait_until(lambda: site.states()["completed"] == 7, "the others are completed")
        wait_until(
            lambda: any("can't be settled" in text for text in messages(caplog.records)),
            "it says so",
        )
        assert site.job(ids[2]).state == "running"


def forbid_ends_of(site: Site, job_id: int) -> None:
    if site.database.dialect == "sqlite":
        site.execute(
            f"CREATE TRIGGER guard BEFORE UPDATE ON cyclone_job WHEN new.id = {job_id} "
            "AND new.state = 'completed' BEGIN SELECT RAISE(ABORT, 'never'); END"
        )
    else:
        site.execute(
            "ALTER TABLE cyclone_job ADD CONSTRAINT guard "
            f"CHECK (id <> {job_id} OR state <> 'completed')"
        )


# ---- the application's engine --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "of"),
    [
        ("AUTOCOMMIT", "the engine"),
        ("REPEATABLE READ", "the engine"),
        ("SERIALIZABLE", "the engine"),
        ("REPEATABLE READ", "the database"),
        ("SERIALIZABLE", "the database"),
    ],
)
def test_an_isolation_level_of_the_application_does_not_reach_the_worker(
    postgresql_database: Database, level: str, of: str, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Site(postgresql_database)
    if of == "the engine":
        engine = postgresql_database.engine(isolation_level=level)
    else:
        name = setup.engine.url.database
        setup.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")
        engine = postgresql_database.engine()
    site = Site(postgresql_database, engine=engine)
    ran = Counter[int]()

    def work(ctx: Context) -> None:
        ran[ctx.job.id] += 1

    site.action(work)
    ids = setup.enqueue_many(200)
    with site.worker(), site.worker():
        setup.wait_until_all_are("completed")

    assert ran == dict.fromkeys(ids, 1)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_serialization_failure_of_an_action_is_an_ordinary_failed_attempt(
    postgresql_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(postgresql_database)

    def work(ctx: Context) -> None:
        if ctx.attempt == 1:
            site.execute(
                "DO $$ BEGIN RAISE EXCEPTION 'could not serialize' USING ERRCODE = '40001'; END $$"
            )

    site.action(work, backoff=Constant(0))
    job_id = site.enqueue()
    with site.worker() as worker:
        site.wait_for(job_id, "completed")
        assert worker.is_healthy
    assert [entry.event for entry in site.history(job_id)] == ["retry"]
    assert tracebacks(caplog.records) == []


# ---- stop ----------------------------------------------------------------------------------------


def test_at_a_stop_runs_end_and_another_worker_takes_over_at_once(site: Site) -> None:
    gate, ran_by = Gate(), Counter[str]()

    def work(ctx: Context) -> None:
        gate()
        ran_by[site.job(ctx.job.id).worker or ""] += 1

    site.action(work)
    site.enqueue_many(6)
    first = Worker(site.cyclone, queues={"default": 2}, poll=600.0, lease=600.0)
    first.start()
    gate.await_arrival(2)
    with site.worker(poll=600.0, queues={"default": 2}) as second:
        gate.await_arrival(2)
        stopping = threading.Thread(target=first.stop, args=(60.0,))
        stopping.start()
        gate.open()
        site.wait_until_all_are("completed")
        stopping.join(30.0)
    assert ran_by == {first.id: 2, second.id: 4}
    assert {job.attempt for job in (site.job(i) for i in range(1, 7))} == {1}


def test_a_run_that_is_stopped_in_the_middle_runs_again_elsewhere_at_once(site: Site) -> None:
    arrived = threading.Event()

    def work(ctx: Context) -> None:
        if ctx.attempt == 1:
            arrived.set()
            assert ctx.wait_cancelled(60.0)
            ctx.raise_if_cancelled()

    site.action(work)
    job_id = site.enqueue()
    first = Worker(site.cyclone, poll=600.0, lease=600.0)
    first.start()
    assert arrived.wait(30.0)
    with site.worker(poll=600.0, rescue_interval=600.0):
        assert first.stop(grace=0.0)
        site.wait_for(job_id, "completed")
    assert site.job(job_id).attempt == 2


def test_worker_ids_are_never_used_again_though_the_name_is(site: Site) -> None:
    site.action(nothing)
    ids = {Worker(site.cyclone, name="box").id for _ in range(50)}
    assert len(ids) == 50
    assert all(worker_id.startswith("box/") for worker_id in ids)


# ---- retention -----------------------------------------------------------------------------------


def test_a_worker_prunes_what_ended_long_ago(site: Site) -> None:
    site.action(nothing)
    job_id = site.enqueue()
    with site.worker(keep_completed=0.0, prune_interval=0.1):
        wait_until(lambda: not site.states(), f"job {job_id} is pruned")


def test_the_system_watches_over_every_connection_of_a_worker(
    postgresql_database: Database,
) -> None:
    site = Site(postgresql_database)
    site.action(nothing)
    with site.worker() as worker:
        assert worker._parts is not None
        for held in worker._parts.connections:
            with held.reading() as connection:
                driver = connection.connection.driver_connection
                assert driver is not None
                with socket.socket(fileno=os.dup(driver.fileno())) as twin:
                    assert twin.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
