"""Prune: what ended long ago is deleted in small batches; nothing alive, no dead letter."""

import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta

import pytest
import sqlalchemy as sa

from cyclone_sqla import State, WorkerSettings, operations
from cyclone_sqla.models import HistoryEntry, IdempotencyKey, Job
from cyclone_sqla.operations import Retention
from cyclone_sqla.outcomes import CancelledOutcome, Outcome
from cyclone_sqla.worker.maintenance import MOST_HELD, Pruner
from cyclone_sqla.worker.rhythm import Rhythm
from tests.databases import Database
from tests.life.hands import BROKE, DONE, FAILED, HOPELESS, Hands

DAY = 86_400.0
CANCELLED = CancelledOutcome(BROKE)


def prune(hands: Hands, **settings: float | None) -> int:
    """One whole pass; how many batches it took."""
    pruner = pruner_of(hands, **settings)
    batches = 1
    while pruner.prune_batch():
        batches += 1
    return batches


def pruner_of(hands: Hands, **settings: float | None) -> Pruner:
    rhythm = Rhythm(60.0, threading.Event())
    return Pruner(hands.dialect, hands.held, WorkerSettings(**settings), rhythm)


def end(hands: Hands, outcome: Outcome, count: int = 1) -> list[int]:
    """Jobs that end now, `outcome` each; their ids."""
    ids = hands.enqueue_many(count)
    hands.settle_all([(job, outcome) for job in hands.claim(count)])
    return ids


def left(hands: Hands) -> list[int]:
    with hands.engine.connect() as connection:
        return list(connection.scalars(sa.select(Job.id).order_by(Job.id)))


def refer_to(hands: Hands, ids: Sequence[int]) -> None:
    """A table of the application's whose rows hold these jobs."""
    hands.execute("CREATE TABLE receipt (job_id BIGINT REFERENCES cyclone_job (id))")
    for job_id in ids:
        hands.execute("INSERT INTO receipt VALUES (:id)", id=job_id)


def test_each_state_has_its_own_retention(hands: Hands) -> None:
    (completed,), (cancelled,), (dead,) = (
        end(hands, outcome) for outcome in (DONE, CANCELLED, HOPELESS)
    )
    hands.change(dead, dead_letter=None)  # somebody has dealt with it

    hands.clock.advance(days=1)
    prune(hands)
    assert left(hands) == [completed, cancelled, dead]  # not older than a day, but just as old

    for days, kept in ((1, [cancelled, dead]), (7, [dead]), (30, [])):
        hands.clock.advance(days=days)
        prune(hands)
        assert left(hands) == kept


def test_nothing_is_pruned_whose_retention_is_for_ever(hands: Hands) -> None:
    ids = [*end(hands, DONE), *end(hands, CANCELLED), *end(hands, HOPELESS)]
    hands.clock.advance(days=3_000)

    prune(hands, keep_completed=None, keep_cancelled=None, keep_discarded=None)

    assert left(hands) == ids


def test_a_dead_letter_stays_until_it_is_asked_to_go(hands: Hands) -> None:
    (dead,) = end(hands, HOPELESS)
    hands.clock.advance(days=3_000)

    prune(hands)
    assert left(hands) == [dead]

    prune(hands, prune_dead_letters=365 * DAY)
    assert left(hands) == []


def test_a_live_job_is_never_pruned_however_old_it_is(hands: Hands) -> None:
    ids = [hands.enqueue(), hands.enqueue(process_in=timedelta(days=9_999))]
    ids += hands.enqueue_many(3)
    running, failed = hands.claim(2)
    hands.settle(failed, FAILED)
    hands.change(ids[-1], state="paused")
    hands.clock.advance(days=9_000)

    prune(hands, prune_dead_letters=1.0)

    assert left(hands) == ids
    assert hands.job(running.id).state == "running"


def test_an_ended_head_that_still_holds_its_line_is_never_pruned(hands: Hands) -> None:
    halted, debt = end(hands, CANCELLED, 2)
    hands.change(halted, sequence_key="k", sequence_open=True, admitted=True)
    hands.change(debt, sequence_key="l", admitted=True)
    hands.clock.advance(days=9_000)

    prune(hands)

    assert left(hands) == [halted, debt]


def test_a_pass_goes_in_batches_from_the_oldest_on(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyclone_sqla.worker.maintenance.PRUNE_BATCH", 4)
    ids: list[int] = []
    for _ in range(3):
        ids += end(hands, DONE, 3)
        hands.clock.advance(seconds=1)
    hands.clock.advance(days=2)
    pruner = pruner_of(hands)

    seen: list[list[int]] = []
    while pruner.prune_batch():
        seen.append(left(hands))

    assert seen == [ids[4:], ids[8:], []]


def test_history_goes_with_its_job(hands: Hands) -> None:
    end(hands, CANCELLED)
    hands.clock.advance(days=9)

    prune(hands)

    with hands.engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count(HistoryEntry.id))) == 0


def test_a_row_that_the_application_refers_to_is_stepped_over_and_reported(
    hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:
    ids = end(hands, DONE, 20)
    refer_to(hands, [ids[0], ids[9], ids[19]])
    hands.clock.advance(days=2)

    with caplog.at_level(logging.WARNING):
        prune(hands)

    assert left(hands) == [ids[0], ids[9], ids[19]]
    (record,) = caplog.records
    assert "3 completed job(s) can't be pruned" in record.message
    assert f"job {ids[0]}" in record.message


def test_many_referenced_rows_keep_the_others_only_until_a_later_pass(hands: Hands) -> None:
    ids = end(hands, DONE, MOST_HELD + 30)
    held = ids[: MOST_HELD + 20]
    refer_to(hands, held)
    hands.clock.advance(days=2)
    pruner = pruner_of(hands)

    def whole_pass() -> int:
        batches = 0
        while pruner.prune_batch():
            batches += 1
        return batches

    assert whole_pass() < 2 * MOST_HELD
    assert left(hands) == ids
    whole_pass()
    assert left(hands) == held
    hands.execute("DELETE FROM receipt")
    whole_pass()
    whole_pass()
    assert left(hands) == []


TAKES_LONG = """
    CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep(0.03); RETURN OLD; END $$;
    CREATE TRIGGER slow BEFORE DELETE ON cyclone_job FOR EACH ROW EXECUTE FUNCTION dawdle();
"""


def test_a_batch_that_takes_longer_than_the_server_allows_is_deleted_in_parts(
    postgresql_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyclone_sqla.worker.maintenance.PRUNE_BATCH", 8)
    with closing(Hands(postgresql_database)) as hands:
        end(hands, DONE, 10)
        hands.clock.advance(days=2)
        hands.execute(TAKES_LONG)
        allow = f"ALTER DATABASE {hands.engine.url.database} SET statement_timeout = "
        hands.execute(f"{allow} '150ms'")
        hands.held.close()

        pruner = pruner_of(hands)
        while pruner.prune_batch():
            pass
        assert left(hands) == []
        hands.execute(f"{allow} DEFAULT")


def test_a_key_outlives_its_job_and_is_forgotten_after_its_own_retention(hands: Hands) -> None:
    job_id = hands.enqueue(idempotency_key="once")
    hands.settle(hands.claim_one(), DONE)
    hands.clock.advance(days=29)
    prune(hands)
    assert left(hands) == []
    assert hands.enqueue(idempotency_key="once") == job_id

    hands.clock.advance(days=2)
    prune(hands)

    with hands.engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(IdempotencyKey)) == 0
    assert hands.enqueue(idempotency_key="once") > job_id


def test_a_look_at_nothing_takes_no_lock(hands: Hands) -> None:
    """On SQLite a lock would be the file's; here another connection has it the whole time."""
    end(hands, DONE)
    with hands.engine.connect() as other:
        other.execute(sa.text("DELETE FROM cyclone_queue"))

        assert prune(hands) == 1


def test_a_job_put_back_in_time_is_not_pruned(hands: Hands) -> None:
    (job_id,) = end(hands, DONE)
    hands.clock.advance(days=2)
    retention = Retention(State.COMPLETED, timedelta(days=1))
    with hands.held.reading() as connection:
        found = operations.oldest_prunable(connection, hands.dialect, retention, None)
    assert found is not None
    hands.change(job_id, state="available", finished_at=None)

    with hands.transaction() as connection:
        assert operations.prune(connection, hands.dialect, retention, None, 100) is None

    assert left(hands) == [job_id]
