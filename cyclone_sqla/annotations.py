"""Which annotations an action's parameters may have, decided from the annotation alone.

A value travels as one of six JSON forms. In a union two members that travel in the same form can't be told
apart on arrival, so such a union is refused where the action is registered: else it would fail for some
values of a legal type, and in production only.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import ipaddress
import itertools
import re
import types
import typing
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, Union, cast
from uuid import UUID

import typing_extensions
from pydantic import BaseModel, GetCoreSchemaHandler, JsonValue
from pydantic_core import core_schema

from cyclone_sqla.context import Context

Seen = frozenset[type]

_IP_TYPES = (
    ipaddress.IPv4Address,
    ipaddress.IPv4Interface,
    ipaddress.IPv4Network,
    ipaddress.IPv6Address,
    ipaddress.IPv6Interface,
    ipaddress.IPv6Network,
)
_FORMS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("null", (NoneType,)),
    ("boolean", (bool,)),
    ("number", (int, float)),
    ("string", (str, bytes, Decimal, UUID, date, time, timedelta, PurePath, Fraction, complex)),
    ("string", _IP_TYPES),
    ("object", (dict, collections.abc.Mapping, BaseModel)),
    ("array", (list, tuple, set, frozenset, collections.deque, collections.abc.Collection)),
)
_NUMERIC = (int, float, Decimal, Fraction, complex)
_COMPATIBLE = ({int, float}, {date, datetime})

_EXACT = frozenset({int, str, bool, bytes, UUID, Decimal, timedelta, date, NoneType})
_EXACT_CONTAINERS = (list, set, frozenset)

_REFUSED: dict[object, str] = {
    collections.abc.Iterable: "arrives as a one-time iterator; say list",
    collections.abc.Iterator: "can be read only once; say list",
    collections.abc.Generator: "can be read only once; say list",
    collections.abc.AsyncIterable: "cannot be stored; say list",
    collections.abc.AsyncIterator: "cannot be stored; say list",
    collections.abc.Callable: "a callable cannot be stored",
    bytearray: "would arrive as bytes; say bytes",
    memoryview: "cannot be stored; say bytes",
    range: "cannot be stored; say list[int], or pass the bounds",
    slice: "cannot be stored; pass the bounds",
    type: "a class cannot be stored; pass a name",
    re.Pattern: "its flags would be lost; pass the pattern as str",
}


class Base64:
    """Bytes travel as base64 text: pydantic's own ways lose bytes that are not UTF-8."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Python side: bytes as they are. JSON side: base64 text."""
        from_text = core_schema.no_info_after_validator_function(
            lambda text: base64.b64decode(text, validate=True), core_schema.str_schema()
        )
        return core_schema.json_or_python_schema(
            json_schema=from_text,
            python_schema=core_schema.bytes_schema(strict=True),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda raw: base64.b64encode(raw).decode(),
                return_schema=core_schema.str_schema(),
                when_used="json",
            ),
        )


_BYTES = Annotated[bytes, Base64()]


def problems(annotation: Any, seen: Seen = frozenset()) -> Iterator[str]:
    """Why values of this annotation could not travel, one text for each reason."""
    found = members(annotation)
    yield from _clashes(found)
    for member in found:
        yield from _problems_of(member, seen)


def members(annotation: Any) -> list[Any]:
    """What a union is a union of, with aliases, NewTypes and plain metadata taken off."""
    origin = typing.get_origin(annotation)
    if annotation is None:
        return [NoneType]
    if origin is Annotated and not _is_opaque(annotation):
        return members(annotation.__origin__)
    if origin is Union or origin is types.UnionType:
        parts = [m for argument in typing.get_args(annotation) for m in members(argument)]
        return list(dict.fromkeys(parts))
    if isinstance(annotation, typing.NewType):
        return members(annotation.__supertype__)
    if _is_alias(annotation) and annotation is not JsonValue:
        return members(annotation.__value__)
    if origin is Literal and not _literal_problem(annotation):
        return list(dict.fromkeys(type(value) for value in typing.get_args(annotation)))
    return [annotation]


def is_exact(annotation: Any) -> bool:
    """Whether strict validation alone makes sure that every value arrives unchanged."""
    if typing.get_origin(annotation) is Annotated:
        return False
    found = [m for m in members(annotation) if m is not NoneType] or [NoneType]
    return len(found) == 1 and _is_exact_member(annotation, found[0])


def _is_exact_member(annotation: Any, member: Any) -> bool:
    origin, arguments = typing.get_origin(member), typing.get_args(member)
    if origin is None:
        return typing.get_origin(annotation) is not Literal and member in _EXACT
    if origin in _EXACT_CONTAINERS:
        return is_exact(arguments[0])
    if origin is tuple:
        return all(a is Ellipsis or is_exact(a) for a in arguments)
    return origin is dict and arguments[0] is str and is_exact(arguments[1])


def lossless(annotation: Any) -> Any:
    """The annotation with every ``bytes`` in it travelling as base64."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is bytes:
        return _BYTES
    if isinstance(annotation, typing.NewType):
        return lossless(annotation.__supertype__)
    if origin in (None, Literal) or (origin is Annotated and _is_opaque(annotation)):
        return annotation
    if origin is Annotated:
        inner = lossless(annotation.__origin__)
        return Annotated[(inner, *annotation.__metadata__)]
    rewritten = tuple(lossless(a) for a in arguments)
    if all(new is old for new, old in zip(rewritten, arguments, strict=True)):
        return annotation
    return _with_arguments(annotation, rewritten)


def _with_arguments(annotation: Any, arguments: tuple[Any, ...]) -> Any:
    origin = typing.get_origin(annotation)
    if origin is Union or origin is types.UnionType:
        return Union[arguments]
    if isinstance(annotation, types.GenericAlias):
        return types.GenericAlias(cast("type", origin), arguments)
    return annotation.copy_with(arguments)


def base_of(member: Any) -> Any:
    """The class of a generic alias, or the annotation itself."""
    return typing.get_origin(member) or member


def accepts_context(annotation: Any) -> bool:
    """Whether a type checker would take a parameter with this annotation for the Context."""
    found = members(annotation)
    wide = (Any, object, collections.abc.Hashable, typing.Hashable, Context)
    return any(m in wide or isinstance(m, typing.TypeVar) for m in found)


def _problems_of(member: Any, seen: Seen) -> Iterator[str]:
    base = base_of(member)
    if base is Any or base is object or base is JsonValue or base is Annotated:
        return
    reason = _refusal(member, base)
    if reason is not None:
        yield f"{name_of(member)}: {reason}"
        return
    if base is not Literal:
        yield from _problems_inside(member, base, seen)


def _refusal(member: Any, base: Any) -> str | None:
    if isinstance(base, typing.TypeVar | typing.ParamSpec | typing.TypeVarTuple):
        return "a type variable cannot be checked; write the types out"
    if base in _REFUSED:
        return _REFUSED[base]
    if base is Literal:
        return _literal_problem(member)
    if not isinstance(base, type):
        return None
    if issubclass(base, Context):
        return "only the first positional parameter can be the Context, annotated exactly Context"
    if hasattr(base, "__mapper__"):
        return (
            "a mapped class cannot be an argument; pass its primary key and load it in the action"
        )
    if issubclass(base, enum.Enum):
        return _enum_problem(base)
    return None


def _literal_problem(literal: Any) -> str | None:
    odd = [v for v in typing.get_args(literal) if type(v) not in (str, int, bool, NoneType)]
    if not odd:
        return None
    return f"{odd[0]!r} would not arrive as it is; use str, int, bool or None, or the Enum itself"


def _enum_problem(kind: type[enum.Enum]) -> str | None:
    odd = [m for m in kind if not isinstance(m.value, str | int | float)]
    return f"the value of {odd[0]} is not a str, int or float" if odd else None


def _problems_inside(member: Any, base: Any, seen: Seen) -> Iterator[str]:
    arguments = [a for a in typing.get_args(member) if a is not Ellipsis]
    if isinstance(base, type) and issubclass(base, collections.abc.Mapping) and arguments:
        yield from _key_problems(arguments[0])
    for argument in arguments:
        yield from problems(argument, seen)
    if isinstance(base, type) and base not in seen:
        for name, field in (_fields(base) or {}).items():
            if not isinstance(field.annotation, typing.TypeVar):
                inside = problems(field.annotation, seen | {base})
                yield from (f"{base.__name__}.{name}: {reason}" for reason in inside)


def _key_problems(annotation: Any) -> Iterator[str]:
    found = members(annotation)
    if len(found) > 1:
        yield f"keys of {name_of(annotation)}: all keys travel as text, so only one type can come back"
    for member in found:
        if not _is_fit_key(member) or (
            typing.get_origin(annotation) is Literal and member is not str
        ):
            yield f"keys of {name_of(member)}: would not come back from the text that JSON keys are"


def _is_fit_key(member: Any) -> bool:
    base = base_of(member)
    if isinstance(base, type) and issubclass(base, enum.Enum):
        return issubclass(base, int) or all(isinstance(m.value, str) for m in base)
    return not forms_of(base) & {"null", "array", "object"} or base in (Any, object, JsonValue)


def _clashes(found: list[Any]) -> Iterator[str]:
    for one, other in itertools.combinations(found, 2):
        shared = forms_of(base_of(one)) & forms_of(base_of(other))
        if (shared and not _are_told_apart(one, other)) or _is_number_clash(one, other):
            form = min(shared, default="number")
            yield (
                f"{name_of(one)} | {name_of(other)}: both travel as a JSON {form}, so the worker could get "
                "the other one; use one of them, or a class that holds either"
            )


def forms_of(base: Any) -> frozenset[str]:
    """The JSON forms in which values of this class travel; empty if only pydantic knows."""
    if base is Any or base is object or base is JsonValue:
        return frozenset(form for form, _ in _FORMS) - {"null"}
    if not isinstance(base, type):
        return frozenset({"object"}) if typing_extensions.is_typeddict(base) else frozenset()
    if issubclass(base, enum.Enum):
        return frozenset().union(*(forms_of(type(m.value)) for m in base))
    if typing_extensions.is_typeddict(base) or dataclasses.is_dataclass(base):
        return frozenset({"object"})
    return frozenset(next(([form] for form, kinds in _FORMS if issubclass(base, kinds)), []))


def _are_told_apart(one: Any, other: Any) -> bool:
    bases = {base_of(one), base_of(other)}
    if any(bases <= pair for pair in _COMPATIBLE):
        return True
    mine, theirs = _fields(base_of(one)), _fields(base_of(other))
    if mine is None or theirs is None or forms_of(base_of(one)) != {"object"}:
        return False
    return _is_tagged(mine, theirs) or (_lacks(mine, theirs) and _lacks(theirs, mine))


def _lacks(fields: dict[str, _Field], wanted: dict[str, _Field]) -> bool:
    """Whether an object with these fields can't be taken for the other class."""
    return any(field.required and name not in fields for name, field in wanted.items())


def _is_tagged(mine: dict[str, _Field], theirs: dict[str, _Field]) -> bool:
    for name in mine.keys() & theirs.keys():
        one, other = mine[name].annotation, theirs[name].annotation
        if typing.get_origin(one) is Literal and typing.get_origin(other) is Literal:
            if not set(typing.get_args(one)) & set(typing.get_args(other)):
                return True
    return False


def _is_number_clash(one: Any, other: Any) -> bool:
    pairs = ((base_of(one), base_of(other)), (base_of(other), base_of(one)))
    return any(_is_numeric_enum(a) and b in _NUMERIC for a, b in pairs)


def _is_numeric_enum(base: Any) -> bool:
    is_enum = isinstance(base, type) and issubclass(base, enum.Enum)
    return is_enum and any(isinstance(m.value, int | float) for m in base)


class _Field(NamedTuple):
    annotation: Any
    required: bool


def _fields(base: Any) -> dict[str, _Field] | None:
    """The fields of a dataclass, model, TypedDict or NamedTuple; None for anything else."""
    if not isinstance(base, type):
        return None
    models = getattr(base, "__pydantic_fields__", None)
    if models:
        return {n: _Field(f.annotation, f.is_required()) for n, f in models.items()}
    required = _required_names(base)
    return None if required is None else _hinted_fields(base, required)


def _required_names(base: Any) -> set[str] | None:
    if typing_extensions.is_typeddict(base):
        return set(base.__required_keys__)
    if dataclasses.is_dataclass(base):
        missing = dataclasses.MISSING
        fields = [f for f in dataclasses.fields(base) if f.init]
        return {f.name for f in fields if f.default is missing and f.default_factory is missing}
    if issubclass(base, tuple) and hasattr(base, "_fields"):
        return set(base._fields) - set(base._field_defaults)
    return None


def _hinted_fields(base: type, required: set[str]) -> dict[str, _Field]:
    try:
        hints = typing_extensions.get_type_hints(base, include_extras=False)
    except (NameError, TypeError):
        return {}  # pydantic knows more ways to resolve names, and says what is missing
    return {name: _Field(hint, name in required) for name, hint in hints.items()}


def _is_opaque(annotation: Any) -> bool:
    """Whether metadata takes over how values are read or written (a PlainSerializer, say)."""
    return any(hasattr(m, "__get_pydantic_core_schema__") for m in annotation.__metadata__)


def _is_alias(annotation: Any) -> bool:
    return isinstance(annotation, typing_extensions.TypeAliasType) or (
        type(annotation).__name__ == "TypeAliasType"
    )


def name_of(annotation: Any) -> str:
    """The annotation as one would write it, without modules."""
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return "None" if annotation is NoneType else annotation.__name__
    return re.sub(r"(?:\w+\.)+(?=\w)", "", str(annotation))
