"""Workers as real processes that are killed: their jobs run again, and no job ends twice."""

import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest

from tests.crashes.fleet import PATIENCE, Fleet, kill
from tests.databases import Database
from tests.waiting import wait_until

LEASE = {"lease": 2.0, "rescue_interval": 0.2}


@pytest.fixture
def fleet(tmp_path: Path, database: Database) -> Fleet:
    """Workers on each database."""
    return Fleet(tmp_path, database)


def test_a_job_that_kills_its_worker_is_discarded_in_the_end_and_the_others_finish(
    fleet: Fleet,
) -> None:
    poison = fleet.site.enqueue("die", max_attempts=3)
    brief = fleet.enqueue_brief(30)
    settings = {"lease": 1.0, "rescue_interval": 0.1, "concurrency": 4}
    process = fleet.start(**settings)
    try:
        give_up = time.monotonic() + PATIENCE
        while fleet.site.job(poison).state != "discarded" and time.monotonic() < give_up:
            if not process.is_alive():
                process = fleet.start(**settings)
            time.sleep(0.05)
        wait_until(
            lambda: fleet.site.states() == {"completed": 30, "discarded": 1},
            "the others are completed",
            within=PATIENCE,
        )
    finally:
        kill(process)

    row = fleet.site.job(poison)
    assert row.last_error is not None
    assert row.last_error.startswith("WorkerLost: worker ")
    assert row.last_error.endswith("was lost during attempt 3, the last of 3")
    assert (row.attempt, row.dead_letter) == (3, True)
    assert [e.event for e in fleet.site.history(poison)] == ["rescue", "rescue", "discard"]
    assert not fleet.has_begun("die", 4)
    assert {fleet.site.job(job_id).attempt for job_id in brief} <= {1, 2, 3, 4}


@pytest.mark.parametrize("record", ["there", "deleted"])
def test_a_killed_workers_job_runs_again_after_its_lease_though_its_name_is_used_again(
    fleet: Fleet, record: str
) -> None:
    """Nothing but the lease decides, and the lost run takes no slot of the new worker."""
    job_id = fleet.site.enqueue("hold")
    settings = {**LEASE, "name": "box", "concurrency": 1}
    with fleet.worker(**settings):
        fleet.wait_begun("hold")
    lost = fleet.site.job(job_id)
    assert lost.state == "running"
    if record == "deleted":
        fleet.site.execute("DELETE FROM cyclone_worker")
    with fleet.worker(**settings):
        fleet.wait_begun("hold", attempt=2)
        second = fleet.site.job(job_id)
        fleet.let_go(2)
        fleet.site.wait_for(job_id, "completed", within=PATIENCE)

    assert lost.worker is not None
    assert second.worker is not None
    assert lost.worker.startswith("box/")
    assert second.worker.startswith("box/")
    assert second.worker != lost.worker
    assert lost.leased_until is not None
    assert second.started_at is not None
    assert second.started_at >= lost.leased_until
    assert [entry.event for entry in fleet.site.history(job_id)] == ["rescue"]


def test_a_frozen_worker_changes_nothing_when_it_wakes_up(fleet: Fleet) -> None:
    job_id = fleet.site.enqueue("hold")
    with fleet.worker(**LEASE, name="frozen") as frozen:
        fleet.wait_begun("hold")
        freeze(frozen)
        with fleet.worker(**LEASE, name="awake"):
            fleet.wait_begun("hold", attempt=2)
            fleet.let_go(2)
            fleet.site.wait_for(job_id, "completed", within=PATIENCE)
        before = [vars(fleet.site.job(job_id)) | {"_sa_instance_state": None}]
        fleet.let_go(1)
        psutil.Process(frozen.pid).resume()
        wait_until(lambda: "lease lost" in fleet.output(), "it says so", within=PATIENCE)
        assert [vars(fleet.site.job(job_id)) | {"_sa_instance_state": None}] == before
    assert fleet.site.job(job_id).result == '"attempt 2"'
    assert len(fleet.site.history(job_id)) == 1


def freeze(process: ForkServerProcess) -> None:
    assert process.pid is not None
    stopped = psutil.Process(process.pid)
    stopped.suspend()
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "it is frozen")


# The full size is what this is about; the small one finds most faults in a few seconds.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("count", "least_kills"),
    [
        pytest.param(400, 1, id="small"),
        pytest.param(7_000, 10, id="full", marks=pytest.mark.soak),
    ],
)
def test_every_job_ends_once_though_a_worker_is_killed_every_moment(
    fleet: Fleet, count: int, least_kills: int
) -> None:
    fleet.log_completions()
    ids = fleet.enqueue_brief(count)
    workers, every = (4, 1.0) if fleet.site.database.dialect == "postgresql" else (2, 3.0)
    if count < 5_000:
        every /= 3

    kills = fleet.drain_under_fire(workers, every, **LEASE, concurrency=2)

    assert kills >= least_kills
    assert fleet.completions() == ids
    assert "Traceback" not in fleet.output()
