"""Stopping: nothing is lost between what was handed in, what runs, and what is reported."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cyclone_sqla import Context
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.outcomes import Completed, Discarded, GivenBack, Retried
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


def _our_threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("cyclone-")}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    wait_until(lambda: not _our_threads(), "earlier tests have ended their threads")
    yield
    wait_until(lambda: not _our_threads(), "all threads have ended")


def when_finished(stage: Stage, jobs: list[ClaimedJob], act: Callable[[], None]) -> None:
    """Act from another thread, once the outcomes of these jobs are known."""

    def wait_and_act() -> None:
        wait_until(lambda: all(stage.is_finished(job) for job in jobs), "they are finished")
        act()

    threading.Thread(target=wait_and_act, daemon=True).start()


def test_stopping_an_idle_executor_is_quick_and_may_be_repeated() -> None:
    stage = Stage()
    began = time.monotonic()

    assert stage.executor.stop(PATIENCE) == []
    assert stage.executor.stop(PATIENCE) == []

    assert time.monotonic() - began < PATIENCE / 2


def test_all_threads_end_with_the_stop() -> None:
    with opened() as stage:
        for flavour in FLAVOURS:
            stage.outcome(flavoured(flavour, lambda _: None), timeout=3600)
        assert len(_our_threads()) >= 3, "an action's, the loop's, the watchdog's"

    assert _our_threads() == set()


@every_flavour
def test_runs_may_end_within_the_grace(flavour: Flavour) -> None:
    with opened() as stage:
        held = Held(flavour)
        job = stage.start(held.fn)
        held.wait_begun()
        threading.Timer(0.05, held.release.set).start()

        assert stage.executor.stop(PATIENCE) == []

        assert stage.wait(job).outcome == Completed('"released"')
        assert held.told == [False], "it was not even asked to stop"


def test_the_stop_returns_as_soon_as_the_last_run_has_ended() -> None:
    with opened() as stage:
        began = time.monotonic()
        stage.start(flavoured("sync", lambda ctx: ctx.wait_cancelled(0.05)))

        stage.executor.stop(PATIENCE)

        assert time.monotonic() - began < PATIENCE / 2


def test_what_had_not_begun_is_given_back() -> None:
    with opened(max_threads=1) as stage:
        held = Held("sync")
        running = stage.start(held.fn)
        held.wait_begun()
        waiting = [stage.start(flavoured("sync", lambda _: None)) for _ in range(3)]
        when_finished(stage, waiting, held.release.set)

        assert stage.executor.stop(PATIENCE) == []

        assert [stage.wait(job).outcome for job in waiting] == [GivenBack()] * 3
        assert stage.wait(running).outcome == Completed('"released"')


def test_async_runs_that_had_not_begun_are_given_back() -> None:
    with opened() as stage:
        unblock = threading.Event()
        blocked = threading.Event()

        async def blocks_the_loop() -> None:
            blocked.set()
            unblock.wait(PATIENCE)

        calls: list[Context] = []
        blocking = stage.start(blocks_the_loop)
        assert blocked.wait(PATIENCE)
        waiting = stage.start(flavoured("async", calls.append))
        when_finished(stage, [waiting], unblock.set)

        assert stage.executor.stop(PATIENCE) == []

        assert stage.wait(waiting).outcome == GivenBack()
        assert stage.wait(blocking).outcome == Completed()
        assert calls == []


@every_flavour
def test_a_stopping_executor_starts_nothing(flavour: Flavour) -> None:
    with opened() as stage:
        calls: list[Context] = []
        kind = stage.register(flavoured(flavour, calls.append))
        jobs = [stage.claimed(kind), stage.claimed(kind)]
        stage.executor.stop(0)

        assert stage.executor.start_runs(jobs) == jobs

        stage.drain()
        assert stage.outcomes == {}
        assert calls == []
        assert stage.executor.running() == []


@every_flavour
def test_runs_are_asked_to_stop_when_the_grace_is_over(flavour: Flavour) -> None:
    with opened() as stage:
        action = Obedient(flavour)
        job = stage.start(action.fn, backoff=3600)
        action.wait_begun()

        assert stage.executor.stop(0, linger=PATIENCE) == []

        outcome = stage.wait(job).outcome
        assert isinstance(outcome, Retried)
        assert outcome.failure.error == "Cancelled: the worker is stopping"
        assert outcome.delay == seconds(0), "it is not the job's fault"


@every_flavour
def test_a_last_attempt_that_is_stopped_is_discarded(flavour: Flavour) -> None:
    with opened() as stage:
        action = Obedient(flavour)
        job = stage.start(action.fn, job={"max_attempts": 1})
        action.wait_begun()

        stage.executor.stop(0, linger=PATIENCE)

        outcome = stage.wait(job).outcome
        assert isinstance(outcome, Discarded)
        assert "the worker is stopping (attempt 1 of 1, none left)" in outcome.failure.error


@every_flavour
def test_runs_that_do_not_stop_are_named_and_reported_when_they_end(flavour: Flavour) -> None:
    stage = Stage()
    held = Held(flavour)
    job = stage.start(held.fn, job={"timeout": seconds(3600)})
    held.wait_begun()

    assert stage.executor.stop(0, linger=0.01) == [job]
    assert stage.executor.running() == [job]

    held.release.set()
    assert stage.wait(job).outcome == Completed('"released"')
    assert held.told == [True]
    assert stage.executor.stop(PATIENCE) == []


def test_a_second_stop_shortens_the_first() -> None:
    stage = Stage()
    held = Held("sync")
    job = stage.start(held.fn)
    held.wait_begun()
    left: list[Any] = []
    patient = threading.Thread(target=lambda: left.append(stage.executor.stop(PATIENCE, linger=0)))
    patient.start()

    assert stage.executor.stop(0, linger=0) == [job]
    patient.join(PATIENCE / 2)

    assert not patient.is_alive()
    assert left == [[job]]
    held.release.set()
    stage.wait(job)
    stage.executor.stop(PATIENCE)


def test_a_cancellation_may_come_during_and_after_the_stop() -> None:
    with opened() as stage:
        action = Obedient("async")
        job = stage.start(action.fn)
        action.wait_begun()
        over = threading.Event()

        def cancel_again_and_again() -> None:
            while not over.is_set():
                stage.executor.cancel(job.id, job.lease, Interruption.LEASE_LOST)

        canceller = threading.Thread(target=cancel_again_and_again)
        stopper = threading.Thread(target=lambda: stage.executor.stop(PATIENCE))
        stopper.start()
        canceller.start()
        stopper.join(PATIENCE)
        over.set()
        canceller.join(PATIENCE)

        assert isinstance(stage.wait(job).outcome, Retried)


def _stream(stage: Stage, kinds: list[str], streaming: threading.Event) -> tuple[list[Any], ...]:
    """Hand in jobs until the executor starts no more; those handed in, and those handed back."""
    handed_in: list[Any] = []
    returned: list[Any] = []
    while not returned:
        jobs = [stage.claimed(kind) for kind in kinds * 5]
        handed_in.extend(jobs)
        returned.extend(stage.executor.start_runs(jobs))
        if len(handed_in) > 100:
            streaming.set()
    return handed_in, returned


@pytest.mark.parametrize("_", range(20))
def test_nothing_is_lost_when_the_stop_meets_a_stream_of_jobs(_: int) -> None:
    """Each job is either reported once or handed back by start_runs."""
    with opened(max_threads=4) as stage, ThreadPoolExecutor(1) as producer:
        kinds = [stage.register(flavoured(flavour, lambda _: None)) for flavour in FLAVOURS]
        streaming = threading.Event()
        stream = producer.submit(_stream, stage, kinds, streaming)
        assert streaming.wait(PATIENCE)

        assert stage.executor.stop(PATIENCE) == []

        handed_in, returned = stream.result(PATIENCE)
        stage.drain()
    reported = [f.job.id for finished in stage.outcomes.values() for f in finished]
    assert sorted(reported + [job.id for job in returned]) == [job.id for job in handed_in]
