"""The duties that all workers share: one bad row, one slow or failing duty costs nobody else."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from cyclone_sqla import WorkerSettings, operations
from cyclone_sqla.backoff import Constant
from cyclone_sqla.operations import LostRun
from cyclone_sqla.worker import maintenance
from cyclone_sqla.worker.maintenance import Rescuer, Stager
from cyclone_sqla.worker.rhythm import Contact, Rhythm
from tests.databases import Database
from tests.life.hands import Hands
from tests.waiting import wait_until
from tests.worker.site import Site, nothing


@pytest.fixture
def hands(database: Database) -> Iterator[Hands]:
    with closing(Hands(database)) as hands:
        yield hands


@pytest.fixture
def contact() -> Contact:
    return Contact(longest_gap=60.0)


def rescuer_of(hands: Hands, contact: Contact, **settings: float) -> Rescuer:
    return Rescuer(
        hands.dialect,
        hands.held,
        WorkerSettings(**settings),
        rhythm=Rhythm(0.0, threading.Event()),
        contact=contact,
        backoff_of=lambda _kind: Constant(60),
        on_rescued=lambda: None,
    )


def crash(hands: Hands, count: int) -> list[int]:
    """Claim jobs and never come back; their ids."""
    hands.enqueue_many(count)
    ids = [job.id for job in hands.claim(count)]
    hands.clock.advance(minutes=2)
    return ids


def refuse_to_change(hands: Hands, job_id: int) -> None:
    """A trigger of the application's that lets nobody write to a job."""
    if hands.dialect.name == "sqlite":
        hands.execute(
            "CREATE TRIGGER guard BEFORE UPDATE ON cyclone_job WHEN old.id = "
            f"{job_id} BEGIN SELECT RAISE(ABORT, 'not this one'); END"
        )
        return
    hands.execute(
        "CREATE FUNCTION guard() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'not this one'; END $$"
    )
    hands.execute(
        "CREATE TRIGGER guard BEFORE UPDATE ON cyclone_job FOR EACH ROW "
        f"WHEN (old.id = {job_id}) EXECUTE FUNCTION guard()"
    )


def states(hands: Hands, ids: list[int]) -> list[str]:
    return [hands.job(job_id).state for job_id in ids]


def test_one_row_that_cannot_be_rescued_does_not_keep_the_other_39(
    hands: Hands, contact: Contact, caplog: pytest.LogCaptureFixture
) -> None:
    ids = crash(hands, 40)
    refuse_to_change(hands, ids[17])
    rescuer = rescuer_of(hands, contact)

    for _ in range(3):
        rescuer.round()

    assert states(hands, ids) == ["available"] * 17 + ["running"] + ["available"] * 22
    (complaint,) = [r for r in caplog.records if "can't be rescued" in r.message]
    assert f"job {ids[17]}" in complaint.message
    assert "not this one" in complaint.message


def test_every_rescued_job_is_logged(
    hands: Hands, contact: Contact, caplog: pytest.LogCaptureFixture
) -> None:
    (job_id,) = crash(hands, 1)

    with caplog.at_level(logging.WARNING):
        rescuer_of(hands, contact).round()

    (record,) = caplog.records
    assert f"rescued job {job_id} (work) from worker worker-1" in record.message
    assert (record.levelno, record.__dict__["job_id"]) == (logging.WARNING, job_id)


def test_a_rescuer_that_was_out_of_touch_gives_the_others_one_renewal_interval(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database answers its look after a second only: the leases lapsed meanwhile."""
    ids = crash(hands, 1)
    look, pauses = operations.expired_runs, iter([1.0])

    def slow_look(*args: Any) -> list[LostRun]:
        time.sleep(next(pauses, 0.0))
        return look(*args)

    monkeypatch.setattr(operations, "expired_runs", slow_look)
    rescuer = rescuer_of(hands, Contact(longest_gap=0.5), lease=3.0)

    rescuer.round()
    back_at = time.monotonic()
    assert states(hands, ids) == ["running"]
    rescuer.round()
    assert states(hands, ids) == ["available"]
    assert time.monotonic() - back_at >= 0.9


def test_a_rescuer_gives_it_again_each_time_it_comes_back(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time the holder renews its lease in the interval; the second time it is as late."""
    ids = crash(hands, 1)
    look, pauses = operations.expired_runs, iter([1.0, 0.0, 1.0])
    answers = iter([True, False, True])

    def slow_look(*args: Any) -> list[LostRun]:
        time.sleep(next(pauses))
        return look(*args) if next(answers) else []

    monkeypatch.setattr(operations, "expired_runs", slow_look)
    rescuer = rescuer_of(hands, Contact(longest_gap=0.5), lease=3.0)

    for _ in range(3):
        rescuer.round()
        assert states(hands, ids) == ["running"]


def test_more_lost_jobs_than_a_pass_takes_are_rescued_at_once(
    hands: Hands, contact: Contact
) -> None:
    ids = crash(hands, 7)
    rescuer = Rescuer(
        hands.dialect,
        hands.held,
        WorkerSettings(rescue_limit=3),
        rhythm=Rhythm(3_600.0, threading.Event()),
        contact=contact,
        backoff_of=lambda _kind: Constant(60),
        on_rescued=lambda: None,
    )

    for _ in range(3):
        rescuer.round()

    assert states(hands, ids) == ["available"] * 7


def test_the_stager_sleeps_until_the_next_due_time_and_no_longer_than_the_poll(
    hands: Hands, contact: Contact
) -> None:
    staged: list[bool] = []
    stager = Stager(
        hands.dialect,
        hands.held,
        poll=0.5,
        contact=contact,
        on_staged=lambda: staged.append(True),
    )

    assert 0.4 <= stager.look_ahead() <= 0.5
    hands.enqueue(process_in=timedelta(seconds=0.1))
    hands.enqueue(process_in=timedelta(days=300))
    assert stager.look_ahead() == pytest.approx(0.1)
    hands.clock.advance(seconds=0.1)
    assert stager.look_ahead() == 0.0
    assert staged == [True]
    assert 0.4 <= stager.look_ahead() <= 0.5


def test_the_stager_looks_again_at_once_when_a_new_head_has_to_wait_for_its_time(
    hands: Hands, contact: Contact
) -> None:
    stager = Stager(
        hands.dialect, hands.held, poll=3_600.0, contact=contact, on_staged=lambda: None
    )
    hands.enqueue(sequence="k", process_in=timedelta(seconds=0.1))
    assert stager.look_ahead() == 0.0
    assert stager.look_ahead() == pytest.approx(0.1)


def test_a_due_time_that_comes_up_during_the_sleep_ends_it(hands: Hands, contact: Contact) -> None:
    stager = Stager(
        hands.dialect, hands.held, poll=3_600.0, contact=contact, on_staged=lambda: None
    )
    rounds = threading.Thread(target=stager.round)
    rounds.start()
    stager.due_in(0.01)
    rounds.join(30.0)
    assert not rounds.is_alive()


REFUSE_ONE = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
    CREATE TRIGGER refuse BEFORE DELETE ON cyclone_job FOR EACH ROW
        WHEN (OLD.id = {id}) EXECUTE FUNCTION refuse()
"""


def test_what_keeps_a_batch_from_being_deleted_shows_and_undoes_no_earlier_one(
    postgresql_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_BATCH", 1)
    site = Site(postgresql_database)
    site.action(nothing)
    with site.worker(concurrency=1):
        ids = [site.enqueue() for _ in range(4)]
        site.wait_until_all_are("completed")
    site.execute(REFUSE_ONE.format(id=ids[2]))
    with site.worker(keep_completed=0.0, prune_interval=0.1) as worker:
        wait_until(lambda: site.states()["completed"] == 2, "two are deleted")
        wait_until(lambda: not worker.health()["prune"], "the trouble shows")
        assert site.job(ids[2]).state == site.job(ids[3]).state == "completed"
        site.execute("DROP TRIGGER refuse ON cyclone_job")
        wait_until(lambda: not site.states(), "all are deleted")
