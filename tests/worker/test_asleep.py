"""A worker that would sleep for an hour: whatever gives it work has to wake it.

In production the poll interval bounds every delay, and hides what these tests would find.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from cyclone_sqla import Context, admission, begin_before_savepoints
from cyclone_sqla.backoff import Constant
from cyclone_sqla.dialects.postgresql import PostgresDialect
from cyclone_sqla.worker.maintenance import Stager
from cyclone_sqla.worker.wakeup import Source, Wakeup
from tests.databases import Database
from tests.waiting import wait_until
from tests.worker.site import Gate, Site, messages, nothing

HOUR = 3_600.0
FAR = 300 * 86_400.0


class Sleep:
    """Whether the work loop has gone to sleep for good, as far as its poll interval goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_deep, self._hears = threading.Event(), threading.Event()
        wait, heard = Wakeup.wait, Source._heard_from_now_on

        def noted(wakeup: Wakeup, timeout: float) -> frozenset[str] | None:
            if timeout > HOUR / 2:
                self._is_deep.set()
            called = wait(wakeup, timeout)
            self._is_deep.clear()
            return called

        def heard_and_noted(source: Source) -> None:
            self._is_deep.clear()  # it is woken by this, too
            heard(source)
            self._hears.set()

        monkeypatch.setattr(Wakeup, "wait", noted)
        monkeypatch.setattr(Source, "_heard_from_now_on", heard_and_noted)

    def is_about_to_go_deaf(self) -> None:
        """It can be called again only when it has listened anew."""
        self._hears.clear()

    def wait_until_deep(self) -> None:
        """Return once it sleeps and can be called."""
        assert self._hears.wait(30.0), "the worker never listened"
        while True:
            assert self._is_deep.wait(30.0), "the worker never went to sleep"
            time.sleep(0.05)  # it may have been on the way there when it heard
            if self._is_deep.is_set():
                return


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Sleep:
    return Sleep(monkeypatch)


@pytest.fixture
def site(database: Database) -> Site:
    site = Site(database)
    begin_before_savepoints(site.engine)
    site.action(nothing)
    return site


# ---- an empty look is not an empty queue ---------------------------------------------------------


def test_a_job_that_was_locked_at_the_moment_of_the_look_does_not_wait_for_the_poll(
    postgresql_database: Database, sleep: Sleep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a head is, while an admission lets others in behind it."""
    site = Site(postgresql_database)
    site.action(nothing)
    looks_in_vain: list[int] = []
    with site.engine.connect() as other, site.worker(poll=HOUR):
        sleep.wait_until_deep()
        take_turn = PostgresDialect.take_turn

        def look_beside_a_lock(*args: Any, **options: Any) -> Any:
            if looks_in_vain:
                return take_turn(*args, **options)
            locked = other.execute(sa.text("SELECT id FROM cyclone_job FOR UPDATE")).all()
            turn = take_turn(*args, **options)
            other.rollback()
            looks_in_vain.extend(row.id for row in locked if not turn.claimed)
            return turn

        monkeypatch.setattr(PostgresDialect, "take_turn", look_beside_a_lock)
        job_id = site.enqueue()
        site.wait_for(job_id, "completed")
    assert looks_in_vain == [job_id]


# ---- a listener that lost its connection ---------------------------------------------------------


def test_no_job_waits_for_the_poll_because_the_listener_lost_its_connection(
    postgresql_database: Database, sleep: Sleep
) -> None:
    site = Site(postgresql_database)
    site.action(nothing)
    with site.worker(poll=HOUR):
        sleep.wait_until_deep()
        site.wait_for(site.enqueue(), "completed")  # from now on hints leave at once
        sleep.wait_until_deep()
        with site.engine.begin() as connection:
            unheard = site.cyclone.enqueue(connection, "work", {}).id
            sleep.is_about_to_go_deaf()
            assert site.execute(_END_LISTENER) == 1
        site.wait_for(unheard, "completed", within=5.0)
        sleep.wait_until_deep()
        site.wait_for(site.enqueue(), "completed", within=5.0)


_END_LISTENER = """
SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity
WHERE datname = current_database() AND query LIKE 'LISTEN%'
"""


# ---- who commits late, or after a savepoint ------------------------------------------------------


def test_a_commit_wakes_a_worker_that_has_just_served_another_one(
    postgresql_database: Database, sleep: Sleep
) -> None:
    """Both enqueued at the same time; that one was called for says nothing of the other."""
    site = Site(postgresql_database)
    site.action(nothing)
    with (
        site.engine.connect() as soon,
        site.engine.connect() as late,
        site.worker(poll=HOUR),
    ):
        sleep.wait_until_deep()
        first, second = (site.cyclone.enqueue(each, "work", {}).id for each in (soon, late))
        soon.commit()
        site.wait_for(first, "completed")
        sleep.wait_until_deep()
        late.commit()
        site.wait_for(second, "completed")


@pytest.mark.parametrize("sequence", [None, "account-7"])
def test_a_later_enqueue_of_a_transaction_wakes_a_worker_whom_the_first_does_not_concern(
    postgresql_database: Database, sleep: Sleep, sequence: str | None
) -> None:
    site = Site(postgresql_database)
    site.action(nothing)
    with site.worker(queues={"default": 5}, poll=HOUR):
        sleep.wait_until_deep()
        with Session(site.engine) as session, session.begin():
            site.cyclone.enqueue(session, "work", {}, queue="elsewhere")
            later = site.cyclone.enqueue(session, "work", {}, sequence=sequence)
        site.wait_for(later.id, "completed")


def test_an_enqueue_after_a_savepoint_that_was_rolled_back_wakes_a_worker(
    site: Site, sleep: Sleep
) -> None:
    """What was said in the savepoint, to another queue, is not all that is said."""
    with site.worker(poll=HOUR):
        sleep.wait_until_deep()
        with site.engine.begin() as connection:
            savepoint = connection.begin_nested()
            site.cyclone.enqueue(connection, "work", {}, queue="of others")
            savepoint.rollback()
            kept = site.cyclone.enqueue(connection, "work", {}).id
        site.wait_for(kept, "completed")
    assert site.states() == {"completed": 1}


# ---- the stager, asleep until a day that is far away ---------------------------------------------


def enqueue_with_a_short_delay(site: Site) -> int:
    return site.enqueue(process_in=0.05)


def enqueue_a_head_with_a_short_delay(site: Site) -> int:
    return site.enqueue(sequence="k", process_in=0.05)


def reschedule_the_far_one(site: Site) -> int:
    far = site.enqueue(process_in=FAR)
    with site.engine.begin() as connection:
        site.cyclone.reschedule(connection, far, process_in=0.05)
    return far


def fail_once_with_a_short_backoff(site: Site) -> int:
    return site.enqueue("fails once")


def commit_after_the_time_has_come(site: Site) -> int:
    with site.engine.begin() as connection:
        job_id = site.cyclone.enqueue(connection, "work", {}, process_in=0.01).id
        time.sleep(0.02)
    return job_id


DUE: tuple[Callable[[Site], int], ...] = (
    enqueue_with_a_short_delay,
    enqueue_a_head_with_a_short_delay,
    reschedule_the_far_one,
    fail_once_with_a_short_backoff,
    commit_after_the_time_has_come,
)


@pytest.mark.parametrize("act", DUE, ids=lambda act: act.__name__)
def test_whatever_makes_a_job_due_earlier_wakes_the_stager(
    site: Site, sleep: Sleep, act: Callable[[Site], int]
) -> None:
    def fail_once(ctx: Context) -> None:
        if ctx.attempt == 1:
            raise ValueError("it broke")

    site.action(fail_once, "fails once", backoff=Constant(0.05))
    site.enqueue(process_in=FAR)
    with site.worker(poll=HOUR):
        sleep.wait_until_deep()
        site.wait_for(act(site), "completed")


def test_a_head_whose_turn_comes_before_its_time_starts_when_that_has_come(
    site: Site, sleep: Sleep
) -> None:
    gate = Gate()
    site.action(gate.passing(), "held")
    with site.worker(poll=HOUR):
        first = site.enqueue("held", sequence="k")
        gate.await_arrival()
        second = site.enqueue(sequence="k", process_in=3.0)
        wait_until(lambda: site.job(second).waits_for == "turn", "the second has its place")
        gate.open()
        site.wait_for(first, "completed")
        assert site.job(second).waits_for == "time"
        site.wait_for(second, "completed")


# ---- calls for a sequence ------------------------------------------------------------------------


def test_a_job_that_another_worker_has_admitted_is_found_without_the_poll(
    postgresql_database: Database, sleep: Sleep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That worker calls its own loop, and may have no slot."""
    site = Site(postgresql_database)
    site.action(nothing)

    def others_were_first(stager: Stager) -> None:
        with site.engine.begin() as connection:
            admission.admit(connection, stager._dialect, 0, 1_000)

    monkeypatch.setattr(Stager, "admit_now", others_were_first)
    with site.worker(poll=HOUR):
        sleep.wait_until_deep()
        site.wait_for(site.enqueue(sequence="k"), "completed")


def test_no_claim_gets_in_the_way_of_an_admission(
    postgresql_database: Database, sleep: Sleep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would find nothing yet, and takes as long as the admission."""
    called: list[float] = []
    looked: list[float] = []
    admit_now, take_turn = Stager.admit_now, PostgresDialect.take_turn

    def note_call(stager: Stager) -> None:
        called.append(time.monotonic())
        admit_now(stager)

    def note_look(*args: Any, **options: Any) -> Any:
        if called:
            looked.append(time.monotonic())
        return take_turn(*args, **options)

    monkeypatch.setattr(Stager, "admit_now", note_call)
    monkeypatch.setattr(Stager, "look_ahead", lambda _stager: HOUR)  # nothing is admitted yet
    monkeypatch.setattr(PostgresDialect, "take_turn", note_look)
    site = Site(postgresql_database)
    site.action(nothing)
    with site.worker(poll=HOUR):
        sleep.wait_until_deep()
        site.enqueue(sequence="k")
        wait_until(lambda: bool(looked), "it looks for what others have admitted")
    assert looked[0] - called[0] >= 0.004


# ---- the reply to a settle and a claim in one ----------------------------------------------------


def test_a_head_whose_claim_was_not_answered_runs_in_its_place_without_a_burnt_attempt(
    postgresql_database: Database,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One call settled the head before it, handed the place on and claimed it."""
    lost: list[int] = []
    take_turn = PostgresDialect.take_turn

    def lose_a_reply(self: Any, connection: sa.Connection, *args: Any, **options: Any) -> Any:
        answer = take_turn(self, connection, *args, **options)
        if answer is not None and answer.settled and answer.claimed and not lost:
            lost.extend(row.id for row in answer.claimed)
            driver: Any = connection.connection.driver_connection
            driver.close()
            reason = psycopg.OperationalError("the reply was lost")
            raise OperationalError(None, None, reason, connection_invalidated=True)
        return answer

    monkeypatch.setattr(PostgresDialect, "take_turn", lose_a_reply)
    site = Site(postgresql_database, hints=False)
    runs: list[int] = []

    def work(ctx: Context) -> None:
        runs.append(ctx.job.id)

    site.action(work)
    ids = site.enqueue_many(4, sequence="k", max_attempts=1)
    with site.worker(poll=0.05, lease=600.0):
        site.wait_until_all_are("completed")

    assert runs == ids
    assert lost == [ids[1]]
    assert {(site.job(i).attempt, site.job(i).crashes) for i in ids} == {(1, 0)}
    texts = messages(caplog.records)
    assert [text for text in texts if text.startswith("giving back 1 job(s)")]
    assert not [text for text in texts if "lease lost" in text]
