"""Whatever is enqueued, raised or returned: a refusal is an error of ours, and no job is stuck."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyclone_sqla import CycloneError, Discard, JobFilter, Retry, Snooze
from cyclone_sqla.clock import DatabaseClock
from cyclone_sqla.lifecycle import TERMINAL, State
from tests.databases import Database
from tests.fuzz.nasty import (
    CALM,
    EXAMPLES,
    OPTIONS,
    PLAIN,
    TEXTS,
    TIMES,
    VALUES,
    broken,
    examples,
    mostly,
    options,
)
from tests.life.hands import DONE, Hands
from tests.waiting import wait_until
from tests.worker.site import Site

pytestmark = pytest.mark.timeout(120 + EXAMPLES)


# ---- what is asked for ---------------------------------------------------------------------------


@pytest.fixture
def hands(database: Database) -> Iterator[Hands]:
    """The operations, on a database whose time is the real one."""
    with closing(Hands(database, DatabaseClock())) as hands:
        yield hands


def test_an_enqueue_is_refused_with_an_error_of_ours_or_its_job_can_be_claimed(
    hands: Hands,
) -> None:
    outcomes = {"refused": 0, "claimed": 0}

    @examples(110)
    @given(kind=st.one_of(PLAIN, TEXTS), arguments=st.one_of(CALM, VALUES), options=options())
    def enqueue(kind: Any, arguments: Any, options: dict[str, Any]) -> None:
        try:
            with broken(), hands.engine.begin() as connection:
                ref = hands.cyclone.enqueue(connection, kind, {"value": arguments}, **options)
        except CycloneError:
            outcomes["refused"] += 1
            return
        outcomes["claimed"] += 1
        assert fate(hands, ref.id, kind) in TERMINAL
        look_at(hands, ref.id)

    enqueue()
    assert min(outcomes.values()) > 10, outcomes


def fate(hands: Hands, job_id: int, kind: str) -> str:
    """The state in which a job ends that gets its time and its turn."""
    hands.change(job_id, deadline=None)
    job = hands.job(job_id)
    if job.waits_for == "time":
        hands.execute("UPDATE cyclone_job SET run_at = created_at WHERE id = :id", id=job_id)
        hands.stage()
    if job.position is not None:
        hands.execute("UPDATE cyclone_job SET position = 1 WHERE id = :id", id=job_id)
    hands.admit()
    claimed = hands.claim(queues=[job.queue], kinds=[kind])
    hands.settle_all([(each, DONE) for each in claimed])
    return hands.job(job_id).state


def look_at(hands: Hands, job_id: int) -> None:
    with hands.engine.connect() as connection:
        job = hands.cyclone.get(connection, job_id)
        hands.cyclone.explain(connection, job_id)
        hands.cyclone.jobs(connection, JobFilter(kind=job.kind, queue=job.queue))
        if job.sequence_key is not None:
            hands.cyclone.sequence(connection, job.sequence_key)


def test_a_filter_is_refused_with_an_error_of_ours_or_finds_what_it_means(hands: Hands) -> None:
    names = [field.name for field in fields(JobFilter)]
    values = mostly(st.one_of(TEXTS, TIMES, st.sampled_from(list(State)), st.booleans()))
    hands.enqueue()

    @examples(25)
    @given(wanted=st.dictionaries(st.sampled_from(names), values, max_size=3), after=mostly(PLAIN))
    def look(wanted: dict[str, Any], after: Any) -> None:
        try:
            with broken(), hands.engine.connect() as connection:
                hands.cyclone.jobs(connection, JobFilter(**wanted))
                hands.cyclone.sequences(connection, after=after)
        except CycloneError:
            return

    look()


# ---- how runs end --------------------------------------------------------------------------------


class Mute(Exception):
    """Its text can't be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


KINDS_OF_ERRORS = st.sampled_from(
    [ValueError, KeyError, OSError, UnicodeError, Mute, SystemExit, KeyboardInterrupt,
     StopIteration, GeneratorExit, asyncio.CancelledError, AssertionError, Discard]
)  # fmt: skip


@st.composite
def errors(draw: st.DrawFn) -> BaseException:
    """What an action may raise, with a cause and others beside it."""
    exc = draw(KINDS_OF_ERRORS)(draw(st.one_of(TEXTS, VALUES)))
    exc.__cause__ = draw(st.one_of(st.none(), st.builds(ValueError, TEXTS)))
    for note in draw(st.lists(TEXTS, max_size=2)):
        exc.add_note(note)
    if draw(st.booleans()) and isinstance(exc, Exception):
        return ExceptionGroup(draw(TEXTS), [exc, Mute()])
    return exc


@st.composite
def delays(draw: st.DrawFn) -> tuple[type[Retry | Snooze], Any]:
    """An outcome with a time, which may be none."""
    return draw(st.sampled_from([Retry, Snooze])), draw(OPTIONS["process_in"])


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # as the worker does meanwhile
def test_whatever_an_action_raises_or_returns_its_job_does_not_stay_running(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(database)
    ends: list[Any] = []

    def act() -> Any:
        end = ends[-1]
        if isinstance(end, tuple) and end[:1] in ((Retry,), (Snooze,)):
            raise end[0](in_=end[1])
        if isinstance(end, BaseException):
            raise end
        return end

    async def act_async() -> Any:
        return act()

    site.action(act, kind="sync")
    site.action(act_async, kind="async")

    @examples(25)
    @given(kind=st.sampled_from(["sync", "async"]), end=st.one_of(errors(), delays(), VALUES))
    def run(kind: str, end: Any) -> None:
        ends.append(end)
        job_id = site.enqueue(kind, max_attempts=1)
        with broken():
            wait_until(
                lambda: site.job(job_id).state not in ("available", "running"), "it has ended"
            )
        assert not [r for r in caplog.records if r.levelno >= logging.CRITICAL]
        caplog.clear()

    with site.worker():
        run()
