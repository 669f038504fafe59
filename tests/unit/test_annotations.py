"""Annotations that may travel, and those that are refused where the action is registered."""

import collections
import collections.abc
import enum
import inspect
import ipaddress
import itertools
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Required,
    TypeVar,
)
from uuid import UUID

import pytest
from pydantic import BaseModel, Field, JsonValue, PlainSerializer, field_serializer
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import UserDefinedType
from typing_extensions import TypeAliasType, TypedDict

from cyclone_sqla.annotations import is_exact, members, problems
from cyclone_sqla.arguments import Arguments
from cyclone_sqla.context import Context
from cyclone_sqla.signatures import Signature

T = TypeVar("T")


class Base(DeclarativeBase):
    """A mapping of a test's own."""


class Account(Base):
    """A mapped class."""

    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)


class Customer(Base):
    """Another one."""

    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)


class OpaqueType(UserDefinedType[Any]):
    """A column type that does not tell what its values are."""


class Keyless(Base):
    """A mapped class whose key may be anything."""

    __tablename__ = "keyless"
    id = mapped_column(OpaqueType, primary_key=True)


class Colour(enum.Enum):
    """Values are text."""

    RED = "red"


class Size(enum.Enum):
    """Values are numbers."""

    SMALL = 1


class Priority(enum.IntEnum):
    """Members are ints."""

    HIGH = 1


class Corner(enum.Enum):
    """Values are tuples."""

    ORIGIN = (0, 0)


@dataclass
class Point:
    """Required x and y."""

    x: int
    y: int


@dataclass
class Circle:
    """Required radius."""

    radius: float


@dataclass
class Pixel:
    """All that a Point has, and a colour."""

    x: int
    y: int
    colour: str = "black"


class Cat(BaseModel):
    """Tagged by a Literal."""

    kind: Literal["cat"]
    name: str


class Dog(BaseModel):
    """Tagged by a Literal."""

    kind: Literal["dog"]
    name: str


class Mixed(TypedDict):
    """Holds a union that can't travel."""

    amount: Decimal | str


@dataclass
class Order:
    """Holds a mapped class."""

    account: Account


@dataclass
class Box(Generic[T]):
    """Holds anything."""

    content: T


class Pair(NamedTuple):
    """Holds a list of what can't travel."""

    left: list[bytearray]
    right: int


@dataclass
class Node:
    """Refers to itself."""

    next: "Node | None" = None


class Movie(TypedDict):
    """Tells of its keys which may be missing."""

    title: str
    kind: Required[Literal["movie"]]
    year: NotRequired[Annotated[int, Field(gt=1800)]]


class Play(TypedDict):
    """As a Movie, with another tag."""

    title: str
    kind: Annotated[Literal["play"], Field(description="tag")]


@dataclass
class Constants:
    """A class variable is no field."""

    limit: ClassVar[Decimal | str] = "none"
    n: int = 0


class Price(BaseModel):
    """Says itself how its union travels."""

    amount: Decimal | str

    @field_serializer("amount")
    def write(self, amount: Decimal | str) -> list[str]:
        """The type beside the text."""
        return [type(amount).__name__, str(amount)]


class Marked(BaseModel):
    """Says in its metadata how its union travels."""

    amount: Annotated[Decimal | str, PlainSerializer(repr)]


class Unmarked(BaseModel):
    """Holds a union that can't travel."""

    amounts: list[Annotated[Decimal | str, Field(description="money")]]


Tree = TypeAliasType("Tree", "dict[str, Tree] | int")
Money = NewType("Money", Decimal)
Opaque = Annotated[Decimal, PlainSerializer(float)]


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        (Decimal | str, "Decimal | str: both travel as a JSON string"),
        (str | Decimal, "JSON string"),
        (UUID | str, "JSON string"),
        (datetime | str, "JSON string"),
        (timedelta | str | None, "JSON string"),
        (bytes | str, "JSON string"),
        (datetime | Decimal, "JSON string"),
        (Path | str, "JSON string"),
        (Money | str, "JSON string"),
        (Literal["auto"] | Decimal, "JSON string"),
        (ipaddress.IPv4Address | ipaddress.IPv6Address, "JSON string"),
        (list[int] | set[int], "JSON array"),
        (list[int] | tuple[int, ...], "JSON array"),
        (list[int] | list[str], "JSON array"),
        (Pair | list[int], "JSON array"),
        (Colour | str, "JSON string"),
        (Size | int, "JSON number"),
        (Size | float, "JSON number"),
        (Size | Decimal, "JSON number"),
        (Priority | int, "JSON number"),
        (Point | Pixel, "JSON object"),
        (Point | dict[str, int], "JSON object"),
        (dict[str, int] | dict[str, str], "JSON object"),
        (JsonValue | Decimal, "JSON string"),
        (list[dict[str, Decimal | str]], "JSON string"),
        (Mixed, "Mixed.amount: Decimal | str"),
        (Unmarked, "Unmarked.amounts: Decimal | str"),
        (Pair, "Pair.left: bytearray: would arrive as bytes"),
        (dict[None, int], "keys of None"),
        (dict[tuple[int, int], int], r"keys of tuple\[int, int\]"),
        (dict[Size, int], "keys of Size"),
        (dict[Literal[1, 2], int], "keys of int"),
        (dict[int | str, int], "use one type"),
        (Mapping[int | None, str], "use one type"),
        (Iterable[int], "say list"),
        (Iterator[int], "say list"),
        (AsyncIterator[int], "say list"),
        (collections.abc.Generator[int, None, None], "say list"),
        (Callable[[], int], "callable"),
        (bytearray, "say bytes"),
        (memoryview, "say bytes"),
        (range, "the bounds"),
        (slice, "the bounds"),
        (type[int], "pass a name"),
        (type, "pass a name"),
        (re.Pattern[str], "flags would be lost"),
        (Corner, "ORIGIN is not a str, int or float"),
        (Literal[Colour.RED], "would not come back"),
        (Literal[b"x"], "would not come back"),
        (list[T], "type variable"),
        (Account | int, r"Account \| int: a mapped class travels as its primary key"),
        (list[Account | str | None], r"Account \| str: a mapped class"),
        (Account | Customer, r"Account \| Customer: a mapped class"),
        (dict[Account, int], "keys of Account: rows can't be keys"),
        (set[Account], "rows can be in a list"),
        (frozenset[Account | None], "rows can be in a list"),
        (collections.defaultdict[str, list[Account]], "or the values of a dict"),
        (Box[Account], "rows can be in a list"),
        (Order, r"Order\.account: Account is a mapped class, which can't be inside another"),
        (Keyless, r"Keyless\.id: the type of this key's values is not known"),
        (Context, "first positional parameter"),
        (list[Context], "first positional parameter"),
    ],
    ids=str,
)
def test_an_annotation_that_could_change_a_value_is_refused(annotation: Any, reason: str) -> None:
    found = "; ".join(problems(annotation))
    assert re.search(reason, found), found


@pytest.mark.parametrize(
    "annotation",
    [
        int | float | str | bool | None,
        Decimal | int,
        Decimal | float | None,
        date | datetime,
        date | datetime | int,
        Colour | int,
        Size | str,
        Literal["a", 1] | None,
        Literal["auto", 3],
        Literal[True] | None,
        list[int] | dict[str, int] | str,
        list[int | str],
        Point | Circle | None,
        Cat | Dog,
        Movie | Play,
        Constants,
        Price,
        Marked,
        Point | str | list[int],
        JsonValue,
        JsonValue | None,
        Mapping[str, JsonValue],
        Any,
        object,
        Any | None,
        dict,
        list,
        dict[Colour, int],
        dict[Priority, int],
        dict[Literal["a", "b"], int],
        dict[UUID, dict[date, Decimal]],
        Sequence[int],
        collections.OrderedDict[str, int],
        collections.Counter[str],
        Node,
        Tree,
        Money | None,
        Opaque,
        Annotated[int | None, Field(gt=0)],
    ],
    ids=str,
)
def test_an_annotation_that_always_comes_back_is_allowed(annotation: Any) -> None:
    assert list(problems(annotation)) == []


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement is of Python 3.12")
def test_an_alias_may_name_itself() -> None:
    names: dict[str, Any] = {"Decimal": Decimal}
    exec("type Tree = dict[str, Tree] | int", names)
    exec("type Bad = list[Bad] | Decimal | str", names)
    assert list(problems(names["Tree"])) == []
    assert len(list(problems(names["Bad"]))) == 1
    codec = _codec(names["Tree"])
    assert codec.decode(codec.encode((), {"x": {"a": {"b": 1}}}))[1] == {"x": {"a": {"b": 1}}}


_VALUES: dict[Any, list[Any]] = {
    type(None): [None],
    bool: [True, False],
    int: [0, 1, -5, 2**70],
    float: [0.0, 1.0, 1.5, -0.0, 1e22, 1704067200.0],
    str: ["", "1", "1.5", "2020-01-01", "2020-01-01T00:00:00Z", "P1D", "true", "null", "red"],
    Decimal: [Decimal(1), Decimal("1.50"), Decimal(1704067200)],
    date: [date(2020, 1, 1)],
    datetime: [datetime(2020, 1, 1, tzinfo=UTC), datetime(2020, 1, 1, 12, 30, 1, tzinfo=UTC)],
    time: [time(1, 2), time(0)],
    timedelta: [timedelta(1), timedelta(seconds=1.5), timedelta(0)],
    UUID: [UUID(int=5)],
    Colour: [Colour.RED],
    Size: [Size.SMALL],
    Priority: [Priority.HIGH],
    complex: [1 + 2j, 1j, 1 + 0j],
    Fraction: [Fraction(1, 2), Fraction(3)],
    Path: [Path("red"), Path("1")],
    bytes: [b"", b"1", b"red", b"\xff"],
    list[int]: [[], [1]],
    dict[str, int]: [{}, {"x": 1, "y": 2}],
    Point: [Point(1, 2)],
    Circle: [Circle(1.5)],
    Pixel: [Pixel(1, 2)],
}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(_VALUES, 2)), ids=str)
def test_every_value_of_an_allowed_union_comes_back(one: Any, other: Any) -> None:
    for union in (one | other, other | one):
        if not list(problems(union)):
            codec = _codec(union)
            for value in _VALUES[one] + _VALUES[other]:
                back = codec.decode(codec.encode((), {"x": value}))[1]["x"]
                assert type(back) is type(value)
                assert back == value
                assert isinstance(value, datetime) or repr(back) == repr(value)


@pytest.mark.parametrize(
    ("annotation", "exact"),
    [
        (int, True),
        (str | None, True),
        (list[Decimal], True),
        (dict[str, set[UUID]], True),
        (tuple[int, bytes], True),
        (tuple[timedelta, ...], True),
        (frozenset[date], True),
        (Money, True),
        (None, True),
        (float, False),
        (datetime, False),
        (time, False),
        (list, False),
        (int | str, False),
        (dict[int, str], False),
        (Colour, False),
        (Point, False),
        (Any, False),
        (Literal["a"], False),
        (Annotated[int, Field(strict=False)], False),
    ],
    ids=str,
)
def test_only_exact_leaves_skip_the_round_trip(annotation: Any, exact: bool) -> None:
    assert is_exact(annotation) is exact


def test_the_members_of_a_union_are_found_through_aliases_and_metadata() -> None:
    alias = TypeAliasType("alias", int | Annotated[str, Field(max_length=3)])
    union = Annotated[alias | None, Field(description="x")] | Money
    assert members(union) == [int, str, type(None), Decimal]


def _codec(annotation: Any) -> Arguments:
    parameter = inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
    return Arguments("kind", Signature((parameter,), takes_context=False, returns=Any))
