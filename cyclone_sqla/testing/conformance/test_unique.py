"""Unique keys: at most one active job for each kind and key."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from cyclone_sqla import DuplicateError, InvalidKeyError, State
from cyclone_sqla.testing.conformance.trial import KEY, START, Trial

HOUR = timedelta(hours=1)


def test_a_duplicate_is_refused_and_told_who_holds_the_key(trial: Trial) -> None:
    holder = trial.enqueue(unique="order:1", queue="slow")
    before = trial.rows()

    with pytest.raises(DuplicateError) as refused:
        trial.enqueue(unique="order:1")

    error = refused.value
    assert (error.kind, error.key, error.job_id) == ("work", "order:1", holder)
    assert error.job is not None
    assert (error.job.queue, error.job.state, error.job.created) == ("slow", "available", False)
    assert trial.rows() == before


def test_a_duplicate_can_be_answered_with_the_holder(trial: Trial) -> None:
    holder = trial.enqueue(unique="u")
    found = trial.queue.enqueue("work", unique="u", on_duplicate="return")
    assert (found.id, found.created, found.state) == (holder, False, State.AVAILABLE)
    assert len(trial.rows()) == 1


def test_a_key_belongs_to_its_kind_and_is_taken_to_the_letter(trial: Trial) -> None:
    ids = [trial.enqueue("work", unique="u"), trial.enqueue("play", unique="u")]
    ids += [trial.enqueue(unique=key) for key in ("U", "u ", "ü", "u\u0308", "'", "%s", ":x")]
    assert [row["id"] for row in trial.rows()] == ids


@pytest.mark.parametrize(
    "key",
    ["", "a\0b", "x" * 257, "ä" * 129, "\ud800"],
    ids=["empty", "with a NUL", "of 257 bytes", "of 129 letters and 258 bytes", "not UTF-8"],
)
def test_a_key_that_breaks_a_rule_is_refused(trial: Trial, key: str) -> None:
    with pytest.raises(InvalidKeyError):
        trial.enqueue(unique=key)
    with pytest.raises(InvalidKeyError):
        trial.enqueue(sequence=key)
    assert trial.rows() == []


def test_a_key_of_256_bytes_is_kept(trial: Trial) -> None:
    for key in ("x" * 256, "ä" * 128):
        assert trial.job(trial.enqueue(unique=key, sequence=key)).unique_key == key


def _waiting(_trial: Trial) -> None:
    """It is available."""


def _paused(trial: Trial) -> None:
    trial.act("pause", trial.rows()[0]["id"])


def _running(trial: Trial) -> None:
    trial.claim_one()


def _retrying(trial: Trial) -> None:
    trial.queue.fail(trial.claim_one(), "down")


def _lapsed(trial: Trial) -> None:
    trial.claim_one()
    trial.clock.advance(HOUR)


def _recovered(trial: Trial) -> None:
    trial.claim_one()
    trial.queue.recover()


@pytest.mark.parametrize("reach", [_waiting, _paused, _running, _retrying, _lapsed, _recovered])
def test_an_active_job_holds_its_key(trial: Trial, reach: Callable[[Trial], None]) -> None:
    holder = trial.enqueue(unique="u")
    reach(trial)
    with pytest.raises(DuplicateError) as refused:
        trial.enqueue(unique="u")
    assert refused.value.job_id == holder


@pytest.mark.parametrize(
    "options",
    [{"process_in": HOUR}, {"process_at": START + HOUR}, {"sequence": KEY}],
    ids=["in a while", "at its time", "at its turn"],
)
def test_a_job_holds_its_key_before_it_can_run(trial: Trial, options: dict[str, Any]) -> None:
    head = trial.enqueue(sequence=KEY)
    holder = trial.enqueue(unique="u", **options)
    assert trial.claim_one().id == head
    with pytest.raises(DuplicateError) as refused:
        trial.enqueue(unique="u")
    assert refused.value.job_id == holder


def _completed(trial: Trial) -> None:
    trial.queue.complete(trial.claim_one())


def _discarded(trial: Trial) -> None:
    trial.queue.fail(trial.claim_one(), "bad", permanent=True)


def _exhausted(trial: Trial) -> None:
    trial.claim_one()
    trial.queue.recover()


def _cancelled(trial: Trial) -> None:
    trial.act("cancel", trial.rows()[0]["id"])


@pytest.mark.parametrize("end", [_completed, _discarded, _exhausted, _cancelled])
def test_a_job_that_has_ended_frees_its_key(trial: Trial, end: Callable[[Trial], None]) -> None:
    first = trial.enqueue(unique="u", max_attempts=1)
    end(trial)
    second = trial.enqueue(unique="u")
    assert [row["id"] for row in trial.rows()] == [first, second]


def test_an_enqueue_that_is_rolled_back_frees_its_key(trial: Trial) -> None:
    with trial.engine.connect() as connection:
        trial.cyclone.enqueue(connection, "work", {}, unique="u")
        connection.rollback()
    assert trial.job(trial.enqueue(unique="u")).state == "available"
