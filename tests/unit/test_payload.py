"""Plain JSON from producers without the code, the size of a payload, and the path to a fault."""

import enum
import json
import math
from collections import OrderedDict
from datetime import date
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyclone_sqla.errors import PayloadError
from cyclone_sqla.payload import check_json, check_size, difference, path_text

_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
_JSON = st.recursive(
    _SCALARS | _TEXT, lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner), max_leaves=20
)


class _Status(enum.StrEnum):
    PAID = "paid"


@given(st.dictionaries(_TEXT, _JSON))
def test_plain_json_comes_back_as_it_was_given(arguments: dict[str, Any]) -> None:
    back = json.loads(check_json("pay", arguments))
    assert repr(back) == repr(arguments)


def test_any_mapping_of_arguments_is_taken() -> None:
    assert check_json("pay", MappingProxyType({"a": 1})) == '{"a":1}'


@pytest.mark.parametrize(
    ("arguments", "path", "reason"),
    [
        ([1], "", "not be a list"),
        ("a", "", "not be a str"),
        ({1: 2}, "", "key of type int"),
        ({"a": (1, 2)}, "a", "of type tuple"),
        ({"a": {1}}, "a", "of type set"),
        ({"a": [date(2024, 1, 1)]}, "a[0]", "of type date"),
        ({"a": Decimal(1)}, "a", "of type Decimal"),
        ({"a": b"x"}, "a", "of type bytes"),
        ({"a": _Status.PAID}, "a", "of type _Status"),
        ({"a": OrderedDict(b=1)}, "a", "of type OrderedDict"),
        ({"a": [{"b": {None: 1}}]}, "a[0].b", "key of type NoneType"),
        ({"a": {_Status.PAID: 1}}, "a", "key of type _Status"),
        ({"a": math.nan}, "a", "JSON has no NaN"),
        ({"a": {"b": -math.inf}}, "a.b", "JSON has no NaN"),
        ({"a": "\x00"}, "a", "NUL"),
        ({"a b": "\ud800"}, "['a b']", "surrogate"),
        ({"a": {"\x00": 1}}, r"a['\x00']", "the key holds a NUL"),
        ({"\ud800": 1}, r"['\ud800']", "the key holds a lone surrogate"),
        pytest.param({"a": 10**4300}, "a", "4300 digits", id="huge"),
    ],
)
def test_what_is_not_plain_json_is_refused_with_its_path(
    arguments: Any, path: str, reason: str
) -> None:
    with pytest.raises(PayloadError, match=reason) as caught:
        check_json("pay", arguments)
    assert (caught.value.kind, caught.value.path) == ("pay", path)


def test_the_largest_whole_number_of_4300_digits_is_plain_json() -> None:
    largest = 10**4300 - 1
    assert json.loads(check_json("pay", {"a": -largest})) == {"a": -largest}


def test_lists_that_contain_themselves_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(PayloadError, match="contains itself"):
        check_json("pay", {"a": endless})


@pytest.mark.parametrize("text", ["x" * 10, "é" * 5, "€" * 3 + "x"])
def test_a_payload_may_be_as_large_as_the_limit_in_bytes(text: str) -> None:
    check_size("pay", text, 10)
    with pytest.raises(PayloadError, match="10 bytes of JSON, more than the limit of 9"):
        check_size("pay", text, 9)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), ""),
        (("rows", 3, "name"), "rows[3].name"),
        (("a", "b c"), "a['b c']"),
        (("a", "1"), "a['1']"),
        (("a", None), "a[None]"),
        ((1, "a"), "[1].a"),
        (("a", "x" * 1000), "a['xxxxxxxxxxxx...xxxxxxxxxxxxx']"),
        (("a", 10**5000), "a[…]"),
    ],
    ids=["nothing", "rows", "space", "digit", "None", "index first", "long", "huge"],
)
def test_a_path_reads_as_one_would_write_it(path: tuple[object, ...], text: str) -> None:
    assert path_text(path) == text


class _WithoutEq:
    def __init__(self, held: object) -> None:
        self.held = held


@pytest.mark.parametrize(
    ("sent", "back"),
    [
        (_WithoutEq([1]), _WithoutEq([1])),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}),
        ({1, 2}, {2, 1}),
        (_Status.PAID, "paid"),
        (1, 1.0),
    ],
)
def test_what_is_the_same_has_no_difference(sent: object, back: object) -> None:
    assert difference(sent, back) is None


@pytest.mark.parametrize(
    ("sent", "back", "path"),
    [
        (True, 1, ()),
        (1, True, ()),
        (0, False, ()),
        (1.0, 1, ()),
        (0.0, -0.0, ()),
        (Decimal("1.0"), Decimal("1.00"), ()),
        ({True: "a"}, {1: "a"}, (True,)),
        ({"a": 1, "b": 2}, {"a": 1}, ("b",)),
        ({"a": 1}, {"a": 1, "b": 2}, ()),
        ([1, 2], [1], ()),
        ({1.0}, {1}, ()),
        ({1, 2}, {1, 3}, ()),
        ((1,), [1], ()),
        ([{"a": (1,)}], [{"a": [1]}], (0, "a")),
        (_WithoutEq(1), _WithoutEq(2), ()),
        (None, "None", ()),
    ],
)
def test_what_arrives_changed_is_found_with_its_path(
    sent: object, back: object, path: tuple[object, ...]
) -> None:
    fault = difference(sent, back)
    assert fault is not None
    assert fault.path == path
