"""What is listed and counted is what is there; where counting ends, the answer says so."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from cyclone_sqla import InvalidJobError, JobFilter, JobNotFoundError, State, WaitsFor, operations
from cyclone_sqla.figures import MOST_COUNTED, Count, HaltedSequence
from tests.life.hands import DONE, FAILED, HOPELESS, Hands

KEY = "account-42"


def ask(hands: Hands, question: str, *arguments: Any, **options: Any) -> Any:
    with hands.engine.connect() as connection:
        return getattr(hands.cyclone, question)(connection, *arguments, **options)


def ids(hands: Hands, wanted: JobFilter | None = None, **options: Any) -> list[int]:
    return [job.id for job in ask(hands, "jobs", wanted, **options)]


def one_in_every_state(hands: Hands) -> dict[str, int]:
    """Jobs of one sequence and of none, in every state and place there is; their ids by name."""
    made = {"completed": hands.enqueue()}
    hands.settle(hands.claim_one(), DONE)
    made["discarded"] = hands.enqueue(queue="mail")
    hands.settle(hands.claim_one(queues=["mail"]), HOPELESS)
    made["retrying"] = hands.enqueue()
    hands.settle(hands.claim_one(), FAILED)
    made["running"] = hands.enqueue()
    hands.claim_one()
    made["paused"] = hands.enqueue(queue="mail")
    hands.act("pause", made["paused"])
    made["cancelled"] = hands.enqueue()
    hands.act("cancel", made["cancelled"])
    made["delayed"] = hands.enqueue(process_in=60)
    made["available"] = hands.enqueue("rare", queue="mail")
    for name in ("halted", "behind", "cancelled in line"):
        made[name] = hands.enqueue(sequence=KEY, on_failure="halt")
    hands.admit()
    hands.settle(hands.claim_one(), HOPELESS)
    hands.act("cancel", made["cancelled in line"])
    made["debt"] = hands.enqueue(sequence="d")
    made["its next"] = hands.enqueue(sequence="d")
    hands.admit()
    hands.act("cancel", made["debt"])
    made["incoming"] = hands.enqueue(sequence="e")
    return made


# ---- figures -------------------------------------------------------------------------------------


def test_stats_count_every_job_once(hands: Hands) -> None:
    made = one_in_every_state(hands)
    stats = ask(hands, "stats")
    assert {state: count.number for state, count in stats.jobs.items()} == {
        "pending": 5,
        "available": 1,
        "running": 1,
        "paused": 1,
        "completed": 1,
        "discarded": 2,
        "cancelled": 3,
    }
    assert sum(count.number for count in stats.jobs.values()) == len(made)
    assert all(count.is_exact for count in stats.jobs.values())
    assert {waits: count.number for waits, count in stats.pending.items() if count.number} == {
        WaitsFor.ADMISSION: 1,
        WaitsFor.TURN: 2,
        WaitsFor.TIME: 1,
        WaitsFor.RETRY: 1,
    }
    assert (stats.dead_letters, stats.halted_sequences) == (Count(2), Count(1))
    assert stats.waits_since == hands.clock.now()


def test_a_queue_has_its_own_jobs_pauses_and_workers(hands: Hands) -> None:
    one_in_every_state(hands)
    hands.act("pause_queue", "mail", by="anna")
    hands.act("pause_queue", "empty")
    announce(hands, "w", {"mail": 3, "served": 2})
    announce(hands, "v", {"mail": 4})

    queues = {queue.name: queue for queue in ask(hands, "queues")}

    assert list(queues) == ["default", "empty", "mail", "served"]
    mail = queues["mail"]
    assert {state: n.number for state, n in mail.jobs.items() if n.number} == {
        State.AVAILABLE: 1,
        State.PAUSED: 1,
        State.DISCARDED: 1,
    }
    assert (mail.paused_at, mail.paused_by) == (hands.clock.now(), "anna")
    assert (mail.workers, mail.slots, mail.waits_since) == (2, 7, hands.clock.now())
    assert (queues["served"].slots, queues["default"].slots) == (2, 0)


def test_the_oldest_available_job_counts_whatever_its_priority(hands: Hands) -> None:
    since = hands.clock.now()
    hands.enqueue(priority=9)
    hands.clock.advance(hours=1)
    hands.enqueue("rare", priority=-1)
    assert ask(hands, "queues")[0].waits_since == since


def test_a_worker_of_which_nothing_is_heard_serves_no_queue(hands: Hands) -> None:
    announce(hands, "w", {"mail": 3})
    hands.clock.advance(seconds=61)
    assert ask(hands, "queues") == []
    (worker,) = ask(hands, "stats").workers
    assert (worker.name, worker.is_alive) == ("w", False)


def announce(hands: Hands, worker: str, queues: dict[str, int]) -> None:
    record = {
        "id": worker, "name": worker, "host": "h", "pid": 1, "queues": queues, "kinds": ["work"],
    }  # fmt: skip
    with hands.transaction() as connection:
        operations.announce(connection, hands.dialect, record)


# ---- sequences -----------------------------------------------------------------------------------


def test_halted_sequences_say_why_since_when_and_who_waits(hands: Hands) -> None:
    made = one_in_every_state(hands)
    (halted,) = ask(hands, "halted_sequences")
    assert halted == HaltedSequence(
        key=KEY,
        head=made["halted"],
        kind="work",
        state=State.DISCARDED,
        why="ValueError: it broke",
        since=hands.clock.now(),
        waiting=Count(2),
    )
    hands.act("skip", made["halted"])
    hands.admit()
    hands.settle(hands.claim_one(), DONE)
    (halted,) = ask(hands, "halted_sequences")
    assert (halted.head, halted.why) == (made["cancelled in line"], "cancelled")


def test_halted_sequences_come_in_pages(hands: Hands) -> None:
    heads = []
    for number in range(3):
        heads.append(hands.enqueue(sequence=f"s{number}", on_failure="halt"))
        hands.admit()
        hands.settle(hands.claim_one(), HOPELESS)
    page = ask(hands, "halted_sequences", limit=2)
    assert [halted.head for halted in page] == heads[:2]
    assert [h.head for h in ask(hands, "halted_sequences", after=page[-1].head)] == heads[2:]


def test_a_sequence_shows_its_head_and_counts_who_waits(hands: Hands) -> None:
    made = one_in_every_state(hands)
    hands.act("pause_sequence", "d", by="anna")

    lines = {line.key: line for line in ask(hands, "sequences")}

    assert list(lines) == [KEY, "d", "e"]
    assert (lines[KEY].is_halted, lines[KEY].waiting) == (True, Count(2))
    assert lines[KEY].head.id == made["halted"]
    assert (lines["d"].head, lines["d"].waiting) == (None, Count(1))  # the debt has no head
    assert (lines["d"].paused_at, lines["d"].paused_by) == (hands.clock.now(), "anna")
    assert [line.key for line in ask(hands, "sequences", only_paused=True)] == ["d"]
    assert [line.key for line in ask(hands, "sequences", limit=1, after=KEY)] == ["d"]
    assert ask(hands, "sequence", "e") == lines["e"]
    assert ask(hands, "sequence", "unknown").waiting == Count(0)


def test_who_waits_is_counted_up_to_a_bound_and_says_so(hands: Hands) -> None:
    hands.enqueue_many(MOST_COUNTED, sequence=KEY)
    hands.admit()
    assert ask(hands, "sequence", KEY).waiting == Count(MOST_COUNTED - 1)
    hands.enqueue(sequence=KEY)
    assert str(ask(hands, "sequence", KEY).waiting) == "1,000 or more"


# ---- jobs ----------------------------------------------------------------------------------------


def test_every_filter_finds_its_jobs(hands: Hands) -> None:
    made = one_in_every_state(hands)
    then = hands.clock.now()
    hands.clock.advance(hours=1)
    late = hands.enqueue(tenant="acme")

    def found(**wanted: Any) -> set[int]:
        return set(ids(hands, JobFilter(**wanted)))

    assert found(state="paused") == {made["paused"]}
    assert found(queue="mail") == {made["discarded"], made["paused"], made["available"]}
    assert found(kind="rare", state=State.AVAILABLE) == {made["available"]}
    assert found(sequence=KEY) == {made["halted"], made["behind"], made["cancelled in line"]}
    assert found(sequence=KEY, state="pending") == {made["behind"]}
    assert found(tenant="acme") == {late}
    assert found(created_after=then) == {late}
    assert found(created_before=then + timedelta(seconds=1)) == set(made.values())
    assert found(dead_letter=True) == {made["discarded"], made["halted"]}
    assert found(dead_letter=False, state="discarded") == set()


def test_jobs_come_in_pages_from_either_end(hands: Hands) -> None:
    made = hands.enqueue_many(5)
    assert ids(hands, limit=2) == made[:2]
    assert ids(hands, limit=2, after=made[1]) == made[2:4]
    assert ids(hands, limit=2, newest_first=True) == [made[4], made[3]]
    assert ids(hands, newest_first=True, after=made[3]) == [made[2], made[1], made[0]]


@pytest.mark.parametrize(
    "wanted",
    [
        {"state": "pendng"},
        {"queue": ""},
        {"kind": "a\nb"},
        {"sequence": "a\x00"},
        {"tenant": 3},
        {"created_after": "2030-01-01"},
        {"created_before": datetime(2030, 1, 1)},  # noqa: DTZ001 - that is the fault
    ],
)
def test_a_filter_that_can_mean_nothing_is_refused(wanted: dict[str, Any]) -> None:
    (name,) = wanted
    with pytest.raises(InvalidJobError, match=name):
        JobFilter(**wanted)


@pytest.mark.parametrize("limit", [0, 10_001, True, "5"])
def test_a_page_has_a_size_that_can_be(hands: Hands, limit: Any) -> None:
    with pytest.raises(InvalidJobError, match="limit"):
        ids(hands, limit=limit)


def test_a_job_is_found_by_its_position(hands: Hands) -> None:
    made = [hands.enqueue(sequence=KEY, position=place) for place in (1, 2)]
    assert ask(hands, "get", sequence=KEY, position=2).id == made[1]
    for place in (3, 0, 2**63):
        with pytest.raises(JobNotFoundError, match="no such job"):
            ask(hands, "get", sequence=KEY, position=place)
    hands.admit()
    hands.settle(hands.claim_one(), DONE)
    hands.forget(made[0])
    with pytest.raises(JobNotFoundError, match="retention has removed it"):
        ask(hands, "get", sequence=KEY, position=1)


@pytest.mark.parametrize(
    "asked",
    [((), {}), ((1,), {"sequence": KEY, "position": 1}), ((), {"sequence": KEY}), ((True,), {})],
)
def test_a_job_is_asked_for_by_id_or_by_place(
    hands: Hands, asked: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    with pytest.raises(TypeError):
        ask(hands, "get", *asked[0], **asked[1])


def test_the_history_tells_runs_and_acts_in_their_order(hands: Hands) -> None:
    job = hands.enqueue()
    hands.settle(hands.claim_one(), FAILED)
    hands.act("cancel", job, by="anna")
    hands.act("replay", job)
    events = ask(hands, "history", job)
    assert [(e.event, e.actor, e.attempt) for e in events] == [
        ("retry", None, 1),
        ("cancel", "anna", None),
        ("replay", None, None),
    ]
    assert events[0].error == "ValueError: it broke"
    assert ask(hands, "history", 2**70) == []


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume", "replay", "skip", "reschedule"])
@pytest.mark.parametrize("job_id", [0, -1, 4711, 2**63])
def test_no_verb_finds_a_job_that_is_not_there(hands: Hands, verb: str, job_id: int) -> None:
    options = {"process_in": 5} if verb == "reschedule" else {}
    with pytest.raises(JobNotFoundError, match=str(job_id)):
        hands.act(verb, job_id, **options)
