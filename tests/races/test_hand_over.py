"""A head's end and the claim of the next in its line, by one call: it gives what a claim would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.dialects import floors
from cyclone_sqla.dialects.postgresql import PostgresDialect
from cyclone_sqla.lifecycle import State
from cyclone_sqla.operations import settle_and_claim
from tests.races.actors import Application, Race, Worker
from tests.races.test_admission import ON_THE_NEXT, claimed, line

Act = Callable[[Application, int], Any]


def updates_in(worker: Worker) -> int:
    """How many rows of jobs its connection has updated, in its open transaction at least."""
    look = "SELECT pg_stat_get_xact_tuples_updated('cyclone_job'::regclass)"
    count = worker.connection.scalar(sa.text(look))
    assert isinstance(count, int)
    return count


def test_the_next_in_line_is_claimed_as_it_becomes_the_head(race: Race) -> None:
    first, second, third = line(race, 3)
    worker = race.worker()
    job = claimed(race, worker)
    before = updates_in(worker)

    (following,) = worker.complete_and_claim([job], 1)

    assert updates_in(worker) - before == 2, "the next was made ready before it was claimed"
    worker.commit()
    race.check()
    assert (following.id, following.attempt, following.sequence_key) == (second, 1, "k")
    assert following.lease > job.lease
    assert [race.state(id_) for id_ in (first, second, third)] == [
        "completed", "running", "pending/turn",
    ]  # fmt: skip


def test_a_hand_over_takes_one_of_the_free_slots(race: Race) -> None:
    worker = race.worker()
    _, second = line(race, 2)
    job = claimed(race, worker)
    others = [line(race, 1, key=f"other-{n}")[0] for n in range(3)]

    following = worker.complete_and_claim([job], 3)
    worker.commit()

    assert sorted(job.id for job in following) == [second, *others[:2]]


def test_where_the_next_is_enough_others_are_looked_for_when_the_line_has_ended(
    race: Race,
) -> None:
    worker = race.worker()
    _, second = line(race, 2)
    job = claimed(race, worker)
    others = [line(race, 1, key=f"other-{n}")[0] for n in range(3)]

    (following,) = worker.complete_and_claim([job], 3, only_next=True)
    assert following.id == second
    rest = worker.complete_and_claim([following], 3, only_next=True)
    worker.commit()

    assert [job.id for job in rest] == others


NOT_YET: dict[str, tuple[Act, str]] = {
    "a later time": (
        lambda person, id_: person.act("reschedule", id_, process_in=60),
        "pending/time",
    ),
    "a pause": (lambda person, id_: person.act("pause", id_), "paused"),
    "a pause of the sequence": (
        lambda person, _: person.act("pause_sequence", "k"),
        "pending/turn",
    ),
    "a pause of the queue": (lambda person, _: person.act("pause_queue", "default"), "available"),
}


@pytest.mark.parametrize("why", NOT_YET)
def test_what_a_claim_would_not_take_becomes_the_head_and_is_not_handed_over(
    race: Race, why: str
) -> None:
    act, state = NOT_YET[why]
    _, second, third = line(race, 3)
    worker, person = race.worker(), race.application()
    job = claimed(race, worker)
    act(person, second)
    person.commit()
    if race.state(second) == "pending/admission":  # the act sent it back in line
        worker.settle_down()

    assert worker.complete_and_claim([job], 5) == []
    worker.commit()

    race.check()
    assert (race.state(second), race.state(third)) == (state, "pending/turn")
    assert [row.id for row in race.rows() if row.admitted] == [second]


@pytest.mark.parametrize("what", ["kind", "queue"])
def test_a_job_that_this_worker_does_not_serve_is_not_handed_to_it(race: Race, what: str) -> None:
    application, worker = race.application(), race.worker()
    first = application.enqueue("k")
    kind = "strange" if what == "kind" else "work"
    queue = "strange" if what == "queue" else "default"
    options = {"sequence": "k", "queue": queue}
    second = race.cyclone.enqueue(application.connection, kind, {}, **options).id
    application.commit()
    worker.settle_down()
    job = claimed(race, worker)
    assert job.id == first

    assert worker.complete_and_claim([job], 5) == []
    worker.commit()

    race.check()
    assert race.state(second) == "available"


@pytest.mark.parametrize("ends_well", [True, False], ids=["commits", "rolls back"])
@pytest.mark.parametrize("verb", ON_THE_NEXT)
def test_a_next_that_somebody_has_locked_is_not_waited_for_and_the_line_goes_on(
    race: Race, verb: str, ends_well: bool
) -> None:
    ids = line(race, 3)
    worker, person = race.worker(), race.application()
    job = claimed(race, worker)
    ON_THE_NEXT[verb](person, ids[1])

    assert worker.complete_and_claim([job], 5) == []
    worker.commit()
    race.check()
    assert [row.id for row in race.rows() if row.admitted] == [ids[0]], "its place is a debt"
    (person.commit if ends_well else person.roll_back)()

    expected = {"cancel": ids[2:], "pause": [], "reschedule": ids[1:]}[verb]
    assert race.drain(worker) == (expected if ends_well else ids[1:])


def test_positions_are_handed_over_in_order_and_a_gap_is_waited_for(race: Race) -> None:
    application, worker = race.application(), race.worker()
    at = {n: application.enqueue("k", position=n) for n in (1, 2, 4)}
    application.commit()
    worker.settle_down()

    (following,) = worker.complete_and_claim([claimed(race, worker)], 5)
    worker.commit()
    assert following.id == at[2]
    assert worker.complete_and_claim([following], 5) == []
    worker.commit()

    assert race.state(at[4]) == "pending/turn"
    at[3] = application.enqueue("k", position=3)
    application.commit()
    assert race.drain(worker) == [at[3], at[4]]


def test_a_run_that_lost_its_lease_hands_nothing_over(race: Race) -> None:
    _, second = line(race, 2)
    worker, other = race.worker(), race.worker()
    job = claimed(race, worker)
    race.clock.advance(minutes=2)
    other.rescue()
    other.commit()
    (again,) = other.claim()
    other.commit()

    assert worker.complete_and_claim([job], 5) == []
    worker.commit()

    race.check()
    assert (race.state(again.id), race.state(second)) == ("running", "pending/turn")


def test_a_call_tells_busy_and_refused_ends_apart(race: Race) -> None:
    line(race, 1, key="a")
    line(race, 1, key="b")
    worker, person, other = race.worker(), race.application(), race.worker()
    busy, lost = sorted(worker.claim(), key=lambda job: job.id)
    worker.commit()
    other.settle(lost)
    other.commit()
    person.act("cancel", busy.id)

    batch, wanted = worker.ends_of([busy, lost]), worker.wanted(5, hands_over=True)
    settled, _ = settle_and_claim(worker.connection, race.dialect, batch, wanted, history_limit=5)

    assert settled.busy == [busy.id]
    assert settled.refused == {lost.id: State.COMPLETED}


def lines_begun(race: Race, worker: Worker, keys: str) -> tuple[list[ClaimedJob], list[int]]:
    """The claimed heads of lines of two jobs each, and those behind them."""
    firsts, seconds = zip(*(line(race, 2, key=key) for key in keys), strict=True)
    jobs = sorted(worker.claim(), key=lambda job: job.id)
    worker.commit()
    assert [job.id for job in jobs] == list(firsts)
    return jobs, list(seconds)


def test_the_next_of_each_line_is_claimed_as_it_becomes_the_head(race: Race) -> None:
    worker = race.worker()
    jobs, seconds = lines_begun(race, worker, "abc")
    before = updates_in(worker)

    following = worker.complete_and_claim(jobs, 5)

    assert updates_in(worker) - before == 6, "some were made ready before they were claimed"
    worker.commit()
    race.check()
    assert [job.id for job in following] == seconds
    assert {race.state(id_) for id_ in seconds} == {"running"}
    assert len({job.lease for job in [*jobs, *following]}) == 6
    assert worker.complete_and_claim(following, 5) == []
    worker.commit()
    race.check()


def test_several_hand_overs_leave_the_other_slots_to_those_that_wait(race: Race) -> None:
    worker = race.worker()
    jobs, seconds = lines_begun(race, worker, "ab")
    others = [line(race, 1, key=f"other-{n}")[0] for n in range(3)]

    following = worker.complete_and_claim(jobs, 4)
    worker.commit()

    assert sorted(job.id for job in following) == [*seconds, *others[:2]]
    race.check()


def test_no_more_are_handed_over_than_there_are_slots(race: Race) -> None:
    worker = race.worker()
    jobs, seconds = lines_begun(race, worker, "abc")

    following = worker.complete_and_claim(jobs, 2)
    worker.commit()

    race.check()
    assert len(following) == 2
    (left,) = set(seconds) - {job.id for job in following}
    assert race.state(left) == "available"
    assert [row.id for row in race.rows() if row.admitted] == seconds


def test_no_queue_is_handed_more_than_its_slots(race: Race) -> None:
    application, worker = race.application(), race.worker()
    for queue in ("default", "other"):
        seconds = [application.enqueue(key, queue=queue) for key in "abc"]
    application.commit()
    worker.settle_down()
    jobs = worker.claim()
    worker.commit()
    wanted = replace(worker.wanted(3, hands_over=True), slots={"default": 3, "other": 1})

    _, following = settle_and_claim(
        worker.connection, race.dialect, worker.ends_of(jobs), wanted, history_limit=5
    )
    worker.commit()

    race.check()
    assert [job.queue for job in following] == ["other"]
    states = Counter(race.state(id_) for id_ in seconds)
    assert states == {"running": 1, "available": 2}


@pytest.mark.parametrize("why", [*NOT_YET, "a lock"])
def test_one_that_can_not_be_handed_over_keeps_no_other_from_it(race: Race, why: str) -> None:
    act, state = NOT_YET.get(why, (ON_THE_NEXT["reschedule"], "pending/turn"))
    worker, person = race.worker(), race.application()
    jobs, (second, other) = lines_begun(race, worker, "kb")
    act(person, second)
    if why in NOT_YET:
        person.commit()
    if why in NOT_YET and race.state(second) == "pending/admission":
        worker.settle_down()

    following = worker.complete_and_claim(jobs, 5)
    worker.commit()

    race.check()
    assert [job.id for job in following] == ([] if "queue" in why else [other])
    assert race.state(second) == state


def test_a_run_that_lost_its_lease_keeps_no_other_line_from_going_on(race: Race) -> None:
    worker, other = race.worker(), race.worker()
    (lost,), _ = lines_begun(race, worker, "a")
    race.clock.advance(minutes=2)
    (held,), (second,) = lines_begun(race, worker, "b")
    other.rescue()
    other.commit()
    (again,) = other.claim()
    other.commit()

    following = worker.complete_and_claim([lost, held], 5)
    worker.commit()

    race.check()
    assert [job.id for job in following] == [second]
    assert race.state(again.id) == "running"


def ended_elsewhere(race: Race, worker: Worker, other: Worker, count: int) -> ClaimedJob:
    """The first run of a line of so many jobs, which was taken from this worker and completed."""
    line(race, count, key="a")
    lost = claimed(race, worker)
    race.clock.advance(minutes=2)
    other.rescue()
    other.commit()
    other.settle(claimed(race, other))
    other.commit()
    return lost


def test_a_run_that_was_lost_long_ago_waits_for_nobody_in_its_line(race: Race) -> None:
    worker, other, person = race.worker(), race.worker(), race.application()
    lost = ended_elsewhere(race, worker, other, 1)
    (held,), (second,) = lines_begun(race, worker, "b")
    new = person.enqueue("a")
    person.commit()
    other.admit()

    following = worker.complete_and_claim([lost, held], 5)
    worker.commit()
    other.commit()

    race.check()
    assert [job.id for job in following] == [second]
    assert race.state(new) == "available"


def test_a_lost_run_and_a_held_one_of_a_line_have_one_next(race: Race) -> None:
    worker, other = race.worker(), race.worker()
    lost = ended_elsewhere(race, worker, other, 3)
    held = claimed(race, worker)
    (alone,) = line(race, 1, key="o")

    following = worker.complete_and_claim([lost, held], 2)
    worker.commit()

    race.check()
    assert [job.sequence_key for job in following] == ["a", "o"]
    assert following[1].id == alone


def test_what_a_line_owes_is_left_to_who_pays_it(race: Race) -> None:
    worker, other, person = race.worker(), race.worker(), race.application()
    (lost,), (second,) = lines_begun(race, worker, "a")
    race.clock.advance(minutes=2)
    (held,), (behind,) = lines_begun(race, worker, "b")
    other.rescue()
    other.commit()
    (again,) = other.claim()
    ON_THE_NEXT["reschedule"](person, second)
    other.settle(again)
    other.commit()
    person.roll_back()
    assert [row.id for row in race.rows("a") if row.admitted] == [lost.id]

    following = worker.complete_and_claim([lost, held], 5)
    worker.commit()

    race.check()
    assert [job.id for job in following] == [behind]
    assert race.drain(worker) == [second]


def test_a_line_with_positions_is_handed_on_beside_one_without(race: Race) -> None:
    application, worker = race.application(), race.worker()
    numbered = [application.enqueue("p", position=n) for n in (1, 2)]
    plain = [application.enqueue("k") for _ in range(2)]
    application.commit()
    worker.settle_down()
    jobs = worker.claim()
    worker.commit()

    following = worker.complete_and_claim(jobs, 5)
    worker.commit()

    race.check()
    assert [job.id for job in following] == [numbered[1], plain[1]]


@pytest.mark.parametrize("keys", ["a", "ab"], ids=["of one", "of two"])
def test_a_claim_after_a_hand_over_finds_what_waited_before_the_next(
    race: Race, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    monkeypatch.setattr(floors, "STANDS", 1e9)
    worker, count = race.worker(), len(keys)
    firsts = [line(race, 1, key=key)[0] for key in keys]
    others = [line(race, 1, key=f"early-{n}")[0] for n in range(count)]
    nexts = [line(race, 1, key=key)[0] for key in keys]
    for n in range(count):
        line(race, 1, key=f"late-{n}")
    jobs = worker.claim(count)
    worker.commit()
    assert [job.id for job in jobs] == firsts

    following = worker.complete_and_claim(jobs, count)
    worker.commit()
    assert [job.id for job in following] == nexts
    assert [job.id for job in worker.claim(count)] == others


def test_many_turns_of_many_lines_on_one_connection_keep_each_order(race: Race) -> None:
    lines = {key: line(race, 15, key=key) for key in "abcd"}
    worker, order = race.worker(), dict[str, list[int]]()
    jobs = worker.claim(3)
    while jobs:
        worker.commit()
        for job in jobs:
            order.setdefault(job.sequence_key or "", []).append(job.id)
        jobs = worker.complete_and_claim(jobs, 3)
    worker.commit()
    race.check()
    assert order == lines


def test_many_turns_on_one_connection_keep_the_order(race: Race) -> None:
    ids = line(race, 40)
    worker = race.worker()
    order = []
    jobs = worker.claim(1)
    while jobs:
        worker.commit()
        order += [job.id for job in jobs]
        jobs = worker.complete_and_claim(jobs, 1)
    worker.commit()
    assert order == ids


@pytest.mark.parametrize(
    "text",
    ['{"a": "\\\\\\"{},NULL"}', '"NULL"', '"\\u20ac € {1,2}"', "null"],
)
def test_every_text_survives_a_call(race: Race, text: str) -> None:
    assert isinstance(race.dialect, PostgresDialect)
    application, worker = race.application(), race.worker()
    kind = f"work {text}"
    id_ = race.cyclone.enqueue(application.connection, "work", {}).id
    following = race.cyclone.enqueue(application.connection, kind, {}).id
    application.commit()
    job = claimed(race, worker)
    assert job.id == id_

    batch = worker.ends_of([job], result=text)
    wanted = worker.wanted(1, kinds=[kind])
    _, jobs = settle_and_claim(worker.connection, race.dialect, batch, wanted, history_limit=5)
    worker.commit()

    assert [(job.id, job.kind) for job in jobs] == [(following, kind)]
    result = "SELECT result::text FROM cyclone_job WHERE id = :id"
    with race.engine.connect() as connection:
        assert connection.scalar(sa.text(result), {"id": id_}) == text
