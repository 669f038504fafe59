"""What the end of a failed head means for its sequence: go on, or stop until a person acts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from cyclone_sqla import State
from cyclone_sqla.testing.conformance.trial import START, Trial

End = tuple[Callable[[Trial], object], State]


def _fail_for_good(trial: Trial) -> None:
    trial.queue.fail(trial.claim_one(), "bad", permanent=True)


def _fail_at_the_limit(trial: Trial) -> None:
    trial.queue.fail(trial.claim_one(), "down")


def _crash_at_the_limit(trial: Trial) -> None:
    trial.claim_one()
    trial.clock.advance(timedelta(minutes=2))
    trial.queue.claim("nobody's")


def _recover_at_the_limit(trial: Trial) -> None:
    trial.claim_one()
    trial.queue.recover()


def _cancel_while_it_runs(trial: Trial) -> None:
    job = trial.claim_one()
    trial.act("cancel", job.id)
    trial.queue.complete(job)


def _cancel_before_it_runs(trial: Trial) -> None:
    trial.queue.claim("nobody's")
    (head,) = [row["id"] for row in trial.rows() if row["admitted"]]
    trial.act("cancel", head)


ENDS: dict[str, End] = {
    "failed for good": (_fail_for_good, State.DISCARDED),
    "failed at its limit": (_fail_at_the_limit, State.DISCARDED),
    "crashed at its limit": (_crash_at_the_limit, State.DISCARDED),
    "recovered at its limit": (_recover_at_the_limit, State.DISCARDED),
    "cancelled while it ran": (_cancel_while_it_runs, State.CANCELLED),
    "cancelled before it ran": (_cancel_before_it_runs, State.CANCELLED),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("mode", ["dead-letter", "skip"])
def test_a_failed_head_lets_the_next_one_run_unless_its_sequence_halts(
    trial: Trial, mode: str, end: str
) -> None:
    ids = trial.line(3, on_failure=mode, max_attempts=1)
    act, state = ENDS[end]
    act(trial)

    row = trial.job(ids[0])
    is_kept = state == State.DISCARDED and mode == "dead-letter"
    assert (row.state, row.dead_letter) == (state, is_kept or None)
    assert trial.drain() == ids[1:]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("release", ["replay", "skip"])
def test_a_failed_head_halts_its_sequence_until_a_person_replays_or_skips_it(
    trial: Trial, release: str, end: str
) -> None:
    ids = trial.line(3, on_failure="halt", max_attempts=1)
    act, state = ENDS[end]
    act(trial)
    late = trial.line(1)
    assert trial.drain() == []
    assert trial.job(ids[0]).state == state

    trial.act(release, ids[0], by="anna")

    assert trial.drain() == [*(ids if release == "replay" else ids[1:]), *late]
    assert trial.history(ids[0])[-1].actor == "anna"
    if release == "skip":
        assert (trial.job(ids[0]).state, trial.job(ids[0]).dead_letter) == ("completed", None)


def test_the_default_is_to_go_on_and_to_keep_a_dead_letter(trial: Trial) -> None:
    first, second = trial.line(2)
    _fail_for_good(trial)
    assert (trial.job(first).on_failure, trial.job(first).dead_letter) == ("dead-letter", True)
    assert trial.drain() == [second]


def test_the_mode_is_that_of_the_job_which_fails(trial: Trial) -> None:
    ids = [*trial.line(1, on_failure="skip"), *trial.line(1, on_failure="halt"), *trial.line(1)]
    _fail_for_good(trial)
    _fail_for_good(trial)
    assert trial.drain() == []

    trial.act("skip", ids[1])
    assert trial.drain() == [ids[2]]


@pytest.mark.parametrize("mode", ["dead-letter", "skip", "halt"])
def test_a_retry_is_no_failure_yet(trial: Trial, mode: str) -> None:
    ids = trial.line(2, on_failure=mode)
    trial.queue.fail(trial.claim_one(), "down", retry_at=START)
    assert trial.drain() == ids


def test_a_job_cancelled_before_its_turn_halts_a_halting_sequence_when_it_is_reached(
    trial: Trial,
) -> None:
    ids = trial.line(3, on_failure="halt")
    trial.queue.claim("nobody's")
    trial.act("cancel", ids[1])
    assert trial.drain() == ids[:1]

    trial.act("skip", ids[1])
    assert trial.drain() == ids[2:]


@pytest.mark.parametrize("mode", ["dead-letter", "skip"])
def test_a_job_cancelled_before_its_turn_is_passed_over_elsewhere(trial: Trial, mode: str) -> None:
    ids = trial.line(3, on_failure=mode)
    trial.queue.claim("nobody's")
    trial.act("cancel", ids[1])
    assert trial.drain() == [ids[0], ids[2]]


def test_a_replayed_dead_letter_runs_afresh_behind_who_runs_now(trial: Trial) -> None:
    first, second = trial.line(2, max_attempts=1)
    _fail_for_good(trial)
    job = trial.claim_one()
    trial.act("replay", first)
    assert trial.queue.claim() == []

    trial.queue.complete(job)
    again = trial.claim_one()
    assert (job.id, again.id, again.attempt) == (second, first, 1)
    assert again.lease > job.lease
