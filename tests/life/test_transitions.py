"""Every pair of a state and an event has a defined answer: the one of the table in lifecycle.py."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from cyclone_sqla import ClaimedJob, InvalidTransitionError, State, lifecycle
from cyclone_sqla.lifecycle import TRANSITIONS, Transition, WaitsFor
from cyclone_sqla.operations import LostRun
from cyclone_sqla.outcomes import CancelledOutcome, GivenBack, Outcome, Retried, Snoozed
from tests.life.hands import BROKE, DONE, HOPELESS, Hands

LEASE = 100
"""The lease under which every job of these tests runs, ran or will have run."""

ENDS: dict[Transition, Outcome] = {
    lifecycle.COMPLETE: DONE,
    lifecycle.RETRY: Retried(timedelta(hours=1), BROKE),
    lifecycle.SNOOZE: Snoozed(timedelta(hours=1), BROKE),
    lifecycle.DISCARD: HOPELESS,
    lifecycle.CANCEL: CancelledOutcome(BROKE),
    lifecycle.GIVE_BACK: GivenBack(),
}


def stage(hands: Hands, _job: ClaimedJob) -> None:
    hands.stage()


def claim(hands: Hands, _job: ClaimedJob) -> None:
    hands.claim()


def renew(hands: Hands, job: ClaimedJob) -> None:
    hands.renew(job)


def rescue(hands: Hands, job: ClaimedJob) -> None:
    run = LostRun(job.id, job.kind, job.queue, job.lease, "w", 1, 25, 0, 0)
    hands.rescue([run])


def by_a_person(verb: str, **options: Any) -> Callable[[Hands, ClaimedJob], None]:
    """A verb of people, which is refused with an error where the state does not allow it."""

    def act(hands: Hands, job: ClaimedJob) -> None:
        with contextlib.suppress(InvalidTransitionError):
            hands.act(verb, job.id, **options)

    return act


EVENTS: dict[Transition, Callable[[Hands, ClaimedJob], Any]] = {
    lifecycle.STAGE: stage,
    lifecycle.CLAIM: claim,
    lifecycle.RENEW: renew,
    lifecycle.RESCUE: rescue,
    **{
        transition: lambda hands, job, outcome=outcome: hands.settle(job, outcome)
        for transition, outcome in ENDS.items()
    },
    lifecycle.CANCEL_ASKED: by_a_person("cancel"),
    lifecycle.PAUSE: by_a_person("pause"),
    lifecycle.RESUME: by_a_person("resume"),
    lifecycle.REPLAY: by_a_person("replay"),
    lifecycle.SKIP: by_a_person("skip"),
    lifecycle.DEAL_WITH: by_a_person("skip"),
    lifecycle.RESCHEDULE: by_a_person("reschedule", process_in=60),
}

HEAD = {"sequence_key": "line", "sequence_open": True, "admitted": True, "on_failure": "halt"}
SPECIAL = {lifecycle.SKIP: HEAD, lifecycle.DEAL_WITH: {"dead_letter": True}}
"""What else is true of a job that the transition is for."""


def test_every_transition_of_the_table_is_tried_here() -> None:
    assert set(EVENTS) == set(TRANSITIONS)


@pytest.mark.parametrize("transition", TRANSITIONS, ids=lambda transition: transition.verb)
def test_an_event_does_what_the_table_says_in_every_state_and_else_nothing(
    hands: Hands, transition: Transition
) -> None:
    for state in State:
        job = in_state(hands, state)
        if transition in SPECIAL:
            hands.change(job.id, **SPECIAL[transition])
        before = hands.job(job.id)

        EVENTS[transition](hands, job)

        after = hands.job(job.id)
        if transition == lifecycle.CANCEL_ASKED and state == State.RUNNING:
            assert (after.state, after.cancel_requested_at) == ("running", hands.clock.now())
        elif transition.allows(state):
            waits_for = transition.waits_for
            assert (after.state, after.waits_for) == (transition.target, waits_for), state
        else:
            assert columns(after) == columns(before), f"{transition.verb} touched a {state} job"
        hands.forget(job.id)


@pytest.mark.parametrize("waits_for", WaitsFor)
def test_only_a_time_is_ended_by_staging(hands: Hands, waits_for: WaitsFor) -> None:
    job = in_state(hands, State.PENDING)
    hands.change(job.id, waits_for=waits_for)

    hands.stage()

    is_staged = waits_for in lifecycle.DUE_BY_TIME
    assert hands.job(job.id).state == ("available" if is_staged else "pending")


def in_state(hands: Hands, state: State) -> ClaimedJob:
    """A job that ran under `LEASE` once, in `state` now; due, and lapsed if it runs."""
    job_id = hands.enqueue()
    job = hands.claim_one()
    over = state.is_terminal
    hands.change(
        job_id,
        state=state,
        waits_for="time" if state == State.PENDING else None,
        lease=LEASE,
        leased_until=hands.clock.now() if state == State.RUNNING else None,
        finished_at=hands.clock.now() if over else None,
    )
    return job._replace(lease=LEASE)


def columns(job: object) -> dict[str, object]:
    return {name: value for name, value in vars(job).items() if not name.startswith("_")}
