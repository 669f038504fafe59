"""Admission and hand-over between several connections, by script: each promise with the
interleaving that a weaker design breaks on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, OperationalError

from cyclone_sqla import JobSpec
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.errors import (
    DuplicatePositionError,
    InvalidTransitionError,
    SequenceGapError,
)
from cyclone_sqla.failures import Failure
from cyclone_sqla.lifecycle import State
from cyclone_sqla.operations import Retention, prune
from cyclone_sqla.outcomes import Discarded, Outcome
from cyclone_sqla.worker import admitter
from cyclone_sqla.worker.admitter import Admitter
from tests.races.actors import Application, Race, Worker, sqlstate
from tests.waiting import wait_until

BROKE = Failure.because("it broke", kind="Broken")
HOPELESS = Discarded(BROKE)

Act = Callable[[Application, int], Any]


def line(race: Race, count: int, key: str = "k", **options: Any) -> list[int]:
    """Committed jobs of a key that have their places."""
    application, worker = race.application(), race.worker()
    ids = [application.enqueue(key, **options) for _ in range(count)]
    application.commit()
    worker.settle_down()
    worker.close()
    return ids


def claimed(race: Race, worker: Worker) -> ClaimedJob:
    """The one claimable job, claimed and committed."""
    (job,) = worker.claim()
    worker.commit()
    return job


# ---- what somebody does to the next in line while its turn comes ---------------------------------

ON_THE_NEXT: dict[str, Act] = {
    "cancel": lambda person, job_id: person.act("cancel", job_id),
    "pause": lambda person, job_id: person.act("pause", job_id),
    "reschedule": lambda person, job_id: person.act("reschedule", job_id, process_in=0),
}


@pytest.mark.parametrize("ends_well", [True, False], ids=["commits", "rolls back"])
@pytest.mark.parametrize("verb", ON_THE_NEXT)
def test_whatever_happens_to_the_next_job_while_its_turn_comes_the_line_goes_on(
    race: Race, verb: str, ends_well: bool
) -> None:
    ids = line(race, 3)
    worker, person = race.worker(), race.application()
    job = claimed(race, worker)
    ON_THE_NEXT[verb](person, ids[1])

    assert worker.settle(job).states == {job.id: State.COMPLETED}
    worker.commit()
    race.check()
    (person.commit if ends_well else person.roll_back)()
    race.check()
    late = race.application()
    ids.append(late.enqueue("k"))
    late.commit()

    expected = {"cancel": ids[2:], "pause": [], "reschedule": ids[1:]}[verb]
    assert race.drain(worker) == (expected if ends_well else ids[1:])


def test_one_locked_row_of_one_key_holds_up_no_other_completion(race: Race) -> None:
    worker, person = race.worker(), race.application()
    lines = [line(race, 2, key=f"k{n}") for n in range(10)]
    jobs = worker.claim(10)
    worker.commit()
    assert len(jobs) == 10
    person.act("cancel", lines[3][1])

    settled = worker.settle(*jobs)
    worker.commit()

    assert len(settled.states) == 10
    available = [row.id for row in race.rows() if row.state == "available"]
    assert available == [second for _, second in lines if second != lines[3][1]]


def test_a_running_job_that_is_being_cancelled_is_busy_and_the_rest_of_its_batch_is_settled(
    race: Race,
) -> None:
    worker, person = race.worker(), race.application()
    first, second = line(race, 2, key="a")[0], line(race, 2, key="b")[0]
    jobs = worker.claim()
    worker.commit()
    person.act("cancel", first)

    settled = worker.settle(*jobs)
    worker.commit()
    assert (settled.busy, settled.states) == ([first], {second: State.COMPLETED})

    person.commit()
    again = worker.settle(*[job for job in jobs if job.id == first])
    worker.commit()
    assert again.states == {first: State.CANCELLED}


# ---- a turn is no claim --------------------------------------------------------------------------

NOT_NOW: dict[str, dict[str, Any]] = {
    "its time has not come": {"process_in": 3_600},
    "its queue is another worker's": {"queue": "elsewhere"},
    "its queue is paused": {},
    "its kind is not known here": {"kind": "of_another_application"},
}


@pytest.mark.parametrize("why", NOT_NOW)
def test_a_turn_that_comes_by_a_settle_starts_nothing_that_a_claim_would_not_start(
    race: Race, why: str
) -> None:
    (first,) = line(race, 1)
    worker, other, person = race.worker(), race.worker(), race.application()
    options = {"kind": "work", **NOT_NOW[why]}
    ref = race.cyclone.enqueue(person.connection, options.pop("kind"), {}, sequence="k", **options)
    person.commit()
    worker.settle_down()
    job = claimed(race, worker)
    if why == "its queue is paused":
        person.act("pause_queue", "default")
        person.commit()

    assert (job.id, worker.complete_and_claim([job], 5)) == (first, [])
    worker.commit()

    is_delayed = "process_in" in options
    assert race.state(ref.id) == ("pending/time" if is_delayed else "available")
    race.clock.advance(hours=2)
    other.settle_down()
    assert len(other.claim()) == is_delayed


def test_a_busy_key_lets_an_urgent_job_come_before_its_next(race: Race) -> None:
    ids = line(race, 3)
    worker, application = race.worker(), race.application()
    job = claimed(race, worker)
    urgent = application.enqueue(None, priority=-5)
    application.commit()

    (next_one,) = worker.complete_and_claim([job], 1, hands_over=False)
    worker.commit()
    assert next_one.id == urgent
    (after,) = worker.complete_and_claim([next_one], 1)
    assert after.id == ids[1]


# ---- incoming jobs -------------------------------------------------------------------------------


def test_an_admission_relies_on_no_first_job_that_it_could_not_lock(race: Race) -> None:
    application, person, worker = race.application(), race.application(), race.worker()
    ids = [application.enqueue("k") for _ in range(2)]
    application.commit()
    person.act("cancel", ids[0])

    assert worker.admit() == 0
    worker.commit()
    assert race.state(ids[1]) == "pending/admission"

    person.commit()
    assert race.drain(worker) == ids[1:]


def test_jobs_that_come_in_while_the_head_is_released_run_after_it(race: Race) -> None:
    ids = line(race, 1)
    settler, admitter, application = race.worker(), race.worker(), race.application()
    job = claimed(race, settler)
    settler.settle(job)
    ids.append(application.enqueue("k"))
    application.commit()

    assert admitter.admit() == 0
    admitter.commit()
    settler.commit()
    race.check()
    assert race.drain(admitter) == ids[1:]


def test_a_settle_that_meets_an_admission_of_its_key_comes_again_and_sees_the_new_job(
    race: Race,
) -> None:
    ids = line(race, 1)
    settler, admitter, application = race.worker(), race.worker(), race.application()
    job = claimed(race, settler)
    ids.append(application.enqueue("k"))
    application.commit()
    assert admitter.admit() == 1

    assert settler.settle(job).busy == [job.id]
    settler.commit()
    admitter.commit()
    assert settler.settle(job).states == {job.id: State.COMPLETED}
    settler.commit()
    assert race.state(ids[1]) == "available"


def test_an_enqueue_that_is_open_during_a_settle_is_admitted_later(race: Race) -> None:
    ids = line(race, 1)
    worker, application = race.worker(), race.application()
    job = claimed(race, worker)
    ids.append(application.enqueue("k"))
    worker.settle(job)
    worker.commit()
    worker.settle_down()
    application.commit()
    assert race.drain(worker) == ids[1:]


def test_an_enqueue_that_is_open_during_an_admission_is_admitted_later(race: Race) -> None:
    worker, slow, quick = race.worker(), race.application(), race.application()
    earlier = slow.enqueue("k")
    later = quick.enqueue("k")
    quick.commit()
    worker.admit()
    worker.commit()
    slow.commit()
    assert race.drain(worker) == [later, earlier]


def test_two_admissions_that_disagree_about_the_first_make_one_head(race: Race) -> None:
    """The one that saw less is refused by the database, and would simply be run again."""
    first_worker, second_worker = race.worker(), race.worker()
    slow, quick = race.application(), race.application()
    earlier = slow.enqueue("k")
    later = quick.enqueue("k")
    quick.commit()
    assert first_worker.admit() == 1
    slow.commit()

    with pytest.raises(OperationalError) as caught:
        second_worker.admit()
    assert race.dialect.is_passing(caught.value)
    second_worker.roll_back()
    first_worker.commit()
    assert second_worker.admit() == 1
    second_worker.commit()
    assert race.drain(first_worker) == [later, earlier]


def test_a_key_whose_head_is_locked_hides_no_other_key(race: Race) -> None:
    ids = line(race, 1, key="hot")
    application, person, worker = race.application(), race.application(), race.worker()
    person.act("pause", ids[0])
    hot = [application.enqueue("hot") for _ in range(5)]
    cold = application.enqueue("cold")
    application.commit()

    assert worker.admit(limit=3) == 0
    assert worker.admit(after=hot[2], limit=3) == 1
    worker.commit()
    assert race.state(cold) == "available"


@contextmanager
def admitter_of(race: Race, on_admitted: Callable[[], None] = lambda: None) -> Generator[Admitter]:
    """What a worker's stager admits with."""
    with closing(race.dialect.hold(race.worker_engine, race.settings)) as held:
        yield Admitter(race.dialect, held, on_admitted)


def test_a_worker_gets_past_the_incoming_jobs_of_a_key_that_is_locked_and_comes_back(
    race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admitter, "WINDOW", 3)
    (head,) = line(race, 1, key="hot")
    application, person = race.application(), race.application()
    person.act("pause", head)
    hot = [application.enqueue("hot") for _ in range(7)]
    cold = application.enqueue("cold")
    application.commit()

    with admitter_of(race) as looks:
        assert [looks.admit() for _ in range(2)] == [0.0, 0.0]
        assert looks.admit() is not None
        assert race.state(cold) == "available"
        assert {race.state(job_id) for job_id in hot} == {"pending/admission"}
        person.commit()
        while looks.admit() is not None:
            pass
    assert {race.state(job_id) for job_id in hot} == {"pending/turn"}


def test_an_admission_that_meets_another_one_is_run_again_without_a_word(
    race: Race, caplog: pytest.LogCaptureFixture
) -> None:
    """It saw another first job than the present head; its other keys lose nothing."""
    other = race.worker()
    slow, quick = race.application(), race.application()
    earlier = slow.enqueue("k")
    later = quick.enqueue("k")
    quick.commit()
    assert other.admit() == 1
    slow.commit()
    stranger = quick.enqueue("stranger")
    quick.commit()

    def end_the_other_one() -> None:
        wait_until(lambda: waits_for_a_lock(race), "one waits for the place in the index")
        other.commit()

    thread = threading.Thread(target=end_the_other_one)
    thread.start()
    with admitter_of(race) as looks, caplog.at_level(logging.INFO):
        looks.admit()
    thread.join(30)

    assert caplog.records == []
    assert [race.state(i) for i in (later, earlier, stranger)] == [
        "available", "pending/turn", "available",
    ]  # fmt: skip


def test_a_paused_head_lets_its_followers_take_their_places(race: Race) -> None:
    ids = line(race, 1)
    person, worker = race.application(), race.worker()
    person.act("pause", ids[0])
    ids += [person.enqueue("k") for _ in range(5)]
    person.commit()
    worker.settle_down()
    assert {race.state(job_id) for job_id in ids[1:]} == {"pending/turn"}
    person.act("resume", ids[0])
    person.commit()
    assert race.drain(worker) == ids


# ---- isolation levels ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("verb", ["cancel", "skip"])
def test_a_release_in_a_transaction_with_an_old_snapshot_forgets_no_follower(
    race: Race, verb: str, level: str
) -> None:
    (head,) = line(race, 1, on_failure="halt" if verb == "skip" else "skip")
    worker, application, person = race.worker(), race.application(), race.application(level)
    if verb == "skip":
        worker.settle(claimed(race, worker), outcome=HOPELESS)
        worker.commit()
    person.look()
    follower = application.enqueue("k")
    application.commit()
    worker.settle_down()
    assert race.state(follower) == "pending/turn"

    person.act(verb, head)
    person.commit()
    race.check()
    assert race.drain(worker) == [follower]


def let_a_follower_in(race: Race, ids: list[int]) -> Callable[[], None]:
    """Enqueue a job to key "b" and have it admitted, all committed."""

    def act() -> None:
        application, admitter = race.application(), race.worker()
        ids.append(application.enqueue("b"))
        application.commit()
        admitter.admit()
        admitter.commit()
        assert race.state(ids[-1]) == "pending/turn"

    return act


def settle_with_a_follower_between(race: Race) -> list[int]:
    """Two heads end in one transaction; behind the second one a job gets its turn in between."""
    line(race, 1, key="a")
    line(race, 1, key="b")
    worker = race.worker()
    first, second = sorted(worker.claim(), key=lambda job: job.id)
    worker.commit()
    ends: list[tuple[ClaimedJob, Outcome]] = [(second, HOPELESS)]
    followers: list[int] = []
    worker.settle(first)
    let_a_follower_in(race, followers)()
    worker.settle_all(ends)
    worker.commit()
    return followers


def test_a_worker_reads_anew_in_every_statement_whatever_the_servers_default(race: Race) -> None:
    make_strict(race)
    followers = settle_with_a_follower_between(race)
    race.check()
    assert race.drain(race.worker()) == followers


def make_strict(race: Race) -> None:
    """New connections are REPEATABLE READ unless they say otherwise."""
    with race.engine.begin() as connection:
        name = connection.scalar(sa.text("SELECT quote_ident(current_database())"))
        connection.exec_driver_sql(
            f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'"
        )
    race.engine.dispose()
    race.worker_engine.dispose()


# ---- leases --------------------------------------------------------------------------------------


def test_a_replayed_job_has_a_lease_that_no_earlier_run_of_its_key_had(race: Race) -> None:
    ids = line(race, 2, max_attempts=1)
    worker, person = race.worker(), race.application()
    zombie = claimed(race, worker)
    race.clock.advance(minutes=2)
    worker.rescue()
    worker.commit()
    second = claimed(race, worker)
    person.act("replay", ids[0])
    person.commit()
    worker.settle_down()
    worker.settle(second)
    worker.commit()
    again = claimed(race, worker)

    assert again.id == zombie.id
    assert again.lease > second.lease > zombie.lease
    assert worker.settle(zombie).refused == {zombie.id: None}
    worker.commit()
    assert race.state(again.id) == "running"


def test_a_settle_and_a_rescue_of_one_run_have_one_winner_and_one_follower(race: Race) -> None:
    ids = line(race, 2, max_attempts=1)
    settler, rescuer = race.worker(), race.worker()
    job = claimed(race, settler)
    race.clock.advance(minutes=2)
    settler.settle(job)

    assert rescuer.rescue().busy == [job.id]
    rescuer.commit()
    settler.commit()
    assert rescuer.rescue().states == {}
    rescuer.commit()
    assert [race.state(i) for i in ids] == ["completed", "available"]


def test_a_settle_that_comes_after_a_rescue_at_the_limit_moves_nobody(race: Race) -> None:
    ids = line(race, 3, max_attempts=1)
    settler, rescuer = race.worker(), race.worker()
    job = claimed(race, settler)
    race.clock.advance(minutes=2)
    rescuer.rescue()

    assert settler.settle(job).busy == [job.id]
    settler.commit()
    rescuer.commit()
    assert settler.settle(job).refused == {job.id: State.DISCARDED}
    settler.commit()
    assert [race.state(i) for i in ids] == ["discarded", "available", "pending/turn"]


def test_a_refused_settle_brings_no_turn_while_another_run_goes_on(race: Race) -> None:
    ids = line(race, 2)
    worker = race.worker()
    late = claimed(race, worker)
    race.clock.advance(minutes=2)
    worker.rescue()
    worker.commit()
    claimed(race, worker)

    assert worker.settle(late).refused == {late.id: None}
    worker.commit()
    assert [race.state(i) for i in ids] == ["running", "pending/turn"]


def test_a_late_settle_gives_no_turn_to_an_earlier_job_while_the_head_runs_elsewhere(
    race: Race,
) -> None:
    """In one round trip with others, whose places are handed on."""
    slow, quick = race.application(), race.application()
    worker, other = race.worker(), race.worker()
    earlier = slow.enqueue("k")
    head = quick.enqueue("k")
    strangers = [quick.enqueue("stranger") for _ in range(2)]
    quick.commit()
    worker.settle_down()
    late, stranger = sorted(worker.claim(), key=lambda job: job.id)
    worker.commit()
    slow.commit()
    worker.settle_down()
    race.clock.advance(minutes=2)
    other.rescue()
    other.commit()
    other.claim()
    other.commit()
    (again,) = [row for row in race.rows("stranger") if row.state == "running"]
    assert (late.id, stranger.id) == (head, strangers[0])
    assert again.lease > stranger.lease

    assert worker.complete_and_claim([late, stranger], 5) == []
    worker.commit()

    race.check()
    states = [race.state(job_id) for job_id in (earlier, head, *strangers)]
    assert states == ["pending/turn", "running", "running", "pending/turn"]


# ---- replay --------------------------------------------------------------------------------------


def test_a_replay_that_is_open_during_an_admission_and_a_settle_is_the_next_head(
    race: Race,
) -> None:
    ids = line(race, 3)
    worker, person = race.worker(), race.application()
    worker.settle(claimed(race, worker), outcome=HOPELESS)
    worker.commit()
    running = claimed(race, worker)
    person.act("replay", ids[0])
    worker.settle_down()
    person.commit()
    worker.settle(running)
    worker.commit()
    race.check()
    assert race.drain(worker) == [ids[0], ids[2]]


def test_a_replay_of_a_head_whose_debt_is_being_paid_waits_and_comes_back_in_line(
    race: Race,
) -> None:
    ids = line(race, 3)
    worker, person = race.worker(), race.application()
    person.act("cancel", ids[0])
    person.commit()
    worker.pay()
    with pytest.raises(OperationalError):
        person.act("replay", ids[0])
    person.roll_back()
    worker.commit()
    assert race.state(ids[1]) == "available"
    person.act("replay", ids[0])
    person.commit()
    assert race.state(ids[0]) == "pending/admission"
    assert race.drain(worker) == [ids[1], ids[0], ids[2]]


def test_a_debt_that_is_being_replayed_is_not_paid(race: Race) -> None:
    ids = line(race, 2)
    worker, person = race.worker(), race.application()
    person.act("cancel", ids[0])
    person.commit()
    person.act("replay", ids[0])
    worker.settle_down()
    person.commit()
    race.check()
    assert race.drain(worker) == ids


def test_retention_never_deletes_a_job_that_is_being_replayed(race: Race) -> None:
    ids = line(race, 1, on_failure="skip")
    worker, person = race.worker(), race.application()
    worker.settle(claimed(race, worker), outcome=HOPELESS)
    worker.commit()
    race.clock.advance(minutes=5)
    person.act("replay", ids[0])
    retention = Retention(State.DISCARDED, timedelta(0))
    assert prune(worker.connection, race.dialect, retention, None, 100) is None
    worker.commit()
    person.commit()
    assert race.drain(worker) == ids


# ---- cancel --------------------------------------------------------------------------------------


def test_a_job_that_is_being_cancelled_is_not_claimed(race: Race) -> None:
    ids = line(race, 2)
    worker, person = race.worker(), race.application()
    person.act("cancel", ids[0])
    assert worker.claim() == []
    worker.commit()
    person.commit()
    assert race.drain(worker) == ids[1:]


def test_a_job_that_is_being_claimed_is_asked_to_stop(race: Race) -> None:
    ids = line(race, 2)
    worker, person = race.worker(), race.application()
    started = threading.Event()
    (job,) = worker.claim()

    def cancel() -> None:
        person.connection.exec_driver_sql("SET LOCAL lock_timeout = '30s'")
        started.set()
        person.act("cancel", ids[0])
        person.commit()

    thread = threading.Thread(target=cancel)
    thread.start()
    assert started.wait(30)
    worker.commit()
    thread.join(30)
    assert not thread.is_alive()

    assert race.state(ids[0]) == "running"
    assert worker.settle(job).states == {job.id: State.CANCELLED}
    worker.commit()
    assert race.state(ids[1]) == "available"


def test_a_lapsed_run_that_was_asked_to_stop_ends_as_cancelled(race: Race) -> None:
    ids = line(race, 2)
    worker, person = race.worker(), race.application()
    claimed(race, worker)
    person.act("cancel", ids[0])
    person.commit()
    race.clock.advance(minutes=2)
    assert worker.rescue().states == {ids[0]: State.CANCELLED}
    worker.commit()
    assert race.state(ids[1]) == "available"


def test_a_worker_is_never_in_a_deadlock_with_people_who_lock_in_another_order(
    race: Race,
) -> None:
    """A person has a waiting job and then wants the head, which a settle has released already."""
    ids = line(race, 3)
    worker, person = race.worker(), race.application()
    job = claimed(race, worker)
    person.act("cancel", ids[1])
    assert worker.settle(job).states == {job.id: State.COMPLETED}
    refused: list[BaseException] = []

    def want_the_head() -> None:
        person.connection.exec_driver_sql("SET LOCAL lock_timeout = '30s'")
        try:
            person.act("cancel", ids[0])
        except InvalidTransitionError as exc:
            refused.append(exc)
        person.commit()

    thread = threading.Thread(target=want_the_head)
    thread.start()
    wait_until(lambda: waits_for_a_lock(race), "the person waits for the worker")
    worker.commit()
    thread.join(30)
    assert not thread.is_alive()

    assert len(refused) == 1
    assert race.state(ids[1]) == "cancelled"
    assert race.drain(worker) == ids[2:]


def waits_for_a_lock(race: Race) -> bool:
    """Whether anybody in this database waits for a row."""
    waiting = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with race.database.engine().connect() as connection:
        return bool(connection.scalar(sa.text(waiting)))


# ---- explicit positions --------------------------------------------------------------------------


def test_two_transactions_want_one_position_and_the_second_is_told_who_has_it(race: Race) -> None:
    one, other = race.application(), race.application()
    holder = one.enqueue("k", position=1)
    told: list[DuplicatePositionError] = []

    def want_it_too() -> None:
        other.connection.exec_driver_sql("SET LOCAL lock_timeout = '30s'")
        with pytest.raises(DuplicatePositionError) as caught:
            other.enqueue("k", position=1)
        told.append(caught.value)
        other.enqueue("k", position=2)
        other.commit()

    thread = threading.Thread(target=want_it_too)
    thread.start()
    wait_until(lambda: waits_for_a_lock(race), "the second waits for the first")
    one.commit()
    thread.join(30)
    assert not thread.is_alive()

    assert [(error.key, error.position, error.job_id) for error in told] == [("k", 1, holder)]
    assert [row.position for row in race.rows("k")] == [1, 2]


def test_reject_gap_judges_by_what_is_committed(race: Race) -> None:
    one, other, worker = race.application(), race.application(), race.worker()
    one.enqueue("k", position=1)
    one.commit()
    one.enqueue("k", position=2)
    with pytest.raises(SequenceGapError):
        other.enqueue("k", position=3, reject_gap=True)
    one.commit()
    other.enqueue("k", position=3, reject_gap=True)
    other.commit()
    assert len(race.drain(worker)) == 3


def test_a_position_that_fills_a_gap_while_the_one_before_ends_is_the_next_head(
    race: Race,
) -> None:
    application, worker, late = race.application(), race.worker(), race.application()
    ids = {n: application.enqueue("k", position=n) for n in (1, 3)}
    application.commit()
    worker.settle_down()
    job = claimed(race, worker)
    ids[2] = late.enqueue("k", position=2)
    worker.settle(job)
    worker.commit()
    race.check()
    assert race.drain(worker) == []
    late.commit()
    assert race.drain(worker) == [ids[2], ids[3]]


# ---- enqueue never waits -------------------------------------------------------------------------


def test_enqueues_in_open_transactions_never_wait_for_each_other_nor_for_a_worker(
    race: Race,
) -> None:
    line(race, 2, key="A")
    line(race, 2, key="B")
    one, other, worker = race.application(), race.application(), race.worker()
    jobs = worker.claim()
    worker.settle(*jobs)
    worker.admit()

    one.enqueue("A")
    other.enqueue("B")
    one.enqueue("B")
    other.enqueue("A")
    for application in (other, one):
        application.commit()
    worker.commit()
    assert len(race.drain(worker)) == 6


def test_a_unique_conflict_under_a_snapshot_leaves_the_transaction_usable(race: Race) -> None:
    one, other = race.application(), race.application("REPEATABLE READ")
    other.look()
    one.enqueue("k", unique="u")
    one.commit()
    with pytest.raises(DBAPIError) as caught:
        other.enqueue("k", unique="u")
    assert sqlstate(caught.value) == "40001"
    kept = other.enqueue("k")
    other.commit()
    assert kept in [row.id for row in race.rows()]


def test_bulk_enqueues_of_the_same_unique_keys_in_opposite_order_never_deadlock(
    race: Race,
) -> None:
    barrier, errors = threading.Barrier(2), []
    keys = [f"u{n}" for n in range(500)]

    def enqueue(order: list[str]) -> None:
        specs = [
            JobSpec(kind="work", arguments="{}", unique=key, on_duplicate="return") for key in order
        ]
        engine = race.database.engine()
        barrier.wait(30)
        try:
            with engine.begin() as connection:
                race.cyclone.enqueue_many(connection, specs)
        except DBAPIError as exc:
            errors.append(exc)

    threads = [threading.Thread(target=enqueue, args=(order,)) for order in (keys, keys[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


# ---- the order of transactions -------------------------------------------------------------------


def test_what_was_committed_before_another_enqueue_was_called_runs_before_it(race: Race) -> None:
    one, other, worker = race.application(), race.application(), race.worker()
    ids = []
    for application in (one, other, one, other):
        ids.append(application.enqueue("k"))
        application.commit()
    assert race.drain(worker) == ids


@pytest.mark.parametrize("second_first", [False, True], ids=["in order", "crosswise"])
def test_transactions_that_overlap_run_by_position_once_both_are_committed(
    race: Race, second_first: bool
) -> None:
    one, other, worker = race.application(), race.application(), race.worker()
    ids = [one.enqueue("k"), other.enqueue("k"), one.enqueue("k")]
    for application in (other, one) if second_first else (one, other):
        application.commit()
    assert race.drain(worker) == ids


def test_a_transaction_that_rolls_back_leaves_no_gap_to_wait_for(race: Race) -> None:
    one, other, worker = race.application(), race.application(), race.worker()
    one.enqueue("k")
    kept = other.enqueue("k")
    other.commit()
    assert race.drain(worker) == [kept]
    one.roll_back()
    assert race.drain(worker) == []


def test_with_a_sequence_lock_the_order_is_that_of_the_commits(race: Race) -> None:
    one, other, worker = race.application(), race.application(), race.worker()
    first = one.enqueue("k", sequence_lock=True)
    with pytest.raises(OperationalError) as caught:
        other.enqueue("k", sequence_lock=True)
    assert sqlstate(caught.value) == "55P03"
    other.roll_back()
    assert other.enqueue("another", sequence_lock=True)
    other.roll_back()
    one.commit()
    second = other.enqueue("k", sequence_lock=True)
    other.commit()
    assert race.drain(worker) == [first, second]


# ---- pause of a sequence -------------------------------------------------------------------------


def test_a_pause_locks_the_head_that_is_the_present_one(race: Race) -> None:
    ids = line(race, 3)
    worker, person = race.worker(), race.application()
    job = claimed(race, worker)
    person.act("pause_sequence", "k")
    assert worker.settle(job).busy == [job.id]
    worker.commit()
    person.commit()
    worker.settle(job)
    worker.commit()
    assert [race.state(i) for i in ids] == ["completed", "pending/turn", "pending/turn"]
    assert race.drain(worker) == []


def test_a_head_made_while_a_resume_is_not_committed_is_let_go(race: Race) -> None:
    person, application, worker = race.application(), race.application(), race.worker()
    person.act("pause_sequence", "k")
    person.commit()
    person.act("resume_sequence", "k")
    job_id = application.enqueue("k")
    application.commit()
    worker.settle_down()
    assert race.state(job_id) == "pending/turn"
    person.commit()
    assert race.drain(worker) == [job_id]


def test_a_pause_of_a_numbered_key_holds_up_no_settle_of_another(race: Race) -> None:
    application, person = race.application(), race.application()
    worker = race.worker()
    application.enqueue("n", position=1)
    application.enqueue("n", position=2)
    application.commit()
    worker.settle_down()
    job = claimed(race, worker)
    with race.engine.connect() as other, other.begin():
        other.execute(sa.text("UPDATE cyclone_sequence SET paused_by = 'x' WHERE key = 'n'"))
        assert worker.settle(job).states == {job.id: State.COMPLETED}
        worker.commit()
    person.commit()
    assert len(race.drain(worker)) == 1


def test_a_job_of_a_sequence_whose_pause_is_committed_does_not_start(race: Race) -> None:
    """It got its place while the pause was not committed yet, and there was no head to lock."""
    person, application, worker = race.application(), race.application(), race.worker()
    person.act("pause_sequence", "k")
    job_id = application.enqueue("k")
    application.commit()
    worker.settle_down()
    person.commit()
    assert race.drain(worker) == []
    person.act("resume_sequence", "k")
    person.commit()
    assert race.drain(worker) == [job_id]
