"""Runs that are asked to stop: what they see, how they end, and that a slot is kept until then."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cyclone_sqla import Context
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.outcomes import CancelledOutcome, Completed, Discarded, Outcome, Retried
from cyclone_sqla.worker.runs import Interruption
from tests.waiting import wait_until
from tests.worker.stage import (
    FLAVOURS,
    PATIENCE,
    Flavour,
    Held,
    Obedient,
    Stage,
    flavoured,
    opened,
    seconds,
)

every_flavour = pytest.mark.parametrize("flavour", FLAVOURS)

SOON = 0.02
"""A timeout that a test waits for."""


@pytest.fixture
def stage() -> Iterator[Stage]:
    with opened() as stage:
        yield stage


def _fails(_: Context) -> None:
    raise ValueError("while stopping")


def _interrupt(stage: Stage, job: ClaimedJob, why: Interruption = Interruption.CANCELLED) -> None:
    assert stage.executor.cancel(job.id, job.lease, why)


# --- timeouts


@every_flavour
def test_a_run_that_stops_at_its_timeout_failed(stage: Stage, flavour: Flavour) -> None:
    outcome = stage.outcome(Obedient(flavour).fn, timeout=SOON, backoff=7)

    assert isinstance(outcome, Retried)
    assert outcome.failure.error == "TimeoutError: timed out after 0.02 s"
    assert outcome.delay == seconds(7)


@every_flavour
def test_a_timeout_says_where_the_run_was(stage: Stage, flavour: Flavour) -> None:
    action = Obedient(flavour)
    job = stage.start(action.fn, timeout=3600)
    action.wait_begun()
    _interrupt(stage, job, Interruption.TIMED_OUT)

    outcome = stage.wait(job).outcome

    assert isinstance(outcome, Retried)
    (cause,) = json.loads(outcome.failure.details)["causes"]
    assert "stage.py" in "".join(cause["traceback"])


@every_flavour
def test_the_last_attempt_that_times_out_is_discarded(stage: Stage, flavour: Flavour) -> None:
    outcome = stage.outcome(Obedient(flavour).fn, timeout=SOON, job={"max_attempts": 1})

    assert isinstance(outcome, Discarded)
    assert "timed out after 0.02 s (attempt 1 of 1, none left)" in outcome.failure.error


@every_flavour
def test_discard_on_sees_a_timeout(stage: Stage, flavour: Flavour) -> None:
    outcome = stage.outcome(Obedient(flavour).fn, timeout=SOON, discard_on=TimeoutError)

    assert isinstance(outcome, Discarded)


@every_flavour
def test_the_timeout_of_the_job_beats_that_of_its_action(stage: Stage, flavour: Flavour) -> None:
    shorter = stage.outcome(Obedient(flavour).fn, timeout=3600, job={"timeout": seconds(SOON)})
    assert isinstance(shorter, Retried)
    assert "timed out after 0.02 s" in shorter.failure.error

    held = Held(flavour)
    job = stage.start(held.fn, timeout=SOON, job={"timeout": seconds(3600)})
    held.wait_begun()
    _outlast(stage, SOON)
    held.release.set()
    assert stage.wait(job).outcome == Completed('"released"')
    assert held.told == [False], "nobody asked it to stop"


def _outlast(stage: Stage, timeout: float) -> None:
    """Return when another run with this timeout, begun now, has been stopped by it."""
    assert isinstance(stage.outcome(Obedient("sync").fn, timeout=timeout), Retried)


@every_flavour
def test_a_run_that_outlives_its_timeout_keeps_its_slot_and_its_outcome_counts(
    stage: Stage, flavour: Flavour
) -> None:
    held = Held(flavour)
    job = stage.start(held.fn, timeout=3600)
    held.wait_begun()
    _interrupt(stage, job, Interruption.TIMED_OUT)
    _outlast(stage, SOON)

    assert not stage.is_finished(job)
    assert job in stage.executor.running()

    held.release.set()
    assert stage.wait(job).outcome == Completed('"released"')
    assert held.told == [True], "it was asked to stop, and didn't"
    wait_until(lambda: not stage.executor.running(), "its slot is free")


@every_flavour
def test_a_run_that_fails_after_its_timeout_failed_for_its_own_reason(
    stage: Stage, flavour: Flavour
) -> None:
    outcome = _interrupted_and_released(stage, flavour, Interruption.TIMED_OUT, _fails)

    assert isinstance(outcome, Retried)
    assert outcome.failure.error == "ValueError: while stopping"


def _interrupted_and_released(
    stage: Stage, flavour: Flavour, why: Interruption, then: Callable[[Context], Any]
) -> Outcome:
    """How a run ends that was told to stop, went on all the same, and only then did ``then``."""
    held = Held(flavour, then)
    job = stage.start(held.fn, timeout=3600)
    held.wait_begun()
    _interrupt(stage, job, why)
    held.release.set()
    outcome = stage.wait(job).outcome
    assert held.told == [True]
    return outcome


@every_flavour
def test_a_run_within_its_timeout_is_left_alone(stage: Stage, flavour: Flavour) -> None:
    told: list[bool] = []
    fn = flavoured(flavour, lambda ctx: told.append(ctx.cancelled))

    assert stage.outcome(fn, timeout=3600) == Completed()
    assert told == [False]


def test_no_run_is_stopped_before_its_own_timeout(stage: Stage) -> None:
    spared: dict[float, float] = {}

    def action(ctx: Context) -> None:
        began = time.monotonic()
        assert ctx.wait_cancelled(PATIENCE)
        assert ctx.job.timeout is not None
        limit = ctx.job.timeout.total_seconds()
        spared[limit] = time.monotonic() - began

    kind = stage.register(action)
    limits = [0.3, 0.05, 0.2, 0.1, 0.25]
    jobs = [stage.claimed(kind, timeout=seconds(limit)) for limit in limits]
    stage.executor.start_runs(jobs)

    assert [stage.wait(job).outcome for job in jobs] == [Completed()] * 5
    # The clock of the run starts a moment before its action does.
    assert all(took > limit - 0.05 for limit, took in spared.items())


def test_a_sync_timeout_is_told_though_the_event_loop_is_blocked(stage: Stage) -> None:
    unblock = threading.Event()

    async def blocks_the_loop() -> None:
        unblock.wait(PATIENCE)

    blocking = stage.start(blocks_the_loop)
    outcome = stage.outcome(Obedient("sync").fn, timeout=SOON)
    unblock.set()

    assert isinstance(outcome, Retried)
    assert stage.wait(blocking).outcome == Completed()


# --- deadlines


@every_flavour
def test_a_run_that_stops_at_its_deadline_is_discarded_as_expired(
    stage: Stage, flavour: Flavour
) -> None:
    outcome = stage.outcome(Obedient(flavour).fn, timeout=3600, job={"time_left": seconds(SOON)})

    assert isinstance(outcome, Discarded)
    assert outcome.failure.error == "Expired: its deadline has passed"


@every_flavour
def test_a_run_that_fails_after_its_deadline_is_not_tried_again(
    stage: Stage, flavour: Flavour
) -> None:
    outcome = _interrupted_and_released(stage, flavour, Interruption.EXPIRED, _fails)

    assert isinstance(outcome, Discarded)
    assert outcome.failure.error == "Expired: its deadline has passed"
    assert "while stopping" in outcome.failure.details


@every_flavour
def test_a_run_that_completes_after_its_deadline_is_completed(
    stage: Stage, flavour: Flavour
) -> None:
    outcome = _interrupted_and_released(stage, flavour, Interruption.EXPIRED, lambda _: 3)

    assert outcome == Completed("3")


@every_flavour
def test_the_earlier_of_timeout_and_deadline_decides(stage: Stage, flavour: Flavour) -> None:
    outcome = stage.outcome(Obedient(flavour).fn, timeout=SOON, job={"time_left": seconds(3600)})

    assert isinstance(outcome, Retried)
    assert "timed out" in outcome.failure.error


# --- cancellation


@every_flavour
def test_a_run_that_stops_when_cancelled_is_cancelled(stage: Stage, flavour: Flavour) -> None:
    action = Obedient(flavour)
    job = stage.start(action.fn)
    action.wait_begun()

    _interrupt(stage, job)

    outcome = stage.wait(job).outcome
    assert isinstance(outcome, CancelledOutcome)
    assert outcome.failure is not None
    assert outcome.failure.error == "Cancelled: cancellation was asked for"


@every_flavour
@pytest.mark.parametrize(
    ("then", "expected"), [(lambda _: 3, Completed), (_fails, Retried)], ids=["returns", "raises"]
)
def test_a_run_that_ignores_its_cancellation_tells_how_it_ended(
    stage: Stage, flavour: Flavour, then: Callable[[Context], Any], expected: type
) -> None:
    outcome = _interrupted_and_released(stage, flavour, Interruption.CANCELLED, then)

    assert isinstance(outcome, expected)


def test_a_run_cancelled_before_it_begins_does_not_run() -> None:
    calls: list[Context] = []
    with opened(max_threads=1) as stage:
        held = Held("sync")
        first = stage.start(held.fn)
        held.wait_begun()
        second = stage.start(flavoured("sync", calls.append))

        _interrupt(stage, second)
        held.release.set()

        assert isinstance(stage.wait(second).outcome, CancelledOutcome)
        assert isinstance(stage.wait(first).outcome, Completed)
    assert calls == []


def test_a_task_cancelled_before_its_first_step_does_not_run(stage: Stage) -> None:
    unblock = threading.Event()
    calls: list[Context] = []

    async def blocks_the_loop() -> None:
        unblock.wait(PATIENCE)

    blocking = stage.start(blocks_the_loop)
    job = stage.start(flavoured("async", calls.append))
    _interrupt(stage, job)
    unblock.set()

    assert isinstance(stage.wait(job).outcome, CancelledOutcome)
    assert stage.wait(blocking).outcome == Completed()
    assert calls == []


@pytest.mark.parametrize("loop_runs_before", [True, False])
def test_a_coroutine_cancelled_before_its_first_step_is_cancelled(
    stage: Stage, loop_runs_before: bool
) -> None:
    """A plain function returns it, so at the time of the cancellation there is no task yet."""

    async def endless() -> None:
        await asyncio.sleep(PATIENCE)

    def wrapper(ctx: Context) -> Any:
        _interrupt(stage, ctx.job)
        return endless()

    if loop_runs_before:
        stage.outcome(flavoured("async", lambda _: None))

    assert isinstance(stage.outcome(wrapper), CancelledOutcome)


@every_flavour
def test_a_lost_lease_stops_the_run_and_its_outcome_is_reported(
    stage: Stage, flavour: Flavour
) -> None:
    action = Obedient(flavour)
    job = stage.start(action.fn)
    action.wait_begun()

    _interrupt(stage, job, Interruption.LEASE_LOST)

    outcome = stage.wait(job).outcome
    assert isinstance(outcome, Retried)
    assert outcome.failure.error == "LeaseLostError: its lease was lost"


@every_flavour
def test_only_the_run_with_the_lease_is_cancelled(stage: Stage, flavour: Flavour) -> None:
    old, new = Held(flavour), Held(flavour)
    first = stage.start(old.fn, job={"id": 7, "lease": 1})
    second = stage.start(new.fn, job={"id": 7, "lease": 2})
    old.wait_begun()
    new.wait_begun()
    assert stage.executor.running() == [first, second]

    _interrupt(stage, first, Interruption.LEASE_LOST)
    assert not stage.executor.cancel(7, 3, Interruption.CANCELLED)
    old.release.set()
    new.release.set()

    assert stage.wait(first).outcome == stage.wait(second).outcome == Completed('"released"')
    assert (old.told, new.told) == ([True], [False])


def test_a_finished_run_cannot_be_cancelled(stage: Stage) -> None:
    job = stage.start(flavoured("sync", lambda _: None))
    stage.wait(job)
    wait_until(lambda: not stage.executor.running(), "the run is forgotten")

    assert not stage.executor.cancel(job.id, job.lease, Interruption.CANCELLED)


def test_clean_up_after_a_cancellation_is_not_cancelled_again(stage: Stage) -> None:
    begun, cleaning, clean = threading.Event(), threading.Event(), threading.Event()

    async def action() -> None:
        begun.set()
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            cleaning.set()
            await asyncio.sleep(0.05)
            clean.set()

    job = stage.start(action)
    assert begun.wait(PATIENCE)
    _interrupt(stage, job)
    assert cleaning.wait(PATIENCE)
    for _ in range(5):
        stage.executor.cancel(job.id, job.lease, Interruption.CANCELLED)

    assert isinstance(stage.wait(job).outcome, CancelledOutcome)
    assert clean.is_set()


def test_a_run_that_clings_to_life_is_told_each_reason_once(stage: Stage) -> None:
    caught: list[str] = []
    begun, release = threading.Event(), threading.Event()

    async def action() -> None:
        begun.set()
        while not release.is_set():
            try:
                await asyncio.sleep(0.002)
            except asyncio.CancelledError as exc:
                caught.append(str(exc))

    job = stage.start(action)
    assert begun.wait(PATIENCE)
    for reason in (Interruption.CANCELLED, Interruption.LEASE_LOST, Interruption.CANCELLED):
        told = len(caught)
        _interrupt(stage, job, reason)
        if told < 2:
            wait_until(lambda told=told: len(caught) > told, "the action is told")
    release.set()

    assert stage.wait(job).outcome == Completed()
    assert caught == [Interruption.CANCELLED.value, Interruption.LEASE_LOST.value]


def test_an_action_that_cancels_itself_failed(stage: Stage) -> None:
    async def action() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(PATIENCE)

    outcome = stage.outcome(action)

    assert isinstance(outcome, Retried)
    assert outcome.failure.error.startswith("asyncio.exceptions.CancelledError")


def test_an_action_that_cancels_itself_and_returns_is_completed(stage: Stage) -> None:
    async def action() -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return 3

    assert stage.outcome(action) == Completed("3")


def test_cancelling_one_task_leaves_the_others_alone(stage: Stage) -> None:
    victim, others = Obedient("async"), [Held("async") for _ in range(5)]
    jobs = [stage.start(held.fn) for held in others]
    cancelled = stage.start(victim.fn)
    victim.wait_begun()

    _interrupt(stage, cancelled)

    assert isinstance(stage.wait(cancelled).outcome, CancelledOutcome)
    for held, job in zip(others, jobs, strict=True):
        held.release.set()
        assert stage.wait(job).outcome == Completed('"released"')
        assert held.told == [False]


# --- all at once


def test_every_run_has_exactly_one_outcome_in_any_interleaving() -> None:
    """Runs that return, raise, time out and cling on, interrupted at random from two threads."""
    dice = random.Random(7)
    with opened(max_threads=8) as stage:
        kinds = [stage.register(fn, timeout=0.001) for fn in _unsteady(dice)]
        endings = [json.dumps({"ends": ends}) for ends in ("well", "badly", "clings", "obeys")]
        jobs = [
            stage.claimed(dice.choice(kinds), arguments=dice.choice(endings)) for _ in range(2_000)
        ]
        with _hunted(stage):
            for i in range(0, len(jobs), 20):
                assert stage.executor.start_runs(jobs[i : i + 20]) == []
                wait_until(lambda: len(stage.executor.running()) < 30, "free slots", every=0.001)
            wait_until(lambda: not stage.executor.running(), "all runs are over")
        stage.drain()

    assert stage.outcomes.keys() == {(job.id, job.lease) for job in jobs}
    assert {len(finished) for finished in stage.outcomes.values()} == {1}
    seen = {type(finished.outcome) for (finished,) in stage.outcomes.values()}
    assert seen == {Completed, Retried, Discarded, CancelledOutcome}


def _unsteady(dice: random.Random) -> list[Callable[..., Any]]:
    def sync(ctx: Context, ends: str) -> None:
        ctx.wait_cancelled(dice.random() * 0.002)
        _end(ctx, ends)

    async def asynchronous(ctx: Context, ends: str) -> None:
        try:
            await asyncio.sleep(dice.random() * 0.002)
        except asyncio.CancelledError:
            if ends != "clings":
                raise
        _end(ctx, ends)

    def wrapped(ctx: Context, ends: str) -> Any:
        return asynchronous(ctx, ends)

    return [sync, asynchronous, wrapped]


@contextmanager
def _hunted(stage: Stage) -> Iterator[None]:
    """Two threads interrupt runs at random meanwhile."""
    over = threading.Event()
    hunters = [threading.Thread(target=_hunt, args=(stage, over)) for _ in range(2)]
    for hunter in hunters:
        hunter.start()
    yield
    over.set()
    for hunter in hunters:
        hunter.join(PATIENCE)


def _end(ctx: Context, ends: str) -> None:
    if ends == "badly":
        raise SystemExit
    if ends == "obeys":
        ctx.raise_if_cancelled()


def _hunt(stage: Stage, over: threading.Event) -> None:
    dice = random.Random(threading.get_ident())
    while not over.is_set():
        running = stage.executor.running()
        for job in dice.sample(running, min(3, len(running))):
            stage.executor.cancel(job.id, job.lease, dice.choice(list(Interruption)))
        time.sleep(0.0005)
