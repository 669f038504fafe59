"""Arguments to JSON and back: what arrives unchanged, and what is refused with its path."""

import collections
import enum
import inspect
import ipaddress
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, cast
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from pydantic import BaseModel, ConfigDict, Field, JsonValue, SecretStr
from typing_extensions import TypeAliasType, TypedDict

from cyclone_sqla.arguments import Arguments, Results
from cyclone_sqla.errors import PayloadError, RegistrationError
from cyclone_sqla.signatures import read_signature

_BERLIN = ZoneInfo("Europe/Berlin")
_CLOCK_BACK = datetime(2024, 10, 27, 2, 30, tzinfo=_BERLIN)


class Colour(enum.Enum):
    RED = "red"


class Size(enum.Enum):
    SMALL = 1
    WIDE = 1.5


class Priority(enum.IntEnum):
    HIGH = 1


class Status(enum.StrEnum):
    PAID = "paid"


class OldStatus(str, enum.Enum):  # noqa: UP042 - str() of this one is not its value
    PAID = "paid"


class Permission(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Row:
    name: str
    amount: Decimal = Decimal(0)
    raw: bytes = b""
    ratio: float = 1.0


@dataclass
class TaxedRow(Row):
    tax: Decimal = Decimal(0)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: int
    when: datetime


@dataclass
class Node:
    next: "Node | None" = None


class Pair(NamedTuple):
    left: int
    right: str


class Model(BaseModel):
    x: int
    extra: float = 1.0


class SubModel(Model):
    y: int = 1


class Aliased(BaseModel):
    user_id: int = Field(alias="userId")


class OnlyWritten(BaseModel):
    user_id: int = Field(serialization_alias="userId")


class Excluded(BaseModel):
    x: int = Field(default=1, exclude=True)


class Base64Model(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    raw: bytes


class Movie(TypedDict, total=False):
    title: str
    released: date


Money = NewType("Money", Decimal)
Blob = TypeAliasType("Blob", bytes)
Tree = TypeAliasType("Tree", "dict[str, Tree] | int")


def _codec(annotation: Any) -> Arguments:
    def action(*, x: annotation) -> None:  # type: ignore[valid-type]
        pass

    return _codec_of(action)


def _codec_of(function: Callable[..., Any]) -> Arguments:
    return Arguments("pay", read_signature("pay", function, {}))


def _sent(annotation: Any, value: object) -> Any:
    codec = _codec(annotation)
    return codec.decode(codec.encode((), {"x": value}))[1]["x"]


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (bool, True),
        (int, 0),
        (int, 2**63),
        (int, -(2**63) - 1),
        (float, 1e22),
        (float, 5e-324),
        (float, 1.7976931348623157e308),
        (float, 0.1),
        (str, ""),
        (str, 'Ä\U0001f300\n\t"\\\x7f'),
        (str, r"\u0000"),
        (str, "�"),
        (bytes, b""),
        (bytes, b"\x00\xff\xfe"),
        (Blob, b"\xff"),
        (bytes | None, b"\xff"),
        (list[bytes], [b"\xff\x00", b"text"]),
        (dict[bytes, tuple[bytes, int]], {b"\xff": (b"\xfe", 1)}),
        (Annotated[bytes, Field(max_length=3)], b"\xff"),
        (datetime, datetime(2024, 1, 1, 12, 30, 1, 999999, tzinfo=UTC)),
        (datetime, datetime(2024, 1, 1)),  # noqa: DTZ001
        (datetime, datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=45)))),
        (datetime, datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))),
        (date, date.min),
        (date, date.max),
        (time, time(1, 2, 3, 4)),
        (time, time(1, 2, tzinfo=UTC)),
        (timedelta, timedelta.max),
        (timedelta, timedelta.min),
        (timedelta, timedelta(microseconds=-1)),
        (UUID, UUID(int=2**128 - 1)),
        (Decimal, Decimal("9.990")),
        (Decimal, Decimal("1E+5")),
        (Decimal, Decimal("-0")),
        (Decimal, Decimal("1E-400")),
        (Money, Decimal("1.10")),
        (Colour, Colour.RED),
        (Size, Size.SMALL),
        (Size, Size.WIDE),
        (Priority, Priority.HIGH),
        (Status, Status.PAID),
        (OldStatus, OldStatus.PAID),
        (Permission, Permission.READ | Permission.WRITE),
        (Permission, Permission(0)),
        (Path, Path("/a/b c")),
        (Fraction, Fraction(1, 3)),
        (complex, 1 - 2j),
        (ipaddress.IPv4Address, ipaddress.ip_address("192.0.2.1")),
        (ipaddress.IPv6Network, ipaddress.ip_network("2001:db8::/64")),
        (Row, Row("a", Decimal("1.50"), b"text", -0.0)),
        (Slotted, Slotted(1, datetime(2024, 1, 1, tzinfo=UTC))),
        (Pair, Pair(1, "a")),
        (Model, Model(x=1)),
        (Aliased, Aliased(userId=1)),
        (Base64Model, Base64Model(raw=b"\xff")),
        (Movie, {"title": "M", "released": date(1931, 5, 11)}),
        (Movie, {}),
        (Node, Node(Node(None))),
        (Tree, {"a": {"b": 1}}),
        (set[int], {3, 1, 2}),
        pytest.param(frozenset[str], frozenset({"a", "b"}), id="frozenset of str"),
        (tuple[int, ...], (1, 2)),
        (tuple[int, str], (1, "a")),
        (collections.deque[int], collections.deque([1, 2])),
        (collections.OrderedDict[str, int], collections.OrderedDict(b=1, a=2)),
        (collections.Counter[str], collections.Counter("aab")),
        (dict[str, Row], {"a b": Row("a")}),
        (dict[int, str], {1: "a", -(2**70): "b"}),
        (dict[bool, int], {True: 1}),
        (dict[float, int], {1.5: 1, 1e22: 2}),
        (dict[UUID, int], {UUID(int=1): 1}),
        (dict[date, int], {date(2024, 1, 1): 1}),
        (dict[Decimal, int], {Decimal("1.0"): 1}),
        (dict[Colour, int], {Colour.RED: 1}),
        (dict[Priority, int], {Priority.HIGH: 1}),
        (Sequence[int], [1, 2]),
        (Mapping[str, JsonValue], {"a": [1, 1.0, None, True, "x", {}]}),
        (Any, {"a": [1, 1.0, None, True, "x", {"b": []}]}),
        (object, "x"),
        (dict, {"a": 1}),
        (Literal["a", 1, True], 1),
        (int | float | str | bool | None, True),
        (int | float | str | bool | None, 1.0),
        (int | float | str | bool | None, None),
        (Decimal | int, Decimal(1)),
        (Decimal | int, 1),
        (date | datetime, date(2024, 1, 1)),
        (date | datetime, datetime(2024, 1, 1, tzinfo=UTC)),
        (date | datetime, datetime(2024, 1, 1)),  # noqa: DTZ001
        (None, None),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_value_arrives_as_it_was_given(annotation: Any, value: object) -> None:
    back = _sent(annotation, value)
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize("value", [0.0, -0.0, 1e22, 2.5], ids=str)
def test_the_sign_of_a_zero_and_the_type_of_a_whole_float_are_kept(value: float) -> None:
    for annotation in (float, Any, list[float], dict[str, float]):
        wrapped = {"k": value} if annotation == dict[str, float] else value
        wrapped = [value] if annotation == list[float] else wrapped
        assert repr(_sent(annotation, wrapped)) == repr(wrapped)


@pytest.mark.parametrize("text", ["9.990", "-0", "0E-7", "1E+5", "123456789.123456789123456789"])
def test_a_decimal_keeps_its_digits_exponent_and_sign(text: str) -> None:
    back = _sent(Decimal | None, Decimal(text))
    assert back.as_tuple() == Decimal(text).as_tuple()


@pytest.mark.parametrize("fold", [0, 1])
def test_a_datetime_with_a_zone_arrives_with_its_wall_time_and_offset(fold: int) -> None:
    value = _CLOCK_BACK.replace(fold=fold)
    back = _sent(datetime, value)
    assert back.replace(tzinfo=None) == value.replace(tzinfo=None)
    assert back.utcoffset() == value.utcoffset() == timedelta(hours=2 - fold)


@pytest.mark.parametrize("digits", [400, 4299, 4300])
def test_a_whole_number_of_up_to_4300_digits_arrives(digits: int) -> None:
    for value in (10 ** (digits - 1), -(10 ** (digits - 1))):
        assert _sent(int, value) == value
        assert _sent(Any, value) == value


@pytest.mark.parametrize(
    ("annotation", "value", "arrives"),
    [
        (str, OldStatus.PAID, "paid"),
        (str, Status.PAID, "paid"),
        (int, Priority.HIGH, 1),
        (float, 1, 1.0),
        (float, 2**53, float(2**53)),
        (dict[str, int], collections.defaultdict(int, a=1), {"a": 1}),
        (dict[str, int], {Status.PAID: 1}, {"paid": 1}),
        (list[int], type("List", (list,), {})([1]), [1]),
        (date, type("Day", (date,), {})(2024, 1, 1), date(2024, 1, 1)),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_subclass_arrives_as_what_the_annotation_says(
    annotation: Any, value: object, arrives: object
) -> None:
    back = _sent(annotation, value)
    assert type(back) is type(arrives)
    assert back == arrives


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("annotation", "value", "path", "reason"),
    [
        (int, True, "x", "valid integer"),
        (int, "1", "x", "valid integer"),
        (int, 1.0, "x", "valid integer"),
        (str, b"a", "x", "valid string"),
        (float, True, "x", "valid number"),
        (date, datetime(2024, 1, 1, tzinfo=UTC), "x", "valid date"),
        (bytes, bytearray(b"a"), "x", "valid bytes"),
        (bytes, "YQ==", "x", "valid bytes"),
        (Decimal, "9.99", "x", "instance of Decimal"),
        (UUID, str(UUID(int=1)), "x", "instance of UUID"),
        (list[int], (1, 2), "x", "valid list"),
        (list[Row], [Row("a"), None], "x[1]", "instance of Row"),
        (list[Row] | None, [None], "x[0]", "instance of Row"),
        (dict[str, int], {"a b": "c"}, "x['a b']", "valid integer"),
        (dict[str, int], {1: 2}, "x[1]", "valid string"),
        (Row, {"name": "a"}, "x", "instance of Row"),
        (Model, {"x": 1}, "x", "dict would arrive as Model"),
        (Movie, {"title": "M", "year": 1931}, "x.year", "not expected"),
        (Annotated[bytes, Field(max_length=1)], b"\xff\xff", "x", "at most 1"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_value_of_another_type_is_refused_with_its_path(
    annotation: Any, value: object, path: str, reason: str
) -> None:
    _assert_refused(annotation, value, path, reason)


@pytest.mark.parametrize(
    ("annotation", "value", "path", "reason"),
    [
        (float, math.nan, "x", "finite"),
        (float, math.inf, "x", "finite"),
        (list[float], [1.0, -math.inf], "x[1]", "finite"),
        (Decimal, Decimal("NaN"), "x", "finite"),
        (Decimal, Decimal("Infinity"), "x", "finite"),
        (Any, {"a": math.nan}, "x.a", "JSON has no NaN"),
        (Row, Row("a", ratio=math.nan), "x.ratio", "JSON has no NaN"),
        (Model, Model(x=1, extra=math.inf), "x.extra", "JSON has no NaN"),
        (complex, complex("nan"), "x", "changed"),
        (datetime, datetime(1890, 1, 1, tzinfo=_BERLIN), "x", "offset"),
        (datetime, datetime(2024, 1, 1, tzinfo=timezone(timedelta(seconds=1))), "x", "offset"),
        (time, time(1, 2, tzinfo=_BERLIN), "x", "offset"),
        (float, 2**53 + 1, "x", "int would arrive as float"),
        (Any, (1, 2), "x", "tuple would arrive as list"),
        (Any, {1}, "x", "set would arrive as list"),
        (Any, [{"a": date(2024, 1, 1)}], "x[0].a", "date would arrive as str"),
        (Any, Decimal(1), "x", "Decimal would arrive as str"),
        (Any, b"text", "x", "bytes would arrive as str"),
        (dict, {1: "a"}, "x[1]", "the key, of type int, would arrive as str"),
        (dict, {1: "a", "1": "b"}, "x[1]", "the key, of type int, would arrive as str"),
        (Any, {None: 1}, "x[None]", "NoneType, would arrive as str"),
        (list, [(1,)], "x[0]", "tuple would arrive as list"),
        (Sequence[int], (1, 2), "x", "tuple would arrive as list"),
        (collections.deque[int], collections.deque([1], maxlen=3), "x", "maxlen"),
        (Row, TaxedRow("a", tax=Decimal(1)), "x", "TaxedRow would arrive as Row"),
        (list[Model], [SubModel(x=1, y=2)], "x[0]", "SubModel would arrive as Model"),
        (Excluded, Excluded(x=5), "x.x", "changed"),
        (OnlyWritten, OnlyWritten(user_id=1), "x.user_id", "missing"),
        (Row, Row(cast("Any", 5)), "x.name", "valid string"),
        (Model, Model.model_construct(x=cast("Any", "a")), "x.x", "valid integer"),
        (Model, Model.model_construct(x=cast("Any", True)), "x.x", "bool would arrive as int"),
        (Literal[1], True, "x", "bool would arrive as int"),
        (SecretStr, SecretStr("s"), "x", "changed"),
        (object, NotImplemented, "x", "serialize unknown type"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_value_that_would_arrive_changed_is_refused_with_its_path(
    annotation: Any, value: object, path: str, reason: str
) -> None:
    _assert_refused(annotation, value, path, reason)


@pytest.mark.parametrize(
    ("annotation", "value", "path", "reason"),
    [
        (str, "a\x00b", "x", "NUL"),
        (Any, ["a", "\x00"], "x[1]", "NUL"),
        (dict[str, int], {"\x00": 1}, r"x['\x00']", "the key holds a NUL"),
        (Row, Row(r"\u0000" + "\x00"), "x.name", "NUL"),
        (Path, Path("a\x00"), "x", "NUL"),
        (str, "\ud800", "x", "surrogate"),
        (list[str], ["a", "\udfff"], "x[1]", "surrogate"),
        (dict[str, int], {"\ud800": 1}, r"x['\ud800']", "the key holds a lone surrogate"),
        (dict[str, dict[str, int]], {"a": {"\ud800": 1}}, r"x.a['\ud800']", "surrogate"),
        (Any, {"a": "\ud800"}, "x.a", "surrogate"),
        (set[str], {"\ud800"}, "x[…]", "surrogate"),
        (Row, Row("a", raw=b"\xff"), "x.raw", "ser_json_bytes='base64'"),
        (Any, {"a": b"\xff"}, "x.a", "not UTF-8"),
        pytest.param(int, 10**4300, "x", "4300 digits", id="int"),
        pytest.param(int, -(10**5000), "x", "4300 digits", id="negative int"),
        pytest.param(list[int], [1, 10**5000], "x[1]", "4300 digits", id="list"),
        pytest.param(Any, {"a": 10**5000}, "x.a", "4300 digits", id="Any"),
        pytest.param(dict[int, int], {10**5000: 1}, "x[…]", "4300 digits", id="key"),
        pytest.param(float, 10**400, "x", "valid number", id="int for float"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_json_text_or_a_database_cannot_hold_is_refused_with_its_path(
    annotation: Any, value: object, path: str, reason: str
) -> None:
    _assert_refused(annotation, value, path, reason)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [(Any, _nested(200)), (Any, _endless()), (list[Any], _endless())],
    ids=["deep", "endless", "endless list"],
)
def test_nesting_that_the_worker_could_not_read_is_refused(annotation: Any, value: object) -> None:
    error = _refusal(annotation, value)
    assert error.path.startswith("x[0][0]")
    assert len(error.path) < 120
    assert "deep" in error.reason


def _assert_refused(annotation: Any, value: object, path: str, reason: str) -> None:
    error = _refusal(annotation, value)
    assert error.path == path
    assert reason in error.reason


def _refusal(annotation: Any, value: object) -> PayloadError:
    codec = _codec(annotation)
    with pytest.raises(PayloadError) as caught:
        codec.encode((), {"x": value})
    assert caught.value.kind == "pay"
    return caught.value


def test_a_refusal_does_not_repeat_the_value() -> None:
    error = _refusal(int, "4111 1111 1111 1111")
    assert "4111" not in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__


# ---- calls -------------------------------------------------------------------------------------


def _all_kinds(
    a: int, b: int = 2, /, c: int = 3, *rest: int, d: bytes = b"", e: int, **options: Decimal
) -> None:
    pass


@pytest.mark.parametrize(
    ("args", "kwargs", "stored"),
    [
        ((1,), {"e": 5}, {"a": 1, "e": 5}),
        ((1, 2), {"c": 4, "e": 5}, {"a": 1, "b": 2, "c": 4, "e": 5}),
        ((1, 2, 3, 4, 5), {"e": 6}, {"a": 1, "b": 2, "c": 3, "rest": [4, 5], "e": 6}),
        ((1,), {"e": 5, "z": Decimal(1)}, {"a": 1, "e": 5, "options": {"z": "1"}}),
        ((1,), {"e": 5, "a": Decimal(1)}, {"a": 1, "e": 5, "options": {"a": "1"}}),
        ((1,), {"e": 5, "rest": Decimal(1)}, {"a": 1, "e": 5, "options": {"rest": "1"}}),
        ((1,), {"e": 5, "options": Decimal(1)}, {"a": 1, "e": 5, "options": {"options": "1"}}),
        ((1,), {"e": 5, "d": b"\xff"}, {"a": 1, "e": 5, "d": "/w=="}),
    ],
)
def test_a_call_is_stored_by_name_and_comes_back_as_the_same_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], stored: dict[str, Any]
) -> None:
    codec = _codec_of(_all_kinds)
    text = codec.encode(args, kwargs)
    assert json.loads(text) == stored
    again = inspect.signature(_all_kinds).bind(*codec.decode(text)[0], **codec.decode(text)[1])
    assert again == inspect.signature(_all_kinds).bind(*args, **kwargs)


def test_defaults_are_not_stored_so_that_those_of_the_running_code_apply() -> None:
    def old(a: int, b: int = 2) -> None:
        pass

    def new(a: int, b: int = 20, c: int = 30) -> None:
        pass

    text = _codec_of(old).encode((1,), {})
    assert text == '{"a":1}'
    assert _codec_of(new).decode(text) == ([], {"a": 1})


def test_a_gap_among_positional_parameters_is_filled_with_the_default() -> None:
    codec = _codec_of(_all_kinds)
    assert codec.decode('{"a":1,"rest":[9],"e":5}') == ([1, 2, 3, 9], {"e": 5})


@pytest.mark.parametrize("name", ["_x", "model_config", "schema", "json", "copy", "cls_", "args"])
def test_a_parameter_may_have_any_name(name: str) -> None:
    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=int)

    def action(**_: int) -> None:
        pass

    action.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    codec = _codec_of(action)
    assert codec.decode(codec.encode((), {name: 1})) == ([], {name: 1})


def _transfer(account: int, amount: Decimal, /, note: str = "") -> None:
    pass


def _plain(account: int, amount: Decimal, note: str = "") -> None:
    pass


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "path", "reason"),
    [
        (_plain, (), {"account": 1}, "amount", "is missing"),
        (_plain, (1,), {}, "amount", "is missing"),
        (_plain, (1, Decimal(1), "a", "b"), {}, "", "takes 3 positional arguments, not 4"),
        (_plain, (1,), {"account": 1, "amount": Decimal(1)}, "account", "given twice"),
        (_plain, (1, Decimal(1)), {"nota": "a"}, "nota", "not expected"),
        (_plain, (), {"account": 1, "amount": Decimal(1), "x": 1}, "x", "not expected"),
        (_transfer, (1,), {"amount": Decimal(1)}, "amount", "by position only"),
        (_transfer, (1, Decimal(1)), {"x": 1}, "x", "not expected"),
        (_all_kinds, (), {"e": 1}, "a", "is missing"),
        (_all_kinds, (1,), {}, "e", "is missing"),
        (_all_kinds, (1, 2, 3, "x"), {"e": 1}, "rest[0]", "valid integer"),
        (_all_kinds, (1,), {"e": 1, "z": 1}, "options.z", "instance of Decimal"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_with_the_parameter(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    path: str,
    reason: str,
) -> None:
    with pytest.raises(PayloadError, match=reason) as caught:
        _codec_of(function).encode(args, kwargs)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("text", "path", "reason"),
    [
        ("{}", "account", "missing"),
        ('{"account":1,"amount":"1","gone":1}', "gone", "not expected"),
        ('{"account":"1","amount":"1"}', "account", "valid integer"),
        ('{"account":1,"amount":"x"}', "amount", "valid decimal"),
        ("[]", "", "object"),
        ("{", "", "Invalid JSON"),
        ("", "", "Invalid JSON"),
    ],
)
def test_stored_arguments_that_the_code_no_longer_fits_are_refused(
    text: str, path: str, reason: str
) -> None:
    with pytest.raises(PayloadError, match=reason) as caught:
        _codec_of(_plain).decode(text)
    assert caught.value.path == path


def test_stored_arguments_are_read_strictly_inside_the_application_s_own_classes() -> None:
    with pytest.raises(PayloadError, match="valid integer") as caught:
        _codec(Model).decode('{"x":{"x":"5"}}')
    assert caught.value.path == "x.x"


def test_a_list_changed_after_the_call_does_not_change_the_job() -> None:
    rows = [1]
    text = _codec(list[int]).encode((), {"x": rows})
    rows.append(2)
    assert text == '{"x":[1]}'


# ---- by name -----------------------------------------------------------------------------------


def _by_name(
    account: int, amount: Decimal, raw: bytes = b"", pair: tuple[int, int] = (0, 0)
) -> None:
    pass


@pytest.mark.parametrize(
    ("mapping", "stored"),
    [
        ({"account": 1, "amount": Decimal("9.90")}, {"account": 1, "amount": "9.90"}),
        ({"account": 1, "amount": "9.90"}, {"account": 1, "amount": "9.90"}),
        (
            {"account": 1, "amount": Decimal(1), "raw": b"\xff", "pair": (1, 2)},
            {"account": 1, "amount": "1", "raw": "/w==", "pair": [1, 2]},
        ),
        (
            {"account": 1, "amount": "1", "raw": "/w==", "pair": [1, 2]},
            {"account": 1, "amount": "1", "raw": "/w==", "pair": [1, 2]},
        ),
    ],
)
def test_arguments_by_name_are_python_values_or_the_json_that_is_stored(
    mapping: dict[str, Any], stored: dict[str, Any]
) -> None:
    text = _codec_of(_by_name).encode_mapping(mapping)
    assert json.loads(text) == stored


@pytest.mark.parametrize(
    ("mapping", "path", "reason"),
    [
        ({"account": 1}, "amount", "missing"),
        ({"account": "1", "amount": "1"}, "account", "valid integer"),
        ({"account": 1, "amount": "x"}, "amount", "valid decimal"),
        ({"account": 1, "amount": "1", "raw": b"\xff"}, "amount", "instance of Decimal"),
        ({"account": 1, "amount": Decimal(1), "x": 1}, "x", "not expected"),
        ({"account": 1, "amount": "1", "x": 1}, "x", "not expected"),
        ({"account": 1, "amount": "1\x00"}, "amount", "Decimal"),
        ({1: 1, "account": 1, "amount": Decimal(1)}, "[1]", "string"),
        ([("account", 1)], "", "not be a list"),
    ],
)
def test_bad_arguments_by_name_are_refused_with_their_path(
    mapping: Any, path: str, reason: str
) -> None:
    with pytest.raises(PayloadError, match=reason) as caught:
        _codec_of(_by_name).encode_mapping(mapping)
    assert caught.value.path == path


def test_variadic_arguments_by_name_are_a_list_and_an_object() -> None:
    text = _codec_of(_all_kinds).encode_mapping(
        {"a": 1, "e": 2, "rest": [3], "options": {"z": "1.0"}}
    )
    assert _codec_of(_all_kinds).decode(text) == ([1, 2, 3, 3], {"e": 2, "z": Decimal("1.0")})


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "value", "text"),
    [
        (None, None, None),
        (int, None, None),
        (int, 1, "1"),
        (Decimal, Decimal("1.50"), '"1.50"'),
        (bytes, b"\xff", '"/w=="'),
        (Row, Row("a"), '{"name":"a","amount":"0","raw":"","ratio":1.0}'),
        (collections.abc.Coroutine[Any, Any, Decimal], Decimal("1.50"), '"1.50"'),
        (collections.abc.Awaitable[bytes], b"\xff", '"/w=="'),
        (None, {"a": 1}, '{"a":1}'),
        (Any, (1, date(2024, 1, 1)), '[1,"2024-01-01"]'),
        (Any, b"\xff", '"_w=="'),
        (Decimal | str, Decimal("1.5"), '"1.5"'),
        (object, "x", '"x"'),
    ],
)
def test_a_result_is_kept_by_its_annotation_or_as_well_as_json_can(
    annotation: Any, value: object, text: str | None
) -> None:
    assert Results("pay", annotation).encode(value) == text


@pytest.mark.parametrize(
    ("annotation", "value", "path", "reason"),
    [
        (int, "1", "result", "valid integer"),
        (list[Row], [Row("a", ratio=math.nan)], "result[0].ratio", "NaN"),
        (Row, TaxedRow("a"), "result", "TaxedRow would arrive as Row"),
        (Any, NotImplemented, "result", "serialize unknown type"),
        (Any, [math.nan], "result[0]", "NaN"),
        (Any, {"a": "\x00"}, "result.a", "NUL"),
        (Any, "\ud800", "result", "surrogate"),
        (Any, Path("a\x00"), "result", "NUL"),
        (Any, _endless(), "result[0]", "deep"),
        (str, "\x00", "result", "NUL"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_result_that_json_cannot_hold_is_refused(
    annotation: Any, value: object, path: str, reason: str
) -> None:
    with pytest.raises(PayloadError, match=reason) as caught:
        Results("pay", annotation).encode(value)
    assert caught.value.path.startswith(path)


# ---- registration ------------------------------------------------------------------------------


class Plain:
    """A class that pydantic knows nothing of."""


@dataclass
class HoldsPlain:
    plain: Plain
    number: int = field(default=0)


@pytest.mark.parametrize("annotation", [Plain, list[Plain], HoldsPlain], ids=str)
def test_a_type_without_a_schema_is_refused_with_its_parameter(annotation: Any) -> None:
    with pytest.raises(RegistrationError, match=r"pay: parameter 'x': .*Plain"):
        _codec(annotation)
