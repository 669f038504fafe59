"""Delays never overflow, never pass their cap, and a user's mistakes in them cost no job."""

import logging
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyclone_sqla.backoff import (
    DEFAULT_BACKOFF,
    MAX_DELAY,
    BackoffPolicy,
    Constant,
    Exponential,
    Jitter,
    Linear,
    as_policy,
)
from cyclone_sqla.errors import ConfigurationError

NOTHING = timedelta(0)

attempts = st.integers(-10, 5_000) | st.just(10**400)
seconds = st.floats(0, MAX_DELAY.total_seconds())
durations = (
    st.sampled_from([0, 1, 1e-9, 1e-6, 5e-324, MAX_DELAY])
    | seconds
    | st.timedeltas(NOTHING, MAX_DELAY)
)
factors = st.sampled_from([1, 1.0, math.nextafter(1, 2), 1e308]) | st.floats(1, 1e308)
# A busy machine is no failure.
_unhurried = settings(deadline=None)

jitters: st.SearchStrategy[Jitter] = st.sampled_from(["equal", "full", "none"])


@_unhurried
@given(durations, factors, durations, jitters, attempts)
def test_an_exponential_delay_lies_between_nothing_and_its_cap(
    base: timedelta | float,
    factor: float,
    cap: timedelta | float,
    jitter: Jitter,
    attempt: int,
) -> None:
    delay = Exponential(base=base, factor=factor, cap=cap, jitter=jitter).delay(attempt)

    _assert_delay(delay, cap)


@_unhurried
@given(durations, durations, attempts)
def test_a_linear_delay_lies_between_nothing_and_its_cap(
    step: timedelta | float, cap: timedelta | float, attempt: int
) -> None:
    _assert_delay(Linear(step=step, cap=cap).delay(attempt), cap)


@_unhurried
@given(durations, attempts)
def test_a_constant_delay_is_what_was_said(wait: timedelta | float, attempt: int) -> None:
    delay = Constant(wait).delay(attempt)

    _assert_delay(delay, wait)
    assert delay == _as_timedelta(wait)


@_unhurried
@given(
    st.floats() | st.integers() | st.timedeltas() | st.none() | st.text() | st.just(10**400),
    attempts,
)
def test_a_custom_delay_is_always_one_that_can_be_stored(answer: Any, attempt: int) -> None:
    _assert_delay(as_policy(lambda _: answer).delay(attempt), MAX_DELAY)


def _assert_delay(delay: timedelta, cap: timedelta | float) -> None:
    assert NOTHING <= delay <= _as_timedelta(cap)
    assert (datetime.now(UTC) + delay).year < 9999


def _as_timedelta(value: timedelta | float) -> timedelta:
    return value if isinstance(value, timedelta) else timedelta(seconds=value)


def test_an_exponential_delay_grows_up_to_its_cap() -> None:
    policy = Exponential(base=1, factor=2, cap=timedelta(minutes=5), jitter="none")

    delays = [policy.delay(attempt).total_seconds() for attempt in range(1, 12)]

    assert delays == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_a_linear_delay_grows_up_to_its_cap() -> None:
    policy = Linear(step=timedelta(seconds=2), cap=5)

    assert [policy.delay(attempt).total_seconds() for attempt in (1, 2, 3, 4)] == [2, 4, 5, 5]


@pytest.mark.parametrize(
    ("jitter", "least"), [("none", 8), ("equal", 4), ("full", 0)], ids=["none", "equal", "full"]
)
def test_jitter_spreads_delays_over_its_range(jitter: Jitter, least: float) -> None:
    policy = Exponential(base=1, factor=2, jitter=jitter)

    delays = [policy.delay(4).total_seconds() for _ in range(1_000)]

    assert all(least <= delay <= 8 for delay in delays)
    if jitter != "none":
        assert min(delays) < least + 1, "all of the range is used"
        assert max(delays) > 7


@pytest.mark.parametrize(
    "policy",
    [Exponential(base=0), Exponential(cap=0), Linear(step=0), Linear(cap=0), Constant(0)],
    ids=repr,
)
def test_zero_means_zero(policy: BackoffPolicy) -> None:
    assert [policy.delay(attempt) for attempt in (1, 2, 5_000)] == [NOTHING] * 3


def test_a_custom_zero_means_zero() -> None:
    assert as_policy(lambda _: 0).delay(3) == NOTHING


@pytest.mark.parametrize("attempt", [0, -1, -(10**400)])
def test_an_attempt_before_the_first_counts_as_the_first(attempt: int) -> None:
    seen: list[int] = []

    assert Exponential(jitter="none").delay(attempt) == timedelta(seconds=1)
    assert Linear().delay(attempt) == timedelta(seconds=1)
    as_policy(lambda n: seen.append(n) or 1.0).delay(attempt)
    assert seen == [1]


BAD_DURATIONS = [-1, -1e-6, math.nan, math.inf, -math.inf, 10**400, MAX_DELAY * 2, "5", None]


@pytest.mark.parametrize("bad", [*BAD_DURATIONS, timedelta(microseconds=-1)], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda bad: Exponential(base=bad),
        lambda bad: Exponential(cap=bad),
        lambda bad: Linear(step=bad),
        lambda bad: Linear(cap=bad),
        Constant,
    ],
    ids=["base", "cap", "step", "linear cap", "wait"],
)
def test_a_bad_duration_is_refused_at_once(make: Callable[[Any], BackoffPolicy], bad: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        make(bad)


@pytest.mark.parametrize("bad", [0, 0.5, -2, math.nan, math.inf])
def test_a_factor_that_does_not_grow_is_refused(bad: float) -> None:
    with pytest.raises(ConfigurationError, match="factor must be 1 or more, and finite"):
        Exponential(factor=bad)


def test_an_unknown_jitter_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="jitter must be equal, full or none"):
        Exponential(jitter="some")  # type: ignore[arg-type]


def _raises(_: int) -> NoReturn:
    raise ZeroDivisionError


def _exits(_: int) -> NoReturn:
    raise SystemExit


class _FailingPolicy:
    def delay(self, attempt: int) -> timedelta:
        raise OverflowError(attempt)


@pytest.mark.parametrize(
    "mistaken",
    [
        _raises,
        _exits,
        _FailingPolicy(),
        lambda: 1.0,
        lambda _: -1,
        lambda _: math.nan,
        lambda _: None,
        lambda _: timedelta.max,
    ],
    ids=["raises", "exits", "policy", "no argument", "negative", "nan", "None", "too long"],
)
def test_a_mistaken_backoff_falls_back_to_the_default_and_says_so_once(
    mistaken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy = as_policy(mistaken)

    with caplog.at_level(logging.WARNING, "cyclone_sqla.backoff"):
        delays = [policy.delay(3).total_seconds() for _ in range(10)]

    assert all(2 <= delay <= 4 for delay in delays), "the default after attempt 3"
    assert len(caplog.records) == 1
    assert "the default is used in its place" in caplog.text


def test_every_way_to_say_a_policy_is_understood() -> None:
    class Own:
        def delay(self, attempt: int) -> timedelta:
            return timedelta(hours=attempt)

    exponential = Exponential(base=3)
    assert as_policy(None) is DEFAULT_BACKOFF
    assert as_policy(exponential) is exponential
    assert as_policy(Own()).delay(2) == timedelta(hours=2)
    assert as_policy(lambda attempt: attempt * 2.5).delay(2) == timedelta(seconds=5)
    assert as_policy(timedelta(seconds=7)).delay(9) == timedelta(seconds=7)
    assert as_policy(1.5).delay(9) == timedelta(seconds=1.5)


async def _asynchronous(_: int) -> float:
    return 1.0


@pytest.mark.parametrize(
    "bad",
    [Exponential, _asynchronous, "exponential", object()],
    ids=["class", "coroutine function", "text", "object"],
)
def test_what_can_be_no_policy_is_refused_at_once(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match="backoff must be a policy"):
        as_policy(bad)
