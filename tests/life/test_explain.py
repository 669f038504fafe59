"""`explain` names all that keeps a job from running, in the order in which it must be cleared."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from cyclone_sqla import Explanation, JobNotFoundError, explanations, operations
from cyclone_sqla.figures import MOST_COUNTED, Count
from cyclone_sqla.outcomes import CancelledOutcome, Discarded
from tests.life.hands import BROKE, DONE, FAILED, HOPELESS, NOT_NOW, Hands

KEY = "account-42"


@pytest.fixture(autouse=True)
def _a_worker(hands: Hands) -> None:
    """One lives, knows the kind, and has ten slots."""
    announce(hands, "worker-1")


def announce(
    hands: Hands,
    worker: str,
    queues: dict[str, int] | None = None,
    kinds: Sequence[str] = ("work",),
) -> None:
    record = {
        "id": worker,
        "name": worker,
        "host": "host",
        "pid": 1,
        "queues": queues or {"default": 10},
        "kinds": list(kinds),
    }
    with hands.transaction() as connection:
        operations.withdraw(connection, hands.dialect, worker)
        operations.announce(connection, hands.dialect, record)


def explain(hands: Hands, job_id: int) -> Explanation:
    with hands.engine.connect() as connection:
        return hands.cyclone.explain(connection, job_id)


def reasons(hands: Hands, job_id: int) -> list[str]:
    return [reason.code for reason in explain(hands, job_id).reasons]


def the_only(hands: Hands, job_id: int) -> Any:
    """The one reason there is, whatever its class."""
    (reason,) = explain(hands, job_id).reasons
    return reason


def line(hands: Hands, count: int, **options: Any) -> list[int]:
    ids = [hands.enqueue(sequence=KEY, **options) for _ in range(count)]
    hands.admit()
    return ids


# ---- time ----------------------------------------------------------------------------------------


def test_a_delayed_job_is_due_at_its_time(hands: Hands) -> None:
    job = hands.enqueue(process_in=3600)
    due = hands.clock.now() + timedelta(hours=1)
    assert the_only(hands, job) == explanations.Delayed(at=due, is_due=False)
    assert explain(hands, job).text == (
        f"Job {job} (work, queue default) is pending (time). It is due at 2030-01-01 13:00:00 UTC."
    )
    hands.clock.advance(hours=1)
    announce(hands, "worker-1")
    assert the_only(hands, job).is_due


def test_a_failed_job_says_which_retry_comes_when_and_after_which_error(hands: Hands) -> None:
    job = hands.enqueue(max_attempts=5)
    hands.settle(hands.claim_one(), NOT_NOW)
    hands.clock.advance(hours=1)
    hands.stage()
    hands.settle(hands.claim_one(), FAILED)
    announce(hands, "worker-1")

    reason = the_only(hands, job)

    assert isinstance(reason, explanations.Retrying)
    assert (reason.attempt, reason.max_attempts) == (2, 5)  # a snooze is no attempt
    assert reason.at == hands.clock.now() + timedelta(seconds=30)
    assert reason.error == "ValueError: it broke"
    assert "It failed (ValueError: it broke); attempt 2 of 5 is due at" in reason.sentence


# ---- pauses --------------------------------------------------------------------------------------


def test_pauses_of_job_sequence_and_queue_name_who_and_since_when(hands: Hands) -> None:
    (job,) = line(hands, 1)
    since = hands.clock.now()
    hands.act("pause", job, by="anna")
    hands.act("pause_sequence", KEY, by="bob")
    hands.act("pause_queue", "default", by="carl")

    found = explain(hands, job)

    assert found.reasons == (
        explanations.Paused(what="job", since=since, by="anna"),
        explanations.Paused(what="sequence", name=KEY, since=since, by="bob"),
        explanations.Paused(what="queue", name="default", since=since, by="carl"),
    )
    assert found.reason == "job-paused"
    for who in ("anna", "bob", "carl"):
        assert who in found.text


def test_nothing_is_invented_of_a_pause_that_says_not_who(hands: Hands) -> None:
    job = hands.enqueue()
    hands.act("pause", job)
    assert the_only(hands, job).by is None
    assert "since 2030-01-01 12:00:00 UTC, until somebody resumes it." in explain(hands, job).text


# ---- sequences -----------------------------------------------------------------------------------


def test_a_waiting_job_names_its_head_and_counts_who_is_ahead(hands: Hands) -> None:
    first, _, _, last = line(hands, 4)
    running = hands.claim_one()

    reason = the_only(hands, last)

    assert isinstance(reason, explanations.BehindHead)
    assert (reason.head, reason.head_state, reason.ahead) == (first, "running", Count(3))
    assert reason.since == hands.clock.now()
    assert reason.next_at == hands.job(running.id).leased_until
    assert [r.code for r in reason.head_reasons] == ["running"]
    assert f"It waits for job {first} (work), running since" in reason.sentence


@pytest.mark.parametrize(
    ("options", "act", "expected"),
    [
        ({"process_in": 60}, None, ["delayed"]),
        ({}, "pause", ["job-paused"]),
        ({}, None, ["waiting-for-worker"]),
    ],
)
def test_the_reasons_of_the_head_are_told_to_those_behind(
    hands: Hands, options: dict[str, Any], act: str | None, expected: list[str]
) -> None:
    first, second = line(hands, 1, **options) + line(hands, 1)
    if act is not None:
        hands.act(act, first)
    reason = the_only(hands, second)
    assert [r.code for r in reason.head_reasons] == expected
    assert (reason.next_at is not None) == bool(options)


def test_who_is_ahead_is_counted_up_to_a_bound_and_says_so(hands: Hands) -> None:
    hands.enqueue_many(MOST_COUNTED + 5, sequence=KEY)
    last = hands.enqueue(sequence=KEY)
    reason = the_only(hands, last)
    assert reason.ahead == Count(MOST_COUNTED, is_exact=False)
    assert "1,000 or more jobs ahead of it" in reason.sentence


def test_a_job_that_nobody_admitted_yet_is_incoming(hands: Hands) -> None:
    job = hands.enqueue(sequence=KEY)
    assert the_only(hands, job) == explanations.Incoming(key=KEY, ahead=Count(0))


def test_the_next_of_a_debt_waits_for_the_hand_over(hands: Hands) -> None:
    first, second = line(hands, 2)
    hands.act("cancel", first)
    assert the_only(hands, second).code == "hand-over"
    hands.admit()
    assert the_only(hands, second).code == "waiting-for-worker"


def test_a_gap_names_the_position_that_is_missing(hands: Hands) -> None:
    ids = [hands.enqueue(sequence=KEY, position=place) for place in (1, 2, 4, 6)]
    hands.admit()
    assert reasons(hands, ids[1]) == ["behind-head"]
    found = explain(hands, ids[3]).reasons
    assert [r.code for r in found] == ["behind-head", "gap"]
    assert found[1] == explanations.Gap(key=KEY, position=6, missing=3, ahead=Count(3))

    for _ in range(2):
        hands.settle(hands.claim_one(), DONE)
    announce(hands, "worker-1")
    assert the_only(hands, ids[2]) == explanations.Gap(
        key=KEY, position=4, missing=3, ahead=Count(0)
    )


def test_a_position_that_was_cancelled_beyond_a_gap_is_not_missing(hands: Hands) -> None:
    ids = [hands.enqueue(sequence=KEY, position=place) for place in (2, 3)]
    hands.admit()
    hands.act("cancel", ids[0])
    assert the_only(hands, ids[1]).missing == 1


def test_an_unpositioned_job_in_a_positioned_sequence_never_gets_a_place(hands: Hands) -> None:
    hands.enqueue(sequence=KEY, position=1)
    stray = hands.enqueue(sequence=KEY)
    hands.admit()
    assert the_only(hands, stray) == explanations.Unpositioned(key=KEY)


def test_a_halted_sequence_names_its_head_why_and_since_when(hands: Hands) -> None:
    first, second = line(hands, 2, on_failure="halt")
    hands.settle(hands.claim_one(), HOPELESS)

    reason = the_only(hands, second)

    assert reason == explanations.SequenceHalted(
        key=KEY,
        head=first,
        head_kind="work",
        head_state=hands.job(first).state,
        why="ValueError: it broke",
        since=hands.clock.now(),
        ahead=Count(1),
    )
    assert "goes on when somebody replays or skips" in reason.sentence
    head = the_only(hands, first)
    assert (head.halts, head.has_turn, head.waiting) == (KEY, True, Count(1))


def test_a_sequence_halted_by_a_cancel_says_by_whom(hands: Hands) -> None:
    _first, second, third = line(hands, 3, on_failure="halt")
    hands.act("cancel", second, by="anna")
    assert the_only(hands, second).has_turn is False
    hands.settle(hands.claim_one(), DONE)
    assert the_only(hands, third).why == "cancelled by anna"


def test_a_replayed_job_waits_behind_the_head_that_halts_its_sequence(hands: Hands) -> None:
    first, second, _third = line(hands, 3)
    hands.settle(hands.claim_one(), HOPELESS)
    hands.change(second, on_failure="halt")
    hands.settle(hands.claim_one(), HOPELESS)
    hands.act("replay", first)

    reason = the_only(hands, first)

    assert (reason.code, reason.head, reason.ahead) == ("sequence-halted", second, Count(1))


def test_reasons_stand_in_the_order_in_which_they_must_be_cleared(hands: Hands) -> None:
    line(hands, 1)
    job = hands.enqueue(sequence=KEY, process_in=60, queue="mail")
    hands.admit()
    hands.act("pause", job)
    hands.act("pause_sequence", KEY)
    hands.act("pause_queue", "mail")
    assert reasons(hands, job) == [
        "job-paused", "sequence-paused", "behind-head", "delayed", "queue-paused", "no-worker",
    ]  # fmt: skip


def test_what_the_head_waits_for_too_is_told_once(hands: Hands) -> None:
    _first, second = line(hands, 2)
    hands.clock.advance(minutes=5)
    found = explain(hands, second)
    assert [r.code for r in found.reasons] == ["behind-head", "no-worker"]
    assert found.text.count("No worker is alive") == 1


# ---- workers -------------------------------------------------------------------------------------


def test_it_says_that_no_worker_is_alive_or_serves_the_queue(hands: Hands) -> None:
    mail, job = hands.enqueue(queue="mail"), hands.enqueue()
    assert the_only(hands, mail) == explanations.NoWorker(queue="mail", live_workers=1)
    hands.clock.advance(seconds=61)
    assert the_only(hands, job) == explanations.NoWorker(queue="default", live_workers=0)


def test_a_worker_without_the_code_does_not_count(hands: Hands) -> None:
    job = hands.enqueue("rare")
    assert the_only(hands, job) == explanations.UnknownKind(
        queue="default", kind="rare", workers=("worker-1",)
    )
    announce(hands, "worker-2", kinds=["rare"])
    assert the_only(hands, job).code == "waiting-for-worker"


def test_a_queue_is_saturated_when_all_slots_for_the_kind_are_in_use(hands: Hands) -> None:
    announce(hands, "worker-1", {"default": 2})
    announce(hands, "worker-2", {"default": 5}, kinds=["rare"])
    hands.enqueue_many(5)
    hands.claim(2)
    last = hands.enqueue()

    assert the_only(hands, last) == explanations.Saturated(
        queue="default", workers=1, slots=2, ahead=Count(3)
    )
    announce(hands, "worker-3")
    assert the_only(hands, last) == explanations.WaitingForWorker(
        queue="default", workers=2, ahead=Count(3)
    )


# ---- running, ended ------------------------------------------------------------------------------


def test_a_running_job_names_its_worker_and_its_lease(hands: Hands) -> None:
    job = hands.enqueue()
    hands.claim_one()
    reason = the_only(hands, job)
    assert isinstance(reason, explanations.Running)
    assert (reason.worker, reason.attempt) == ("worker-1", 1)
    assert reason.until == hands.clock.now() + timedelta(minutes=1)
    hands.act("cancel", job)
    assert "It was asked to stop at" in the_only(hands, job).sentence


def test_a_worker_of_which_nothing_is_heard_is_presumed_dead(hands: Hands) -> None:
    job = hands.enqueue()
    hands.claim_one(worker="gone", lease=timedelta(hours=1))
    reason = the_only(hands, job)
    assert isinstance(reason, explanations.WorkerLost)
    assert (reason.worker, reason.last_seen, reason.is_over) == ("gone", None, False)


def test_a_lease_that_ran_out_is_a_lost_worker_though_it_lives(hands: Hands) -> None:
    job = hands.enqueue()
    hands.claim_one(lease=timedelta(seconds=30))
    hands.clock.advance(seconds=30)
    reason = the_only(hands, job)
    assert (reason.code, reason.is_over) == ("worker-lost", True)


def completed(hands: Hands) -> None:
    hands.settle(hands.claim_one(), DONE)


def discarded(hands: Hands) -> None:
    hands.settle(hands.claim_one(), Discarded(BROKE))


def cancelled_by_itself(hands: Hands) -> None:
    hands.settle(hands.claim_one(), CancelledOutcome(BROKE))


def cancelled_while_it_ran(hands: Hands) -> None:
    run = hands.claim_one()
    hands.act("cancel", run.id, by="anna")
    hands.settle(run, DONE)


def skipped(hands: Hands) -> None:
    (job,) = [row for row in hands.rows() if row.state == "available"]
    hands.change(job.id, on_failure="halt", sequence_key=KEY, sequence_open=True, admitted=True)
    discarded(hands)
    hands.act("skip", job.id, by="anna")


@pytest.mark.parametrize(
    ("end", "code", "by", "told"),
    [
        (completed, "completed", None, "It was completed at 2030-01-01 12:00:00 UTC."),
        (discarded, "discarded", None, "UTC: ValueError: it broke. It is a dead letter"),
        (cancelled_by_itself, "cancelled", None, "It was cancelled at"),
        (cancelled_while_it_ran, "cancelled", "anna", "UTC by anna."),
        (skipped, "completed", "anna", "completed as skipped at 2030-01-01 12:00:00 UTC by anna."),
    ],
)
def test_an_ended_job_says_how_it_ended(
    hands: Hands, end: Callable[[Hands], None], code: str, by: str | None, told: str
) -> None:
    job = hands.enqueue()
    end(hands)
    reason = the_only(hands, job)
    assert (reason.code, reason.by) == (code, by)
    assert told in reason.sentence
    assert explain(hands, job).text.startswith(f"Job {job} (work, queue default) was ")


@pytest.mark.parametrize("job_id", [4711, 0, -1, 2**63])
def test_an_unknown_id_is_an_error(hands: Hands, job_id: int) -> None:
    with pytest.raises(JobNotFoundError):
        explain(hands, job_id)
