"""Sequences: the jobs of one key run one at a time, in the order in which they were enqueued."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from cyclone_sqla.testing.conformance.trial import KEY, START, Trial

HOUR = timedelta(hours=1)


# ---- the rule ------------------------------------------------------------------------------------


def test_the_jobs_of_a_key_run_one_at_a_time_in_enqueue_order(trial: Trial) -> None:
    ids = trial.line(5)
    order: list[int] = []
    while jobs := trial.queue.claim(limit=10):
        (job,) = jobs
        if len(ids) < 8:
            ids += trial.line(1)
        assert trial.other.claim(limit=10) == []
        trial.queue.complete(job)
        order.append(job.id)

    assert order == ids


def test_keys_and_jobs_without_one_do_not_block_each_other(trial: Trial) -> None:
    a, b, plain = trial.line(2, sequence="a"), trial.line(2, sequence="b"), trial.enqueue()

    assert {job.id for job in trial.queue.claim(limit=10)} == {a[0], b[0], plain}
    assert trial.queue.claim(limit=10) == []


def test_a_key_is_one_line_over_kinds_and_queues(trial: Trial) -> None:
    ids = [
        trial.enqueue("work", sequence=KEY, queue="left"),
        trial.enqueue("play", sequence=KEY, queue="right"),
        trial.enqueue("work", sequence=KEY, queue="right"),
    ]
    for expected in ids:
        (job,) = trial.queue.claim(["left", "right"], limit=10)
        assert job.id == expected
        trial.queue.complete(job)


def test_order_beats_priority_inside_a_key_and_priority_rules_between_keys(trial: Trial) -> None:
    ids = [trial.enqueue(sequence=KEY, priority=priority) for priority in (9, 0, -9)]
    other = trial.enqueue(sequence="other", priority=0)

    assert trial.drain() == [other, *ids]


def test_many_jobs_that_go_in_together_keep_their_order(trial: Trial) -> None:
    with trial.engine.begin() as connection:
        ids = [trial.cyclone.enqueue(connection, "work", {}, sequence=KEY).id for _ in range(4)]
    assert trial.drain() == ids


# ---- a head that is not over keeps its place -----------------------------------------------------


def _fail(trial: Trial) -> None:
    trial.queue.fail(trial.claim_one(), "down", retry_at=START + HOUR)


def _crash(trial: Trial) -> None:
    trial.claim_one()
    trial.clock.advance(HOUR)


def _recover(trial: Trial) -> None:
    trial.claim_one()
    trial.queue.recover()


@pytest.mark.parametrize("event", [_fail, _crash, _recover])
def test_a_head_that_will_run_again_keeps_its_place(
    trial: Trial, event: Callable[[Trial], None]
) -> None:
    ids = trial.line(3)
    event(trial)
    assert [trial.job(i).waits_for for i in ids[1:]] == ["turn", "turn"]
    assert trial.job(ids[0]).attempt == 1

    trial.clock.advance(HOUR)
    assert trial.drain() == ids


def test_a_delayed_job_holds_back_those_behind_it(trial: Trial) -> None:
    ids = trial.line(1, process_in=HOUR) + trial.line(1)
    assert trial.queue.claim(limit=10) == []

    trial.clock.advance(HOUR)
    assert trial.drain() == ids


def test_a_delay_that_is_over_before_the_turn_comes_costs_nothing(trial: Trial) -> None:
    first, second = trial.line(1)[0], trial.line(1, process_in=HOUR)[0]
    job = trial.claim_one()
    trial.clock.advance(HOUR)
    trial.queue.complete(job)

    assert (job.id, trial.job(second).state) == (first, "available")
    assert trial.claim_one().id == second


def test_a_turn_that_comes_before_the_time_makes_the_job_wait_for_its_time(trial: Trial) -> None:
    first, second = trial.line(1)[0], trial.line(1, process_in=HOUR)[0]
    assert trial.drain() == [first]
    assert (trial.job(second).state, trial.job(second).waits_for) == ("pending", "time")

    trial.clock.advance(HOUR)
    assert trial.drain() == [second]


@pytest.mark.parametrize("place", [0, 1])
def test_a_paused_job_keeps_its_place_and_is_what_the_line_waits_for(
    trial: Trial, place: int
) -> None:
    ids = trial.line(3)
    trial.act("pause", ids[place])
    assert trial.drain() == ids[:place]

    trial.act("resume", ids[place])
    assert trial.drain() == ids[place:]


# ---- positions -----------------------------------------------------------------------------------


def test_positions_that_arrive_out_of_order_run_in_order(trial: Trial) -> None:
    third, first, second = [trial.enqueue(sequence=KEY, position=place) for place in (3, 1, 2)]
    assert trial.drain() == [first, second, third]


def test_a_position_runs_only_after_the_one_before_was_released(trial: Trial) -> None:
    second = trial.enqueue(sequence=KEY, position=2)
    assert trial.queue.claim() == []

    first = trial.enqueue(sequence=KEY, position=1)
    job = trial.claim_one()
    assert job.id == first
    assert trial.other.claim() == []

    trial.queue.complete(job)
    assert trial.claim_one().id == second
