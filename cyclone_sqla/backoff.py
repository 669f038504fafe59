"""How long a failed job waits for its next attempt."""

from __future__ import annotations

import inspect
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol, TypeAlias, cast, get_args, runtime_checkable

from cyclone_sqla.errors import ConfigurationError

log = logging.getLogger(__name__)

Duration: TypeAlias = timedelta | float
"""A timedelta, or a number of seconds."""

Jitter = Literal["equal", "full", "none"]
"""``equal``: between half of the delay and all of it. ``full``: between nothing and all of it."""

MAX_DELAY = timedelta(days=36_525)
"""A hundred years: the longest delay, so that "now" and a delay always make a date."""

# More attempts than this change no delay, and an int of any size would not become a float.
_MAX_ATTEMPT = 1_000_000


@runtime_checkable
class BackoffPolicy(Protocol):
    """Decides how long to wait after a failed attempt."""

    def delay(self, attempt: int) -> timedelta:
        """The wait after this attempt, the first being 1: never negative, at most ``MAX_DELAY``."""
        ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """``base``, then ``factor`` times as long after each attempt, up to ``cap``, with jitter."""

    base: Duration = 1.0
    factor: float = 2.0
    cap: Duration = timedelta(minutes=5)
    jitter: Jitter = "equal"

    def delay(self, attempt: int) -> timedelta:
        """The wait after this attempt; at most ``cap``, whatever the attempt."""
        base, cap = _duration("base", self.base), _duration("cap", self.cap)
        growth = (_counted(attempt) - 1) * math.log(self.factor)
        # The cap is tested before raising to the power: 2.0 ** 1100 is an OverflowError.
        if not base or not cap:
            longest = min(base, cap)
        elif growth >= math.log(cap / base):
            longest = cap
        else:
            longest = min(cap, base * self.factor ** (_counted(attempt) - 1))
        return _jittered(longest, self.jitter)

    def __post_init__(self) -> None:
        _duration("base", self.base)
        _duration("cap", self.cap)
        _check(1 <= self.factor < math.inf, "factor", self.factor, "1 or more, and finite")
        _check(self.jitter in get_args(Jitter), "jitter", self.jitter, "equal, full or none")


@dataclass(frozen=True, slots=True)
class Linear:
    """``step`` longer after each attempt, up to ``cap``."""

    step: Duration = 1.0
    cap: Duration = timedelta(minutes=5)

    def delay(self, attempt: int) -> timedelta:
        """The wait after this attempt; at most ``cap``, whatever the attempt."""
        step, cap = _duration("step", self.step), _duration("cap", self.cap)
        # Compared before multiplying: a long step a million times over is no timedelta.
        return step * _counted(attempt) if step <= cap // _counted(attempt) else cap

    def __post_init__(self) -> None:
        _duration("step", self.step)
        _duration("cap", self.cap)


@dataclass(frozen=True, slots=True)
class Constant:
    """The same wait after each attempt."""

    wait: Duration

    def delay(self, attempt: int) -> timedelta:
        """``wait``, whatever the attempt."""
        return _duration("wait", self.wait)

    def __post_init__(self) -> None:
        _duration("wait", self.wait)


class Custom:
    """A user's function or policy, which may fail: then the default policy answers in its place."""

    __slots__ = ("_decide", "_warned")

    def __init__(self, decide: Callable[[int], Duration]) -> None:
        self._decide = decide
        self._warned = False

    def delay(self, attempt: int) -> timedelta:
        """What the function says, if that is a delay that can be stored."""
        try:
            return _duration("delay", self._decide(max(1, attempt)))
        except BaseException as trouble:  # noqa: BLE001 - the job is retried whatever it does
            self._warn(trouble)
            return DEFAULT_BACKOFF.delay(attempt)

    def _warn(self, trouble: BaseException) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "backoff %r failed, the default is used in its place; said only once",
                self._decide,
                exc_info=trouble,
            )

    def __repr__(self) -> str:
        return f"Custom({self._decide!r})"


def as_policy(value: BackoffPolicy | Callable[[int], Duration] | Duration | None) -> BackoffPolicy:
    """The policy that was meant: one, a function of the attempt, a constant wait, or the default.

    A function gets the attempt, the first being 1, and returns a timedelta or seconds. Raises
    :class:`ConfigurationError` for anything else.
    """
    if value is None:
        return DEFAULT_BACKOFF
    if isinstance(value, Exponential | Linear | Constant | Custom):
        return value
    if isinstance(value, timedelta | int | float):
        return Constant(value)
    if inspect.isclass(value) or inspect.iscoroutinefunction(value):
        raise _refused("backoff", value, "a policy, such as Exponential(), or a plain function")
    if isinstance(value, BackoffPolicy):
        return Custom(value.delay)
    if callable(value):
        return Custom(value)
    raise _refused("backoff", value, "a policy, a function of the attempt, or a delay")


def _counted(attempt: int) -> int:
    return min(max(attempt, 1), _MAX_ATTEMPT)


def _jittered(longest: timedelta, jitter: Jitter) -> timedelta:
    if jitter == "none":
        return longest
    least = longest / 2 if jitter == "equal" else timedelta(0)
    return min(longest, least + (longest - least) * random.random())


def _duration(name: str, value: Duration) -> timedelta:
    """The value as a timedelta between 0 and ``MAX_DELAY``."""
    delay = value if isinstance(value, timedelta) else _seconds(name, value)
    _check(timedelta(0) <= delay <= MAX_DELAY, name, value, "between zero and a hundred years")
    return delay


def _seconds(name: str, value: object) -> timedelta:
    _check(isinstance(value, int | float), name, value, "a timedelta or seconds")
    try:
        return timedelta(seconds=float(cast("float", value)))
    except (OverflowError, ValueError) as exc:
        raise _refused(name, value, "between zero and a hundred years") from exc


def _check(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise _refused(name, value, wanted)


def _refused(name: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"{name} must be {wanted}, not {value!r}")


DEFAULT_BACKOFF = Exponential()
"""1 s, 2 s, 4 s … 5 min, each less up to half of it."""
