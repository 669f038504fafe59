"""One job: who may have it, when, for how long, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import pytest

from cyclone_sqla import (
    Cancelled,
    ClaimedJob,
    ConfigurationError,
    InvalidJobError,
    JobNotFoundError,
    LeaseLostError,
    NotRunningError,
    PayloadError,
)
from cyclone_sqla.port import Queue
from cyclone_sqla.testing.conformance.trial import START, Trial

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


# ---- enqueue -------------------------------------------------------------------------------------


def test_a_job_needs_no_more_than_its_kind(trial: Trial) -> None:
    ref = trial.queue.enqueue("work")

    job = trial.job(ref.id)
    assert (ref.kind, ref.queue, ref.created, ref.state) == ("work", "default", True, "available")
    assert (job.queue, job.priority, job.attempt, job.max_attempts) == ("default", 0, 0, 25)
    assert (job.arguments, job.origin) == ("{}", "conformance")
    assert (job.created_at, job.run_at) == (START, START)


@pytest.mark.parametrize(
    "kind", ["", "a\0b", "x" * 257], ids=["empty", "with a NUL", "of 257 bytes"]
)
def test_a_kind_is_required_and_has_to_be_storable(trial: Trial, kind: str) -> None:
    with pytest.raises(InvalidJobError):
        trial.queue.enqueue(kind)
    assert trial.rows() == []


def test_given_ids_and_names_make_the_rows_of_a_test_the_same_each_time(trial: Trial) -> None:
    def rows() -> list[dict[str, Any]]:
        trial.begin_afresh()
        trial.cyclone.use_ids(count(7_000_001))
        trial.enqueue(unique="once", process_in=60)
        trial.enqueue(sequence="line")
        trial.queue.complete(trial.claim_one(), "done")
        return [{**row, "lease": None} for row in trial.rows()]

    first = rows()
    assert [row["id"] for row in first] == [7_000_001, 7_000_002]
    assert [row["worker"] for row in first] == [None, "worker-1"]
    assert rows() == first


# ---- claim ---------------------------------------------------------------------------------------


def test_a_claim_counts_an_attempt_and_gives_a_lease(trial: Trial) -> None:
    job_id = trial.enqueue()

    claimed = trial.claim_one(lease=45)

    job = trial.job(job_id)
    assert (claimed.id, claimed.kind, claimed.attempt) == (job_id, "work", 1)
    assert (job.state, job.attempt, job.worker, job.lease) == (
        "running",
        1,
        "worker-1",
        claimed.lease,
    )
    assert job.leased_until == START + 45 * SECOND
    assert job.started_at == job.updated_at == START


def test_a_claimed_job_is_nobody_elses(trial: Trial) -> None:
    ids = [trial.enqueue() for _ in range(4)]

    first, second = trial.queue.claim(limit=2), trial.other.claim(limit=10)

    assert [job.id for job in (*first, *second)] == ids
    assert trial.other.claim(limit=10) == []


def test_a_job_runs_when_its_time_has_come_and_not_before(trial: Trial) -> None:
    job_id = trial.enqueue(process_in=HOUR)

    trial.clock.advance(HOUR - timedelta(microseconds=1))
    assert trial.queue.claim() == []

    trial.clock.advance(timedelta(microseconds=1))
    assert trial.claim_one().id == job_id


def test_a_claim_takes_no_more_than_its_limit(trial: Trial) -> None:
    for _ in range(5):
        trial.enqueue()

    assert len(trial.queue.claim()) == 1
    assert len(trial.queue.claim(limit=3)) == 3
    assert len(trial.queue.claim(limit=3)) == 1


def test_a_queue_gives_its_own_jobs_alone(trial: Trial) -> None:
    mail, ledger = trial.enqueue(queue="mail"), trial.enqueue(queue="ledger")

    assert trial.queue.claim("post") == []
    assert [job.id for job in trial.queue.claim("mail", limit=10)] == [mail]
    assert [job.id for job in trial.queue.claim(["ledger", "mail"], limit=10)] == [ledger]


def test_smaller_priority_first_then_the_older_one_whatever_the_kind(trial: Trial) -> None:
    jobs = [("play", 5), ("work", 5), ("work", 0), ("play", 0), ("play", -1), ("work", 5)]
    ids = [trial.enqueue(kind, priority=priority) for kind, priority in jobs]

    one_by_one = [trial.queue.claim()[0].id for _ in range(3)]
    rest = [job.id for job in trial.queue.claim(limit=10)]

    assert [*one_by_one, *rest] == [ids[i] for i in (4, 2, 3, 0, 1, 5)]


def test_a_kind_that_a_worker_does_not_know_is_left_alone(trial: Trial) -> None:
    trial.enqueue("of-another-release")
    (unknown,) = trial.rows()
    known = trial.enqueue()
    trial.clock.advance(MINUTE)

    assert [job.id for job in trial.queue.claim(limit=10)] == [known]
    assert trial.rows()[0] == unknown


def test_a_paused_queue_gives_nothing(trial: Trial) -> None:
    trial.act("pause_queue", "mail")
    job_id = trial.enqueue(queue="mail")
    assert trial.queue.claim("mail") == []
    assert trial.other.claim(["default", "mail"]) == []

    trial.act("resume_queue", "mail")
    assert trial.claim_one("mail").id == job_id


@pytest.mark.parametrize(
    "wrong",
    [{"limit": 0}, {"lease": 0}, {"lease": -SECOND}],
    ids=["of no job", "for no time", "for a time that is past"],
)
def test_a_claim_that_can_not_be_is_refused(trial: Trial, wrong: dict[str, Any]) -> None:
    job_id = trial.enqueue()
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        trial.queue.claim(**wrong)
    assert trial.job(job_id).state == "available"


# ---- leases --------------------------------------------------------------------------------------


def test_a_job_whose_lease_ran_out_runs_again_under_a_later_one(trial: Trial) -> None:
    trial.enqueue()
    lost = trial.claim_one()
    trial.clock.advance(MINUTE - timedelta(microseconds=1))
    assert trial.other.claim() == []

    trial.clock.advance(timedelta(microseconds=1))
    (again,) = trial.other.claim()

    assert (again.id, again.attempt) == (lost.id, 2)
    assert again.lease > lost.lease
    with pytest.raises(LeaseLostError):
        trial.queue.complete(lost)
    with pytest.raises(LeaseLostError):
        trial.queue.fail(lost, "too late", permanent=True)
    assert trial.job(lost.id).state == "running"
    trial.other.complete(again)


def test_a_job_whose_last_lease_ran_out_is_discarded_with_the_reason(trial: Trial) -> None:
    job_id = trial.enqueue(max_attempts=2)
    for _ in range(2):
        trial.claim_one()
        trial.clock.advance(2 * MINUTE)

    assert trial.queue.claim() == []

    job = trial.job(job_id)
    assert (job.state, job.attempt, job.dead_letter) == ("discarded", 2, True)
    assert job.last_error == "WorkerLost: worker worker-1 was lost during attempt 2, the last of 2"
    assert [event.event for event in trial.history(job_id)] == ["rescue", "discard"]


def test_the_second_crash_of_a_job_backs_off(trial: Trial) -> None:
    job_id = trial.enqueue()
    for _ in range(2):
        trial.claim_one()
        trial.clock.advance(2 * MINUTE)

    assert trial.queue.claim() == []
    assert (trial.job(job_id).state, trial.job(job_id).waits_for) == ("pending", "retry")
    trial.clock.advance(HOUR)
    assert trial.claim_one().attempt == 3


def test_a_renewed_lease_counts_from_now(trial: Trial) -> None:
    trial.enqueue()
    job = trial.claim_one()
    trial.clock.advance(40 * SECOND)

    renewal = trial.queue.renew([job], lease=timedelta(seconds=90))

    row = trial.job(job.id)
    assert (renewal.lost, renewal.cancel_requested) == ([], [])
    assert row.leased_until == START + 130 * SECOND
    assert (row.lease, row.attempt, row.state) == (job.lease, 1, "running")
    trial.clock.advance(89 * SECOND)
    assert trial.other.claim() == []


def test_a_renewal_says_what_was_lost_and_what_is_to_stop(trial: Trial) -> None:
    for _ in range(3):
        trial.enqueue()
    kept, lost, asked = trial.queue.claim(limit=3)
    trial.queue.complete(lost)
    trial.act("cancel", asked.id)

    renewal = trial.queue.renew([kept, lost, asked])

    assert [run.job_id for run in renewal.lost] == [lost.id]
    assert [run.job_id for run in renewal.cancel_requested] == [asked.id]
    assert trial.job(asked.id).state == "running"


# ---- ends ----------------------------------------------------------------------------------------


def test_a_completed_job_keeps_its_result_and_never_runs_again(trial: Trial) -> None:
    job_id = trial.enqueue()
    job = trial.claim_one()
    trial.clock.advance(3 * SECOND)

    assert trial.queue.complete(job, {"b": [1, None], "a": "ä"}) == "completed"

    row = trial.job(job_id)
    assert (row.state, row.result, row.leased_until) == (
        "completed",
        '{"b":[1,null],"a":"ä"}',
        None,
    )
    assert row.finished_at == START + 3 * SECOND
    trial.clock.advance(HOUR)
    assert trial.queue.claim() == []


def test_a_result_that_json_can_not_hold_is_refused_and_the_run_goes_on(trial: Trial) -> None:
    trial.enqueue()
    job = trial.claim_one()

    with pytest.raises(PayloadError):
        trial.queue.complete(job, {"when": START})

    assert trial.job(job.id).state == "running"
    assert trial.queue.complete(job) == "completed"


def test_a_failed_job_waits_for_its_retry_and_dies_with_its_last_attempt(trial: Trial) -> None:
    job_id = trial.enqueue(max_attempts=2)

    job = trial.claim_one()
    assert trial.queue.fail(job, OSError("down"), retry_at=START + HOUR) == "pending"
    row = trial.job(job_id)
    assert (row.waits_for, row.run_at, row.last_error) == ("retry", START + HOUR, "OSError: down")
    trial.clock.advance(HOUR - SECOND)
    assert trial.queue.claim() == []

    trial.clock.advance(SECOND)
    assert trial.queue.fail(trial.claim_one(), "still down", retry_at=START) == "discarded"
    row = trial.job(job_id)
    assert (row.state, row.attempt, row.dead_letter) == ("discarded", 2, True)
    assert [event.event for event in trial.history(job_id)] == ["retry", "discard"]


def test_a_retry_time_that_is_past_means_at_once(trial: Trial) -> None:
    trial.enqueue()
    assert trial.queue.fail(trial.claim_one(), "again", retry_at=START - HOUR) == "available"
    assert trial.claim_one().attempt == 2


def test_a_failure_without_a_time_backs_off(trial: Trial) -> None:
    job_id = trial.enqueue()
    trial.queue.fail(trial.claim_one(), "down")
    assert START + SECOND / 2 <= trial.job(job_id).run_at <= START + SECOND


def test_a_permanent_failure_discards_the_job_at_once(trial: Trial) -> None:
    job_id = trial.enqueue()

    assert trial.queue.fail(trial.claim_one(), ValueError("bad"), permanent=True) == "discarded"

    job = trial.job(job_id)
    assert (job.state, job.attempt, job.last_error) == ("discarded", 1, "ValueError: bad")


ENDS: dict[str, Callable[[Trial, ClaimedJob], object]] = {
    "completed": lambda trial, job: trial.queue.complete(job),
    "failed": lambda trial, job: trial.queue.fail(job, "down"),
    "failed for good": lambda trial, job: trial.queue.fail(job, "bad", permanent=True),
    "recovered": lambda trial, _: trial.other.recover(),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_ends_once(trial: Trial, end: str) -> None:
    trial.enqueue()
    job = trial.claim_one()
    ENDS[end](trial, job)
    _refuses_to_end(trial, job)


def test_a_job_that_nobody_claimed_has_no_run_to_end(trial: Trial) -> None:
    waiting = [trial.enqueue(), trial.enqueue(process_in=HOUR)]
    trial.enqueue(queue="mail")
    (claimed,) = trial.queue.claim("mail")
    for job_id in waiting:
        _refuses_to_end(trial, claimed._replace(id=job_id, lease=trial.job(job_id).lease))


def _refuses_to_end(trial: Trial, job: ClaimedJob) -> None:
    before = trial.rows()
    with pytest.raises(NotRunningError):
        trial.queue.complete(job)
    with pytest.raises(NotRunningError):
        trial.queue.fail(job, "again")
    assert trial.queue.renew([job]).lost
    assert trial.rows() == before


def test_a_job_that_is_not_there_is_not_found(trial: Trial) -> None:
    trial.enqueue()
    stranger = trial.claim_one()._replace(id=4_711_000_000)

    with pytest.raises(JobNotFoundError):
        trial.queue.get(stranger.id)
    with pytest.raises(JobNotFoundError):
        trial.queue.complete(stranger)
    with pytest.raises(JobNotFoundError):
        trial.queue.fail(stranger, "gone")
    assert trial.queue.renew([stranger]).lost


@pytest.mark.parametrize("end", ["completed", "failed", "failed for good"])
def test_a_run_that_was_asked_to_stop_ends_as_cancelled(trial: Trial, end: str) -> None:
    job_id = trial.enqueue()
    job = trial.claim_one()
    trial.act("cancel", job_id)
    assert ENDS[end](trial, job) == "cancelled"
    assert trial.job(job_id).state == "cancelled"


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_what_a_run_did_commits_together_with_its_end_or_not_at_all(trial: Trial, end: str) -> None:
    trial.enqueue()
    job = trial.claim_one()
    with trial.engine.connect() as connection:
        inside = trial.queue.within(connection)
        inside.enqueue("play")
        assert inside.complete(job) == "completed"
        getattr(connection, end)()

    assert [(row["kind"], row["state"]) for row in trial.rows()] == (
        [("work", "completed"), ("play", "available")] if end == "commit" else [("work", "running")]
    )


def test_a_run_that_was_asked_to_stop_commits_nothing_of_what_it_did(trial: Trial) -> None:
    job_id = trial.enqueue()
    job = trial.claim_one()
    trial.act("cancel", job_id)
    with trial.engine.connect() as connection:
        inside = trial.queue.within(connection)
        inside.enqueue("play")
        with pytest.raises(Cancelled):
            inside.complete(job)
        connection.rollback()

    assert [row["state"] for row in trial.rows()] == ["running"]
    assert trial.queue.complete(job) == "cancelled"


def test_a_lost_lease_keeps_what_the_run_did_from_being_committed(trial: Trial) -> None:
    trial.enqueue()
    lost = trial.claim_one()
    trial.clock.advance(2 * MINUTE)
    trial.other.claim()
    with trial.engine.connect() as connection, connection.begin() as outer:
        inside = trial.queue.within(connection)
        inside.enqueue("play")
        with pytest.raises(LeaseLostError):
            inside.complete(lost)
        outer.rollback()
    assert len(trial.rows()) == 1


# ---- recover -------------------------------------------------------------------------------------


def test_recovered_jobs_run_again_at_once_with_their_attempt_counted(trial: Trial) -> None:
    ids = [trial.enqueue(), trial.enqueue(queue="mail")]
    trial.other.claim(["default", "mail"])

    assert trial.queue.recover() == 2

    assert [trial.job(job_id).state for job_id in ids] == ["available"] * 2
    assert [trial.job(job_id).attempt for job_id in ids] == [1, 1]
    assert [job.attempt for job in trial.queue.claim(["default", "mail"])] == [2, 2]
    assert [event.event for event in trial.history(ids[0])] == ["rescue"]


def test_a_job_that_crashes_again_and_again_is_recovered_at_once_each_time(trial: Trial) -> None:
    job_id = trial.enqueue()
    for _ in range(3):
        trial.claim_one()
        assert trial.queue.recover() == 1
    assert (trial.job(job_id).state, trial.job(job_id).attempt) == ("available", 3)


def test_recover_discards_what_has_no_attempt_left(trial: Trial) -> None:
    job_id = trial.enqueue(max_attempts=1)
    trial.claim_one()

    assert trial.queue.recover() == 1

    job = trial.job(job_id)
    assert (job.state, job.attempt, job.dead_letter) == ("discarded", 1, True)
    assert job.last_error == "WorkerLost: worker worker-1 was lost during attempt 1, the last of 1"
    assert trial.queue.claim() == []


def test_recover_touches_running_jobs_alone(trial: Trial) -> None:
    trial.enqueue()
    trial.queue.complete(trial.claim_one())
    trial.enqueue(process_in=60)
    trial.enqueue()
    before = trial.rows()

    assert trial.queue.recover() == 0
    assert trial.rows() == before


def test_a_job_that_was_to_be_cancelled_is_cancelled_by_recover(trial: Trial) -> None:
    job_id = trial.enqueue()
    trial.claim_one()
    trial.act("cancel", job_id)

    assert trial.queue.recover() == 1
    assert trial.job(job_id).state == "cancelled"


def test_what_a_worker_of_one_name_held_is_recovered_and_nothing_else(trial: Trial) -> None:
    gone, kept = trial.enqueue(), trial.enqueue()
    trial.other.claim()
    trial.queue.claim()

    assert trial.queue.recover("worker-2") == 1
    assert (trial.job(gone).state, trial.job(kept).state) == ("available", "running")


# ---- ready ---------------------------------------------------------------------------------------


def test_many_calls_are_one(trial: Trial) -> None:
    with trial.engine.connect() as connection:
        alone = trial.queue.within(connection)
        for _ in range(3):
            alone.enqueue("work")
        assert alone.ready(timeout=30)
        assert not alone.ready(timeout=0)


def test_a_worker_hears_of_what_it_enqueues_or_puts_back(trial: Trial) -> None:
    with _listening(trial) as queue:
        queue.enqueue("work")
        _hears(queue)
        (job,) = queue.claim()
        queue.fail(job, "again", retry_at=START)
        _hears(queue)
        queue.claim()
        queue.recover()
        _hears(queue)


def test_a_worker_hears_of_what_another_one_enqueues(trial: Trial) -> None:
    with _listening(trial) as queue:
        trial.enqueue(sequence="line")
        _hears(queue)
        assert queue.claim()


def test_a_worker_knows_when_the_next_job_is_due(trial: Trial) -> None:
    with _listening(trial) as queue:
        queue.enqueue("work", process_in=0.05)
        _hears(queue)
        assert queue.claim() == []
        assert queue.ready(timeout=30)
        trial.clock.advance(SECOND)
        assert queue.claim()


@contextmanager
def _listening(trial: Trial) -> Generator[Queue]:
    """A queue that hears of others, and has heard nothing."""
    with Queue(trial.cyclone, kinds=["work"]) as queue:
        assert queue.ready(timeout=30)  # its own connection is there
        _hush(queue)
        yield queue


def _hears(queue: Queue) -> None:
    assert queue.ready(timeout=30)
    _hush(queue)


def _hush(queue: Queue) -> None:
    """Until all calls have come that were under way: a watched file may tell twice of a commit."""
    while queue.ready(timeout=0.05):
        pass
