"""Sequences: the jobs of one key run one at a time, in the order in which they were enqueued.

What a user may expect of them is in the contract; here is how it comes about.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from cyclone_sqla import (
    Cyclone,
    DuplicateError,
    DuplicatePositionError,
    InvalidJobError,
    InvalidTransitionError,
    JobSpec,
    SequenceGapError,
    State,
)
from cyclone_sqla.operations import Retention, prune
from cyclone_sqla.outcomes import CancelledOutcome, GivenBack, Outcome
from tests.life.hands import BROKE, DONE, FAILED, HOPELESS, MINUTE, NOT_NOW, Hands

HOUR = timedelta(hours=1)
KEY = "account-42"


def line(hands: Hands, count: int, **options: Any) -> list[int]:
    """Enqueue jobs of the key, each in a transaction of its own, and have them admitted."""
    ids = [hands.enqueue(**{"sequence": KEY, **options}) for _ in range(count)]
    hands.admit()
    return ids


def run(hands: Hands, outcome: Outcome = DONE) -> int:
    """Claim the only job there is, and settle it; its id."""
    (job,) = hands.claim()
    hands.settle(job, outcome)
    return job.id


def drain(hands: Hands) -> list[int]:
    """Run jobs one after the other until nothing is claimable; their ids in that order."""
    order: list[int] = []
    while True:
        hands.admit()
        jobs = hands.claim()
        if not jobs:
            return order
        for job in jobs:
            hands.settle(job, DONE)
            order.append(job.id)


def prune_all(hands: Hands) -> None:
    """Retention has its way with everything that it may have."""
    hands.clock.advance(days=1000)
    for state in (State.COMPLETED, State.DISCARDED, State.CANCELLED):
        for dead_letters in (False, True):
            with hands.transaction() as connection:
                prune(
                    connection,
                    hands.dialect,
                    Retention(state, HOUR, dead_letters),
                    None,
                    1000,
                )


def there(hands: Hands) -> set[int]:
    """The ids of all jobs."""
    return {row.id for row in hands.rows() if hasattr(row, "kind")}


# ---- the rule ------------------------------------------------------------------------------------


def test_a_job_with_a_key_waits_for_a_worker_to_give_it_its_place(hands: Hands) -> None:
    job_id = hands.enqueue(sequence=KEY)

    assert (hands.job(job_id).state, hands.job(job_id).waits_for) == ("pending", "admission")
    assert hands.claim() == []
    assert hands.admit() == ["default"]
    assert hands.claim_one().id == job_id


def test_a_waiting_job_becomes_claimable_by_the_very_end_of_the_one_before(hands: Hands) -> None:
    first, second = line(hands, 2)
    job = hands.claim_one()
    assert (hands.job(second).state, hands.job(second).waits_for) == ("pending", "turn")

    hands.settle(job, DONE)

    assert hands.job(first).admitted is None
    assert hands.job(second).state == "available"


def test_a_job_that_is_admitted_together_with_its_followers_is_the_head(hands: Hands) -> None:
    ids = hands.enqueue_many(4, sequence=KEY)

    assert hands.admit() == ["default"]

    assert [hands.job(i).state for i in ids] == ["available", *["pending"] * 3]
    assert drain(hands) == ids


@pytest.mark.parametrize("state", ["available", "running"])
def test_the_database_itself_lets_nothing_but_a_head_run(hands: Hands, state: str) -> None:
    _, second = line(hands, 2)
    lease = {"leased_until": hands.clock.now(), "worker": "w"} if state == "running" else {}

    with pytest.raises(IntegrityError, match="turn"):
        hands.change(second, state=state, waits_for=None, **lease)
    with pytest.raises(IntegrityError):
        hands.change(second, admitted=True)


# ---- a head that is not over keeps its place -----------------------------------------------------


@pytest.mark.parametrize("outcome", [NOT_NOW, GivenBack()], ids=["snooze", "give back"])
def test_a_head_that_is_to_run_again_keeps_its_place(hands: Hands, outcome: Outcome) -> None:
    ids = line(hands, 3)
    run(hands, outcome)
    hands.admit()
    assert [hands.job(i).waits_for for i in ids[1:]] == ["turn", "turn"]
    assert all(job.id == ids[0] for job in hands.claim())

    hands.clock.advance(hours=2)
    hands.rescue()
    hands.clock.advance(hours=2)
    hands.stage()
    assert drain(hands) == ids


def test_a_waiting_job_past_its_deadline_is_judged_when_its_turn_comes(hands: Hands) -> None:
    _, late, last = [
        hands.enqueue(sequence=KEY, **options)
        for options in ({}, {"deadline": hands.clock.now() + HOUR}, {})
    ]
    hands.admit()
    hands.clock.advance(hours=2)
    assert hands.claim_one().id != late or pytest.fail("not its turn")
    hands.clock.advance(minutes=2)
    hands.rescue()
    run(hands)

    job = hands.claim_one()
    assert (job.id, job.expired) == (late, True)
    hands.settle(job, HOPELESS)
    assert hands.claim_one().id == last


# ---- failure policies ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["dead-letter", "skip", "halt"])
def test_a_head_that_cancels_itself_halts_a_halting_sequence_alone(hands: Hands, mode: str) -> None:
    ids = line(hands, 2, on_failure=mode)
    run(hands, CancelledOutcome(BROKE))

    assert (hands.job(ids[0]).state, hands.job(ids[0]).dead_letter) == ("cancelled", None)
    assert drain(hands) == ([] if mode == "halt" else ids[1:])


def test_an_incoming_job_that_is_cancelled_neither_runs_nor_blocks(hands: Hands) -> None:
    ids = [hands.enqueue(sequence=KEY) for _ in range(3)]
    hands.act("cancel", ids[0])
    assert drain(hands) == ids[1:]


def test_an_incoming_job_that_is_cancelled_in_a_halting_sequence_halts_it(hands: Hands) -> None:
    ids = [hands.enqueue(sequence=KEY, on_failure="halt") for _ in range(2)]
    hands.act("cancel", ids[0])
    assert drain(hands) == []
    hands.act("replay", ids[0])
    assert drain(hands) == ids


def test_the_mode_of_the_application_is_taken_where_a_job_names_none(hands: Hands) -> None:
    cyclone = Cyclone(hands.engine, on_failure="halt", hints=False)
    specs = [
        JobSpec(kind="work", arguments="{}", sequence=KEY),
        JobSpec(kind="work", arguments="{}", sequence="b", on_failure="skip"),
    ]
    with hands.engine.begin() as connection:
        ids = [ref.id for ref in cyclone.enqueue_many(connection, specs)]
        plain = cyclone.enqueue(connection, "work", {}).id

    assert [hands.job(i).on_failure for i in (*ids, plain)] == ["halt", "skip", None]


def test_a_callable_of_the_application_decides_by_the_job(hands: Hands) -> None:
    def mode(spec: JobSpec) -> Any:
        return "halt" if spec.sequence == KEY else "skip"

    cyclone = Cyclone(hands.engine, on_failure=mode, hints=False)
    with hands.engine.begin() as connection:
        ids = [cyclone.enqueue(connection, "work", {}, sequence=key).id for key in (KEY, "b")]
    assert [hands.job(i).on_failure for i in ids] == ["halt", "skip"]


# ---- every verb at every place -------------------------------------------------------------------


def incoming(hands: Hands) -> int:
    line(hands, 1)
    return hands.enqueue(sequence=KEY)


def turn(hands: Hands) -> int:
    return line(hands, 2)[1]


def available_head(hands: Hands) -> int:
    return line(hands, 2)[0]


def running_head(hands: Hands) -> int:
    line(hands, 2)
    return hands.claim_one().id


def paused_head(hands: Hands) -> int:
    first = available_head(hands)
    hands.act("pause", first)
    return first


def paused_in_line(hands: Hands) -> int:
    second = turn(hands)
    hands.act("pause", second)
    return second


def delayed_head(hands: Hands) -> int:
    return line(hands, 2, process_in=HOUR)[0]


def retrying_head(hands: Hands) -> int:
    line(hands, 2)
    return run(hands, FAILED)


def halted_head(hands: Hands) -> int:
    line(hands, 2, on_failure="halt")
    return run(hands, HOPELESS)


def cancelled_in_a_halting_line(hands: Hands) -> int:
    second = line(hands, 3, on_failure="halt")[1]
    hands.act("cancel", second)
    return second


def debt(hands: Hands) -> int:
    first = available_head(hands)
    hands.act("cancel", first)
    return first


def dead_letter(hands: Hands) -> int:
    line(hands, 2)
    return run(hands, HOPELESS)


def completed(hands: Hands) -> int:
    line(hands, 2)
    return run(hands)


REFUSED = None
ADMISSION, TURN, TIME = ("pending", "admission"), ("pending", "turn"), ("pending", "time")
AVAILABLE, PAUSED, RUNNING = ("available", None), ("paused", None), ("running", None)
CANCELLED, DISCARDED, COMPLETED = ("cancelled", None), ("discarded", None), ("completed", None)

VERBS = ("cancel", "pause", "resume", "replay", "skip", "reschedule")

TABLE: dict[Callable[[Hands], int], tuple[tuple[str, str | None] | None, ...]] = {
    #                  cancel     pause    resume     replay     skip       reschedule
    incoming:         (CANCELLED, PAUSED,  REFUSED,   REFUSED,   REFUSED,   ADMISSION),
    turn:             (CANCELLED, PAUSED,  REFUSED,   REFUSED,   REFUSED,   ADMISSION),
    paused_in_line:   (CANCELLED, REFUSED, ADMISSION, REFUSED,   REFUSED,   REFUSED),
    available_head:   (CANCELLED, PAUSED,  REFUSED,   REFUSED,   REFUSED,   TIME),
    delayed_head:     (CANCELLED, PAUSED,  REFUSED,   REFUSED,   REFUSED,   TIME),
    retrying_head:    (CANCELLED, PAUSED,  REFUSED,   REFUSED,   REFUSED,   TIME),
    running_head:     (RUNNING,   REFUSED, REFUSED,   REFUSED,   REFUSED,   REFUSED),
    paused_head:      (CANCELLED, REFUSED, AVAILABLE, REFUSED,   REFUSED,   REFUSED),
    halted_head:      (REFUSED,   REFUSED, REFUSED,   AVAILABLE, COMPLETED, REFUSED),
    cancelled_in_a_halting_line:
                      (REFUSED,   REFUSED, REFUSED,   ADMISSION, COMPLETED, REFUSED),
    debt:             (REFUSED,   REFUSED, REFUSED,   AVAILABLE, REFUSED,   REFUSED),
    dead_letter:      (REFUSED,   REFUSED, REFUSED,   ADMISSION, DISCARDED, REFUSED),
    completed:        (REFUSED,   REFUSED, REFUSED,   REFUSED,   REFUSED,   REFUSED),
}  # fmt: skip


@pytest.mark.parametrize("place", TABLE, ids=lambda place: place.__name__)
def test_every_verb_has_its_answer_at_every_place_in_a_line(
    hands: Hands, place: Callable[[Hands], int]
) -> None:
    for verb, expected in zip(VERBS, TABLE[place], strict=True):
        job_id = place(hands)
        before, entries = hands.job(job_id), len(hands.history(job_id))
        options = {"process_in": 600} if verb == "reschedule" else {}
        if expected is REFUSED:
            with pytest.raises(InvalidTransitionError, match=before.state):
                hands.act(verb, job_id, by="anna", **options)
            assert vars_of(hands.job(job_id)) == vars_of(before), verb
            assert len(hands.history(job_id)) == entries
        else:
            ref = hands.act(verb, job_id, by="anna", **options)
            after = hands.job(job_id)
            assert (after.state, after.waits_for) == expected, verb
            assert (ref.id, ref.state, ref.created) == (job_id, after.state, False)
            assert [e.event for e in hands.history(job_id)][entries:] == [verb]
        assert_line_is_sound(hands)
        finish_line(hands)


def assert_line_is_sound(hands: Hands) -> None:
    """Whoever waits for its turn has a head before it, also after a worker's look."""
    for _ in range(2):
        rows = [row for row in hands.rows() if getattr(row, "sequence_key", None)]
        heads = [row for row in rows if row.admitted]
        assert len(heads) <= 1
        if any(row.waits_for == "turn" for row in rows):
            assert len(heads) == 1
        hands.admit()


def finish_line(hands: Hands) -> None:
    """Whatever happened, the line can be brought to its end; nothing is left of it."""
    for job in [row for row in hands.rows() if hasattr(row, "kind")]:
        state = hands.job(job.id).state
        if state == "paused":
            hands.act("resume", job.id)
        if state in ("discarded", "cancelled") and job.sequence_open:
            hands.act("skip", job.id)
    hands.clock.advance(hours=3)
    hands.rescue()
    hands.clock.advance(hours=3)
    hands.stage()
    drain(hands)
    for row in [row for row in hands.rows() if hasattr(row, "kind")]:
        if row.sequence_open and row.state in ("discarded", "cancelled"):
            hands.act("skip", row.id)
    drain(hands)
    open_rows = [row for row in hands.rows() if getattr(row, "sequence_open", None)]
    assert open_rows == []
    prune_all(hands)


def vars_of(job: object) -> dict[str, object]:
    return {name: value for name, value in vars(job).items() if not name.startswith("_")}


def test_a_replayed_job_runs_next_and_afresh_under_a_later_lease(hands: Hands) -> None:
    ids = line(hands, 4, max_attempts=1)
    failed = hands.claim_one()
    hands.settle(failed, HOPELESS)
    second = hands.claim_one()

    hands.act("replay", ids[0], arguments={"fixed": True})
    hands.admit()
    assert hands.claim() == []
    hands.settle(second, DONE)

    again = hands.claim_one()
    assert (again.id, again.attempt, again.arguments) == (ids[0], 1, '{"fixed":true}')
    assert again.lease > second.lease > failed.lease
    assert hands.settle(failed, DONE).refused == {ids[0]: None}
    hands.settle(again, DONE)
    assert drain(hands) == ids[2:]


def test_a_replay_into_a_halted_sequence_waits_behind_its_head(hands: Hands) -> None:
    ids = line(hands, 3, on_failure="dead-letter")
    run(hands, HOPELESS)
    hands.change(ids[1], on_failure="halt")
    run(hands, HOPELESS)
    hands.act("replay", ids[0])
    assert drain(hands) == []
    hands.act("skip", ids[1])
    assert drain(hands) == [ids[0], ids[2]]


def test_a_replay_is_refused_where_another_job_holds_its_unique_key(hands: Hands) -> None:
    (first,) = line(hands, 1, unique="u")
    run(hands, HOPELESS)
    (second,) = line(hands, 1, unique="u")

    with pytest.raises(DuplicateError) as caught:
        hands.act("replay", first)
    assert caught.value.job is not None
    assert caught.value.job.id == second
    assert hands.job(first).state == "discarded"


# ---- pause of a queue and of a sequence ----------------------------------------------------------


def test_nobody_claims_from_a_paused_queue_and_it_stays_so(hands: Hands) -> None:
    ids = line(hands, 2)
    plain = hands.enqueue(queue="other")
    hands.act("pause_queue", "default", by="anna")
    queues = ("default", "other")
    assert [job.id for job in hands.claim(queues=queues)] == [plain]
    assert hands.claim(queues=queues, worker="started later") == []

    assert hands.act("resume_queue", "default") is True
    assert hands.act("resume_queue", "default") is False
    assert drain(hands) == ids


def test_neither_a_lapsed_lease_nor_a_due_retry_starts_anything_in_a_paused_queue(
    hands: Hands,
) -> None:
    lapsed, failed = hands.enqueue_many(2)
    hands.settle(hands.claim()[1], FAILED)
    hands.act("pause_queue", "default")
    hands.clock.advance(minutes=2)
    assert list(hands.rescue().states) == [lapsed]
    assert hands.stage() == ["default"]
    for number in range(3):
        assert hands.claim(worker=f"started later {number}") == []

    hands.act("resume_queue", "default")
    assert sorted(job.id for job in hands.claim()) == [lapsed, failed]


@pytest.mark.parametrize("moment", ["before any job", "incoming", "ready", "running", "delayed"])
def test_no_job_of_a_paused_sequence_starts_until_it_is_resumed(hands: Hands, moment: str) -> None:
    count = 3
    ids: list[int] = []
    if moment == "incoming":
        ids = [hands.enqueue(sequence=KEY) for _ in range(count)]
    elif moment != "before any job":
        ids = line(hands, count, process_in=HOUR if moment == "delayed" else 0)
    running = [hands.claim_one()] if moment == "running" else []

    hands.act("pause_sequence", KEY, by="anna")
    ids = ids or line(hands, count)
    for job in running:
        hands.settle(job, DONE)
    hands.clock.advance(hours=2)
    hands.stage()
    assert drain(hands) == []
    other = line(hands, 1, sequence="another")
    assert drain(hands) == other

    assert hands.act("resume_sequence", KEY) is True
    assert hands.act("resume_sequence", KEY) is False
    assert drain(hands) == ids[len(running) :]


def test_a_retry_a_resume_and_a_replay_in_a_paused_sequence_wait_for_its_end(hands: Hands) -> None:
    ids = line(hands, 2, on_failure="halt")
    job = hands.claim_one()
    hands.act("pause_sequence", KEY)
    hands.settle(job, FAILED)
    hands.clock.advance(hours=1)
    hands.stage()
    hands.act("pause", ids[0])
    hands.act("resume", ids[0])
    hands.act("cancel", ids[0])
    hands.act("replay", ids[0])
    assert drain(hands) == []

    hands.act("resume_sequence", KEY)
    assert drain(hands) == ids


def test_a_head_held_back_though_nobody_pauses_its_sequence_is_let_go(hands: Hands) -> None:
    """Its admission read the pause just before the pause's end was committed."""
    ids = line(hands, 2)
    hands.change(ids[0], state="pending", waits_for="turn")

    assert hands.admit() == ["default"]
    assert drain(hands) == ids


# ---- explicit positions --------------------------------------------------------------------------


def numbered(hands: Hands, *positions: int, **options: Any) -> list[int]:
    """Enqueue jobs at these positions of the key, and have them admitted."""
    ids = [hands.enqueue(sequence=KEY, position=place, **options) for place in positions]
    hands.admit()
    return ids


def test_the_first_position_is_one_and_nothing_runs_before_it(hands: Hands) -> None:
    (second,) = numbered(hands, 2)
    assert drain(hands) == []
    (first,) = numbered(hands, 1)
    assert drain(hands) == [first, second]


@pytest.mark.parametrize("position", [0, -1, True, 1.0, "1"])
def test_a_position_is_a_whole_number_from_one_on(hands: Hands, position: Any) -> None:
    with pytest.raises(InvalidJobError, match="position"):
        hands.enqueue(sequence=KEY, position=position)


def test_a_position_without_a_sequence_is_refused(hands: Hands) -> None:
    with pytest.raises(InvalidJobError, match="sequence"):
        hands.enqueue(position=1)


def test_a_taken_position_is_refused_and_names_its_job(hands: Hands) -> None:
    (first,) = numbered(hands, 1)
    for _ in range(2):
        with pytest.raises(DuplicatePositionError) as caught:
            hands.enqueue(sequence=KEY, position=1)
        assert (caught.value.key, caught.value.position) == (KEY, 1)
        assert caught.value.job_id == first
        drain(hands)


def test_a_position_stays_taken_when_retention_has_removed_its_job(hands: Hands) -> None:
    numbered(hands, 1, 2)
    drain(hands)
    prune_all(hands)
    assert there(hands) == set()

    for place in (1, 2):
        with pytest.raises(DuplicatePositionError) as caught:
            hands.enqueue(sequence=KEY, position=place)
        assert caught.value.job_id is None
    assert drain(hands) == []
    ids = numbered(hands, 4, 3)
    assert drain(hands) == [ids[1], ids[0]]


def test_retention_keeps_what_alone_says_that_a_position_above_a_gap_is_over(hands: Hands) -> None:
    ids = numbered(hands, 1, 2, 3, 4)
    hands.act("cancel", ids[2])
    prune_all(hands)
    assert drain(hands) == [ids[0], ids[1], ids[3]]

    prune_all(hands)
    assert there(hands) == set()


def test_reject_gap_refuses_a_position_whose_predecessor_is_not_there(hands: Hands) -> None:
    with pytest.raises(SequenceGapError) as caught:
        hands.enqueue(sequence=KEY, position=2, reject_gap=True)
    assert (caught.value.key, caught.value.position) == (KEY, 2)
    first = hands.enqueue(sequence=KEY, position=1, reject_gap=True)
    second = hands.enqueue(sequence=KEY, position=2, reject_gap=True)
    assert drain(hands) == [first, second]
    prune_all(hands)
    assert drain(hands) == []
    third = hands.enqueue(sequence=KEY, position=3, reject_gap=True)
    assert drain(hands) == [third]


def test_a_position_beside_jobs_without_one_is_refused(hands: Hands) -> None:
    ids = line(hands, 2)
    with pytest.raises(InvalidJobError, match="without positions"):
        hands.enqueue(sequence=KEY, position=1)
    assert drain(hands) == ids
    numbered(hands, 1)
    assert len(drain(hands)) == 1


def test_a_job_without_a_position_in_a_numbered_key_has_no_place_and_blocks_nobody(
    hands: Hands,
) -> None:
    ids = numbered(hands, 1, 2)
    stray = hands.enqueue(sequence=KEY)
    assert drain(hands) == ids
    assert (hands.job(stray).state, hands.job(stray).waits_for) == ("pending", "admission")


def test_a_refused_position_leaves_the_key_to_jobs_without_one(hands: Hands) -> None:
    holder = hands.enqueue(unique="u")
    with hands.engine.begin() as connection:
        with pytest.raises(DuplicateError):
            hands.cyclone.enqueue(connection, "work", {}, sequence=KEY, position=1, unique="u")
        specs = [
            JobSpec(kind="work", arguments="{}", sequence=KEY, position=1),
            JobSpec(kind="work", arguments="{}", sequence="other", position=2, reject_gap=True),
        ]
        with pytest.raises(SequenceGapError):
            hands.cyclone.enqueue_many(connection, specs)

    (plain,) = line(hands, 1)
    assert drain(hands) == [holder, plain]


def test_a_replayed_position_runs_before_later_ones(hands: Hands) -> None:
    ids = numbered(hands, 1, 2, 3, 4)
    run(hands, HOPELESS)
    run(hands, DONE)
    hands.act("replay", ids[0])
    hands.admit()
    assert drain(hands) == [ids[2], ids[0], ids[3]]


def test_a_failed_position_releases_the_next_one_or_halts(hands: Hands) -> None:
    ids = numbered(hands, 1) + numbered(hands, 2, 3, on_failure="halt")
    run(hands, HOPELESS)
    run(hands, HOPELESS)
    assert drain(hands) == []
    hands.act("skip", ids[1])
    assert drain(hands) == [ids[2]]


# ---- many at once --------------------------------------------------------------------------------


def test_many_jobs_of_many_keys_run_in_input_order_of_each_key(hands: Hands) -> None:
    specs = [
        JobSpec(kind="work", arguments="{}", sequence=f"key-{n % 3}", unique=f"{-n}")
        for n in range(30)
    ]
    with hands.engine.begin() as connection:
        ids = [ref.id for ref in hands.cyclone.enqueue_many(connection, specs)]

    order = drain(hands)
    for key in range(3):
        assert [job_id for job_id in order if ids.index(job_id) % 3 == key] == ids[key::3]


def test_many_positions_go_in_together_whatever_their_order(hands: Hands) -> None:
    places = [("a", 3), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    specs = [
        JobSpec(kind="work", arguments="{}", sequence=key, position=place, reject_gap=True)
        for key, place in places
    ]
    specs.append(JobSpec(kind="work", arguments="{}", sequence="c"))
    with hands.engine.begin() as connection:
        ids = [ref.id for ref in hands.cyclone.enqueue_many(connection, specs)]

    order = drain(hands)
    assert [i for i in order if i in (ids[0], ids[2], ids[3])] == [ids[2], ids[3], ids[0]]
    assert [i for i in order if i in (ids[1], ids[4])] == [ids[1], ids[4]]
    assert ids[5] in order


@pytest.mark.parametrize(
    "bad",
    [
        JobSpec(kind="work", arguments="{}", sequence=KEY, position=1),
        JobSpec(kind="work", arguments="{}", sequence="other", position=2, reject_gap=True),
        JobSpec(kind="work", arguments="{}", sequence="new", position=1, unique="held"),
    ],
    ids=["taken", "gap", "duplicate"],
)
def test_one_refused_job_of_many_means_that_none_goes_in(hands: Hands, bad: JobSpec) -> None:
    numbered(hands, 1)
    hands.enqueue(unique="held")
    before = hands.rows()
    good = [
        JobSpec(kind="work", arguments="{}", sequence="other"),
        JobSpec(kind="work", arguments="{}", sequence=KEY, position=2),
        JobSpec(kind="work", arguments="{}", unique="free"),
        JobSpec(kind="work", arguments="{}", sequence="third", position=1),
    ]
    with (
        hands.engine.begin() as connection,
        pytest.raises((DuplicateError, DuplicatePositionError, SequenceGapError, InvalidJobError)),
    ):
        hands.cyclone.enqueue_many(connection, [*good, bad])

    assert hands.rows() == before


# ---- retention -----------------------------------------------------------------------------------


def test_retention_never_removes_a_head_or_what_still_owes_its_place(hands: Hands) -> None:
    ids = line(hands, 3, on_failure="halt")
    run(hands, HOPELESS)
    prune_all(hands)
    assert there(hands) == set(ids)

    hands.act("skip", ids[0])
    assert hands.job(ids[0]).admitted
    prune_all(hands)
    assert there(hands) == set(ids)
    assert drain(hands) == ids[1:]
    prune_all(hands)
    assert there(hands) == set()


def test_retention_removes_what_was_cancelled_before_its_turn_unless_it_is_to_halt(
    hands: Hands,
) -> None:
    passed = line(hands, 3)
    halting = line(hands, 3, sequence="halting", on_failure="halt")
    for job_id in (passed[1], halting[1]):
        hands.act("cancel", job_id)
    prune_all(hands)

    assert there(hands) == {passed[0], passed[2], *halting}
    assert drain(hands) == [passed[0], halting[0], passed[2]]


def test_a_released_head_of_an_empty_line_owes_nothing(hands: Hands) -> None:
    (only,) = line(hands, 1)
    hands.act("cancel", only)
    hands.admit()
    assert hands.job(only).admitted is None
    prune_all(hands)
    assert there(hands) == set()


def test_a_settle_after_its_lease_was_lost_moves_nobody(hands: Hands) -> None:
    line(hands, 3)
    lost = hands.claim_one(lease=MINUTE)
    hands.clock.advance(minutes=2)
    hands.rescue()
    again = hands.claim_one()
    before = hands.rows()

    assert hands.settle(lost, DONE).refused == {lost.id: None}
    assert hands.rows() == before
    assert hands.settle(again, DONE).states == {again.id: State.COMPLETED}
