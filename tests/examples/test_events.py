"""Streams of events."""

import random

import pytest
from sqlalchemy import Engine

from cyclone_sqla import Cyclone
from cyclone_sqla.testing import CycloneEnv
from docs.examples import events
from docs.examples.events import Cart, apply, cyclone, missing_version, receive


@pytest.fixture(scope="session")
def cyclone_app() -> Cyclone:
    return cyclone


@pytest.fixture(scope="session", autouse=True)
def tables(cyclone_database: Engine) -> None:
    events.Base.metadata.create_all(cyclone_database)


def arrive(env: CycloneEnv, *versions: int, cart: str = "a", change: int = 1) -> list[bool]:
    """Each in a transaction of its own; which of them were new."""
    new = []
    for version in versions:
        new.append(receive(env.session, cart, version, change))
        env.session.commit()
    return new


def cart(env: CycloneEnv, name: str = "a") -> tuple[int, int]:
    found = env.session.get_one(Cart, name)
    return found.version, found.pieces


def test_events_are_applied_in_their_order_however_they_arrive(cyclone_env: CycloneEnv) -> None:
    versions = list(range(1, 11))
    random.Random(7).shuffle(versions)
    assert all(arrive(cyclone_env, *versions))
    assert cart(cyclone_env) == (10, 10)
    applied = sorted(cyclone_env.jobs(apply), key=lambda job: job.lease)
    assert [job.position for job in applied] == list(range(1, 11))


def test_what_comes_twice_is_applied_once(cyclone_env: CycloneEnv) -> None:
    assert arrive(cyclone_env, 1, 2, 1, 2, 3) == [True, True, False, False, True]
    assert cart(cyclone_env) == (3, 3)


def test_a_version_that_is_missing_is_named_and_waited_for(cyclone_env: CycloneEnv) -> None:
    arrive(cyclone_env, 1, 3, 4)
    arrive(cyclone_env, 1, cart="b")
    assert missing_version(cyclone_env.session, "a") == 2
    assert missing_version(cyclone_env.session, "b") is None
    assert cart(cyclone_env) == (1, 1)
    arrive(cyclone_env, 2)
    assert missing_version(cyclone_env.session, "a") is None
    assert cart(cyclone_env) == (4, 4)


@pytest.mark.cyclone(raise_errors=False)
def test_an_event_that_can_not_be_applied_holds_up_its_own_stream(cyclone_env: CycloneEnv) -> None:
    arrive(cyclone_env, 1, change=-5)
    arrive(cyclone_env, 2)
    arrive(cyclone_env, 1, cart="b")
    assert cyclone_env.session.get(Cart, "a") is None
    assert cart(cyclone_env, "b") == (1, 1)
