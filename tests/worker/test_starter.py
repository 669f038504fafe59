"""Large batches are started beside the work loop: none of them waits for it, none is lost."""

import logging
import threading
from collections.abc import Sequence

import pytest

from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.worker.executor import Executor
from cyclone_sqla.worker.starter import Starter
from cyclone_sqla.worker.work import LARGE_BATCH
from tests.databases import Database
from tests.waiting import wait_until
from tests.worker.site import Gate, Site, nothing, tracebacks

SLOTS = 2 * LARGE_BATCH + 50


@pytest.fixture
def site(database: Database) -> Site:
    return Site(database)


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """What each batch passes before it is started."""
    gate = Gate()
    start = Executor.start_runs

    def start_runs(self: Executor, jobs: Sequence[ClaimedJob]) -> list[ClaimedJob]:
        gate()
        return start(self, jobs)

    monkeypatch.setattr(Executor, "start_runs", start_runs)
    return gate


def test_claims_of_half_the_slots_fill_all_of_them_at_once(site: Site) -> None:
    gate = Gate()
    site.action(gate.passing())
    site.enqueue_many(SLOTS + 10)
    with site.worker(concurrency=SLOTS, poll=60.0, listen=False):
        gate.await_arrival(SLOTS)
        assert site.states() == {"running": SLOTS, "available": 10}
        gate.open()
        site.wait_until_all_are("completed")


def test_the_next_turn_does_not_wait_for_the_start_of_a_batch(site: Site, starting: Gate) -> None:
    site.action(nothing)
    site.enqueue_many(SLOTS)
    with site.worker(concurrency=SLOTS):
        starting.await_arrival()
        wait_until(lambda: site.states() == {"running": SLOTS}, "both halves are claimed")
        starting.open()
        site.wait_until_all_are("completed")


def test_what_was_not_started_when_the_worker_stops_is_given_back(
    site: Site, starting: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attempt is not counted, and no other worker has to wait for its lease."""
    stop = Executor.stop

    def stop_first(self: Executor, grace: float) -> list[ClaimedJob]:
        left = stop(self, grace)
        starting.open()
        return left

    monkeypatch.setattr(Executor, "stop", stop_first)
    site.action(nothing)
    ids = site.enqueue_many(LARGE_BATCH)
    with site.worker(concurrency=SLOTS):
        starting.await_arrival()
    assert site.states() == {"available": LARGE_BATCH}
    assert {site.job(job_id).attempt for job_id in ids[::10]} == {0}


def test_where_there_are_no_more_threads_the_loop_starts_them_itself(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "cyclone-starter":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    site.action(nothing)
    site.enqueue_many(SLOTS)
    with site.worker(concurrency=SLOTS):
        site.wait_until_all_are("completed")


def test_a_batch_that_can_not_be_started_does_not_keep_the_next_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    started: list[Sequence[ClaimedJob]] = []
    arrived = threading.Event()

    def start(jobs: Sequence[ClaimedJob]) -> None:
        if not started:
            started.append(())
            raise SystemExit
        started.append(jobs)
        arrived.set()

    starter = Starter(start)
    with caplog.at_level(logging.CRITICAL):
        starter.put([])
        starter.put([])
        assert arrived.wait(30.0)
    starter.close()
    assert tracebacks(caplog.records) == ["a batch of 0 job(s) was not started"]
