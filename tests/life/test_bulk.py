"""People's verbs on all jobs that a filter means: what is done, what is refused, and why."""

from typing import Any

import pytest

from cyclone_sqla import BulkReport, InvalidJobError, JobFilter
from tests.databases import Database
from tests.life.hands import DONE, HOPELESS, Hands


def states(hands: Hands, ids: list[int]) -> list[str]:
    return [hands.job(job_id).state for job_id in ids]


def done(report: BulkReport) -> list[int]:
    return [ref.id for ref in report.done]


def dead_letters(hands: Hands, count: int, **options: Any) -> list[int]:
    ids = [hands.enqueue(**options) for _ in range(count)]
    for job in hands.claim(count):
        hands.settle(job, HOPELESS)
    return ids


def test_a_verb_is_done_to_all_that_the_filter_means_and_to_no_other(hands: Hands) -> None:
    mail = [hands.enqueue(queue="mail") for _ in range(3)]
    others = [hands.enqueue() for _ in range(2)]

    report = hands.act("cancel_many", JobFilter(queue="mail"), by="anna")

    assert (done(report), report.refused, report.after) == (mail, (), None)
    assert {ref.state for ref in report.done} == {"cancelled"}
    assert states(hands, [*mail, *others]) == ["cancelled"] * 3 + ["available"] * 2
    assert [(e.event, e.actor) for e in hands.history(mail[0])] == [("cancel", "anna")]


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume", "replay", "skip", "reschedule"])
def test_a_preview_foretells_what_the_verb_does_and_changes_nothing(
    hands: Hands, verb: str
) -> None:
    for key in ("k", "k", "twice", "twice"):
        dead_letters(hands, 1, unique=key)
    hands.enqueue(unique="k")
    hands.act("pause", hands.enqueue())
    hands.claim_one()
    hands.enqueue(process_in=60)
    hands.act("cancel", hands.enqueue())
    options = {"process_in": 5} if verb == "reschedule" else {}
    before = hands.rows()

    for state in ("available", "discarded", "paused", None):
        wanted = JobFilter(kind="work", state=state)
        preview = hands.act(f"{verb}_many", wanted, preview=True, **options)
        assert hands.rows() == before
        with hands.engine.connect() as connection:  # and is not committed
            act = getattr(hands.cyclone, f"{verb}_many")
            report = act(connection, wanted, **options)
        assert done(report) == done(preview)
        assert report.refused == preview.refused
        assert (preview.is_preview, report.is_preview) == (True, False)


def test_batches_go_on_where_the_last_one_ended(hands: Hands) -> None:
    ids = hands.enqueue_many(5)
    wanted, seen, after = JobFilter(state="available"), list[list[int]](), 0
    while after is not None:
        report = hands.act("pause_many", wanted, after=after, limit=2)
        seen.append(done(report))
        after = report.after
    assert seen == [ids[:2], ids[2:4], ids[4:]]


def test_without_a_state_only_jobs_that_the_verb_fits_are_looked_at(hands: Hands) -> None:
    hands.enqueue()
    hands.settle(hands.claim_one(), DONE)
    waiting = hands.enqueue()
    report = hands.act("pause_many", JobFilter(kind="work"))
    assert (done(report), report.refused) == ([waiting], ())


def test_a_state_that_does_not_allow_the_verb_is_refused_by_job_with_the_reason(
    hands: Hands,
) -> None:
    (dead,) = dead_letters(hands, 1)
    report = hands.act("cancel_many", JobFilter(state="discarded"))
    (refused,) = report.refused
    assert refused.job_id == dead
    assert (
        refused.why == f"job {dead} is discarded, so it can't be cancelled; it allows: replay, skip"
    )


def test_a_replay_is_refused_where_its_unique_key_is_taken_and_the_others_are_done(
    hands: Hands,
) -> None:
    first = dead_letters(hands, 1, unique="a")[0]
    second = dead_letters(hands, 1, unique="a")[0]
    third = dead_letters(hands, 1, unique="b")[0]

    report = hands.act("replay_many", JobFilter(dead_letter=True))

    assert done(report) == [first, third]
    (refused,) = report.refused
    assert refused.job_id == second
    assert f"job {first}" in refused.why
    assert states(hands, [first, second, third]) == ["available", "discarded", "available"]


def test_only_dead_letters_and_halted_heads_are_skipped(hands: Hands) -> None:
    (dead,) = dead_letters(hands, 1)
    head = hands.enqueue(sequence="s", on_failure="halt")
    hands.admit()
    hands.settle(hands.claim_one(), HOPELESS)
    cancelled = hands.enqueue()
    hands.act("cancel", cancelled)

    report = hands.act("skip_many", JobFilter(kind="work"))

    assert done(report) == [dead, head]
    assert [(r.job_id, "nothing to skip" in r.why) for r in report.refused] == [(cancelled, True)]


def test_an_empty_filter_is_refused(hands: Hands) -> None:
    job = hands.enqueue()
    with pytest.raises(InvalidJobError, match="empty"):
        hands.act("cancel_many", JobFilter())
    assert states(hands, [job]) == ["available"]


@pytest.mark.parametrize("limit", [0, 10_001])
def test_a_batch_has_a_size_that_can_be(hands: Hands, limit: int) -> None:
    with pytest.raises(InvalidJobError, match="limit"):
        hands.act("cancel_many", JobFilter(kind="work"), limit=limit)


def test_a_job_that_somebody_has_locked_is_refused_and_not_waited_for(
    postgresql_database: Database,
) -> None:
    hands = Hands(postgresql_database)
    first, second = hands.enqueue_many(2)
    with hands.engine.begin() as other:
        hands.cyclone.pause(other, first)
        report = hands.act("cancel_many", JobFilter(kind="work"))
    assert done(report) == [second]
    assert [(r.job_id, r.why) for r in report.refused] == [
        (first, f"job {first} is in use by somebody else")
    ]
    hands.close()
