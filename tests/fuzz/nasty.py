"""Values that nobody should give, and somebody will."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

T = TypeVar("T")

EXAMPLES = int(os.environ.get("CYCLONE_TEST_EXAMPLES", "0"))
"""How many examples a long run tries; 0 is the ordinary run."""


def examples(ordinary: int) -> settings:
    """So many in an ordinary run, always the same; new ones each time in a long one."""
    return settings(
        max_examples=EXAMPLES or ordinary,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


PIECES = st.sampled_from(
    [
        *("", "a", " ", "\n", "\r", "\t", "\0", "\x1b[31m", "\x1b]0;title\a", "\x7f", "\x9b2J"),
        *("\ud800", "\udfff", "\u202e", "\ufeff", "\u2028", "\U0001f600", "é", "e\u0301", "ß", "İ"),
        *("%", "%s", "%(id)s", "%%", ":id", "$1", "?", "'", '"', "`", "\\", "\\u0000", "\\x00"),
        *(";", "--", "/*", "{", "}", "{0}", "[bold]", "[/]", "<b>", ",", ".", "pg_temp", "public"),
        *("NULL", "null", "true", "NaN", "-1", "0", "1e999"),
        *("x" * 250, "x" * 256, "é" * 128, "x" * 5000),
    ]
)

TEXTS = st.one_of(
    st.lists(PIECES, max_size=4).map("".join),
    st.text(st.characters(), max_size=20),
    st.text(min_size=1, max_size=20),
)
"""Also such as no database can store."""

PLAIN = st.text("abc-_:", min_size=1, max_size=8)

NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1, 2**15, 2**31, 2**63, 2**64, 10**400, 1e308, True, Decimal("0.1")]),
)

TIMES = st.one_of(
    st.datetimes(),
    st.datetimes(timezones=st.just(UTC)),
    st.sampled_from([datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC), date.max]),
)

DURATIONS = st.one_of(st.timedeltas(), st.sampled_from([timedelta.max, timedelta.min, 0, 60]))


class Broken:
    """Has no text and no equals, except for those who draw it."""

    is_drawn = True

    def __repr__(self) -> str:
        return self._only_if_drawn("Broken()")

    def __eq__(self, other: object) -> bool:
        return self._only_if_drawn(other is self)

    def __hash__(self) -> int:
        return self._only_if_drawn(1)

    def _only_if_drawn(self, answer: T) -> T:
        if not Broken.is_drawn:
            raise RuntimeError("broken")
        return answer


@contextmanager
def broken() -> Iterator[None]:
    """Has the broken break what looks at them, in this block."""
    Broken.is_drawn = False
    try:
        yield
    finally:
        Broken.is_drawn = True


ODD = st.sampled_from([None, b"bytes", object(), Broken(), [], {}, (1,), {1}, print])
"""What is of no sensible type."""

LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, TIMES, ODD)

VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(TEXTS, st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)
"""What may be given as an argument, or returned."""


CALM = st.one_of(st.none(), st.booleans(), st.integers(-1000, 1000), PLAIN, st.lists(PLAIN))
"""What may be given as an argument without a thought."""


def mostly(sensible: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Seldom something else altogether, or so many options are never right together."""
    return st.one_of(sensible, sensible, sensible, sensible, sensible, TEXTS, NUMBERS, ODD)


OPTIONS: Mapping[str, st.SearchStrategy[Any]] = {
    "queue": mostly(TEXTS),
    "priority": mostly(st.integers(-40_000, 40_000)),
    "unique": mostly(TEXTS),
    "on_duplicate": mostly(st.sampled_from(["raise", "return"])),
    "idempotency_key": mostly(TEXTS),
    "sequence": mostly(TEXTS),
    "on_failure": mostly(st.sampled_from(["dead-letter", "skip", "halt"])),
    "position": mostly(st.integers(-1, 2**63)),
    "reject_gap": mostly(st.booleans()),
    "sequence_lock": mostly(st.booleans()),
    "process_in": mostly(DURATIONS),
    "process_at": mostly(TIMES),
    "deadline": mostly(TIMES),
    "max_attempts": mostly(st.integers(0, 2)),
    "timeout": mostly(DURATIONS),
    "tenant": mostly(TEXTS),
    "trace_id": mostly(TEXTS),
    "headers": mostly(st.dictionaries(st.one_of(TEXTS, st.integers()), mostly(TEXTS), max_size=3)),
}


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """None, or a few of an enqueue's options."""
    if draw(st.booleans()):
        return {}
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=5, unique=True))
    return {name: draw(OPTIONS[name]) for name in names}
