"""Whatever a lossless type can hold comes back equal, of the same type, to the last digit."""

import contextlib
import inspect
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from cyclone_sqla.arguments import Arguments
from cyclone_sqla.errors import PayloadError
from cyclone_sqla.payload import difference
from cyclone_sqla.signatures import Signature

_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
_OFFSETS = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_DECIMALS = st.decimals(allow_nan=False, allow_infinity=False) | st.builds(
    lambda sign, digits, exponent: Decimal((sign, tuple(digits), exponent)),
    st.integers(0, 1),
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.integers(-500, 500),
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _FLOATS | _TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner),
    max_leaves=10,
)
_ARGUMENTS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int": (int, st.integers() | st.integers(-(2**300), 2**300)),
    "float": (float, _FLOATS),
    "bool": (bool, st.booleans()),
    "str": (str, _TEXT),
    "bytes": (bytes, st.binary()),
    "decimal": (Decimal, _DECIMALS),
    "date": (date, st.dates()),
    "time": (time, st.times() | st.times(timezones=_OFFSETS)),
    "datetime": (datetime, st.datetimes() | st.datetimes(timezones=_OFFSETS)),
    "timedelta": (timedelta, st.timedeltas()),
    "uuid": (UUID, st.uuids()),
    "complex": (complex, st.complex_numbers(allow_nan=False, allow_infinity=False)),
    "fraction": (Fraction, st.fractions()),
    "json": (Any, _JSON),
    "json value": (JsonValue, _JSON),
    "scalars": (int | float | str | bool | None, _FLOATS | st.integers() | _TEXT | st.booleans()),
    "number": (Decimal | int | None, _DECIMALS | st.integers() | st.none()),
    "date or time": (date | datetime, st.dates() | st.datetimes()),
    "list": (list[Decimal], st.lists(_DECIMALS)),
    "tuple": (tuple[bytes, str | None], st.tuples(st.binary(), _TEXT | st.none())),
    "set": (set[UUID], st.sets(st.uuids())),
    "frozenset": (frozenset[date], st.frozensets(st.dates())),
    "dict": (dict[str, list[bytes]], st.dictionaries(_TEXT, st.lists(st.binary()))),
    "int keys": (dict[int, str], st.dictionaries(st.integers(), _TEXT)),
    "float keys": (dict[float, bool], st.dictionaries(_FLOATS, st.booleans())),
    "date keys": (dict[date, None], st.dictionaries(st.dates(), st.none())),
    "bytes keys": (dict[bytes, int], st.dictionaries(st.binary(), st.integers())),
}


@pytest.mark.parametrize("name", _ARGUMENTS)
def test_every_value_of_a_lossless_type_comes_back(name: str) -> None:
    annotation, values = _ARGUMENTS[name]
    codec = _codec(annotation)

    @given(values)
    @settings(deadline=None)
    def comes_back(value: object) -> None:
        back = codec.decode(codec.encode((), {"x": value}))[1]["x"]
        assert type(back) is type(value)
        assert difference(value, back) is None
        assert back == value

    comes_back()


# What JSON holds, and much that it doesn't; `Any` says nothing about which is meant.
_ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    | _DECIMALS | st.dates() | st.uuids()
)  # fmt: skip
_KEYS = st.text() | st.integers() | st.none() | st.booleans() | st.floats(allow_nan=False)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(_KEYS, inner)
        | st.sets(st.integers())
    )


@given(st.recursive(_ANYTHING, _containers, max_leaves=8))
@settings(deadline=None)
def test_anything_at_all_comes_back_or_is_refused(value: object) -> None:
    loose = _codec(Any)
    with contextlib.suppress(PayloadError):
        text = loose.encode((), {"x": value})
        assert repr(loose.decode(text)[1]["x"]) == repr(value)


def _codec(annotation: Any) -> Arguments:
    parameter = inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
    return Arguments("pay", Signature((parameter,), takes_context=False, returns=Any))
