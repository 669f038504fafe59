"""A sequence that has lost its head, as no step of the library leaves one, is found and mended."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from cyclone_sqla.clock import DatabaseClock
from cyclone_sqla.worker import maintenance, worker
from cyclone_sqla.worker.maintenance import Sweeper
from cyclone_sqla.worker.rhythm import Rhythm
from tests.databases import Database
from tests.life.hands import DONE, FAILED, HOPELESS, Hands
from tests.worker.site import Site, nothing

Harm = Callable[[Hands, list[int]], list[int]]
"""Takes the head from the line of these jobs; those that should run then, in order."""


@pytest.fixture
def hands(database: Database) -> Iterator[Hands]:
    with closing(Hands(database)) as hands:
        yield hands


def sweeper_of(hands: Hands) -> Sweeper:
    rhythm = Rhythm(0.0, threading.Event())
    return Sweeper(hands.dialect, hands.held, rhythm=rhythm, on_mended=lambda: None)


def line(hands: Hands, count: int = 3, key: str = "k") -> list[int]:
    """Jobs of a key that have their places."""
    ids = [hands.enqueue(sequence=key) for _ in range(count)]
    hands.admit()
    return ids


def drain(hands: Hands) -> list[int]:
    """The ids in the order of their runs, without any admission but that of a settle."""
    order: list[int] = []
    while jobs := hands.claim():
        order += [job.id for job in jobs]
        hands.settle_all([(job, DONE) for job in jobs])
    return order


def delete_the_head(hands: Hands, ids: list[int]) -> list[int]:
    hands.forget(ids[0])
    return ids[1:]


def delete_the_debt(hands: Hands, ids: list[int]) -> list[int]:
    hands.act("cancel", ids[0])
    hands.forget(ids[0])
    return ids[1:]


def restore_the_head_as_a_follower(hands: Hands, ids: list[int]) -> list[int]:
    hands.execute(
        "UPDATE cyclone_job SET state = 'pending', waits_for = 'turn', admitted = NULL "
        "WHERE id = :id",
        id=ids[0],
    )
    return ids


def complete_the_head_by_hand(hands: Hands, ids: list[int]) -> list[int]:
    hands.execute(
        "UPDATE cyclone_job SET state = 'completed', admitted = NULL, sequence_open = NULL, "
        "finished_at = updated_at WHERE id = :id",
        id=ids[0],
    )
    return ids[1:]


@pytest.mark.parametrize(
    "harm",
    [
        delete_the_head,
        delete_the_debt,
        restore_the_head_as_a_follower,
        complete_the_head_by_hand,
    ],
    ids=lambda harm: harm.__name__,
)
def test_a_line_that_has_lost_its_head_goes_on_and_its_key_is_reported(
    hands: Hands, harm: Harm, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = line(hands, key="healthy")
    expected = harm(hands, line(hands, key="broken"))
    assert hands.admit() == [], "nothing else looks at it"

    assert sweeper_of(hands).sweep() is False

    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "'broken'" in record.getMessage()
    assert record.__dict__["job_id"] == expected[0]
    order = drain(hands)
    assert [job_id for job_id in order if job_id in expected] == expected
    assert [job_id for job_id in order if job_id in healthy] == healthy


def test_a_line_whose_first_is_paused_has_it_as_its_head_again(hands: Hands) -> None:
    ids = line(hands)
    hands.act("pause", ids[1])
    hands.forget(ids[0])

    sweeper_of(hands).sweep()

    assert hands.claim() == []
    hands.act("resume", ids[1])
    assert drain(hands) == ids[1:]


def test_healthy_lines_of_every_kind_are_left_as_they_are(
    hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:
    line(hands, key="available")
    hands.act("pause", line(hands, key="paused")[0])
    hands.act("reschedule", line(hands, key="delayed")[0], process_in=60)
    hands.act("pause_sequence", "held back")
    line(hands, key="held back")
    for key, outcome in (("retrying", FAILED), ("halted", HOPELESS)):
        hands.enqueue(sequence=key, on_failure="halt", queue=key)
        line(hands, key=key)
        hands.settle(hands.claim_one(queues=[key]), outcome)
    hands.act("cancel", line(hands, key="in debt")[0])
    hands.enqueue(sequence="incoming")
    hands.enqueue(sequence="gap", position=2)
    hands.enqueue(sequence="gap", position=4)
    before = hands.rows()

    assert sweeper_of(hands).sweep() is False

    assert hands.rows() == before
    assert caplog.records == []


def test_a_pass_goes_window_by_window_and_then_begins_anew(
    hands: Hands, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(maintenance, "SWEEP_WINDOW", 2)
    lines = [line(hands, key=f"k{number}") for number in range(5)]
    sweeper = sweeper_of(hands)
    for broken in (4, 0):
        hands.forget(lines[broken][0])
        assert [sweeper.sweep() for _ in range(3)] == [True, True, False]

    told = [record.getMessage().split("'")[1] for record in caplog.records]
    assert told == ["k4", "k0"]


def test_a_window_reads_no_more_of_a_line_than_its_beginning(hands: Hands) -> None:
    """However long a line is, the next key is one step of the index away."""
    hands.enqueue_many(maintenance.SWEEP_WINDOW + 1, sequence="a")
    line(hands, key="b")
    assert sweeper_of(hands).sweep() is False


def test_a_first_job_that_somebody_has_locked_is_left_to_the_next_pass(
    postgresql_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Hands(postgresql_database)) as hands:
        ids = line(hands)
        hands.forget(ids[0])
        sweeper = sweeper_of(hands)
        with hands.engine.begin() as person:
            hands.cyclone.cancel(person, ids[1])
            sweeper.sweep()
            assert caplog.records == []
        sweeper.sweep()

        assert len(caplog.records) == 1
        assert drain(hands) == ids[2:]


def test_a_worker_runs_what_waited_for_a_lost_head_without_waiting_for_its_poll(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Hands(database, DatabaseClock())) as hands:
        hands.forget(line(hands)[0])
    monkeypatch.setattr(worker, "SWEEP_INTERVAL", 0.2)
    site = Site(database, hints=False)
    site.action(nothing)
    with site.worker(poll=3_600.0):
        site.wait_until_all_are("completed")
    assert site.states() == {"completed": 2}
