"""Which annotations an action's parameters may have, decided from the annotation alone.

A value travels in one of six JSON forms. In a union, two members that travel in the same form can't
be told apart on arrival, so such a union is refused where the action is registered: else it would
fail for some values of a legal type, and in production only.
"""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import itertools
import re
import types
import typing
from collections import OrderedDict, abc, deque
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, Union, cast
from uuid import UUID

import typing_extensions
from pydantic import BaseModel, JsonValue
from sqlalchemy.orm import Mapper

from cyclone_sqla.class_fields import Field, fields_of
from cyclone_sqla.context import Context
from cyclone_sqla.mapped import key_of, mapper_of

Seen: TypeAlias = frozenset[Any]

_STRINGS = (str, bytes, Decimal, UUID, date, time, timedelta, PurePath, Fraction, complex)
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
    ("string", (*_STRINGS, *_IP_TYPES)),
    ("object", (abc.Mapping, BaseModel)),
    ("array", (abc.Collection,)),
)
_NUMERIC = (int, float, Decimal, Fraction, complex)
_TOLD_APART = ({int, float}, {date, datetime})
"""Pairs that share a form and yet always come back as what they were, in strict mode."""

_EXACT = (int, str, bool, bytes, UUID, Decimal, timedelta, date, NoneType)
_EXACT_CONTAINERS = (list, set, frozenset)
_CONTAINERS_OF_ROWS = (
    *(list, tuple, dict, deque, OrderedDict),
    *(abc.Sequence, abc.MutableSequence, abc.Mapping, abc.MutableMapping),
)
_ANYTHING: tuple[Any, ...] = (Any, object, JsonValue)

_QUALIFIERS = (typing.Required, typing.NotRequired, typing_extensions.ReadOnly)

_REFUSED: dict[Any, str] = {
    abc.Iterable: "arrives as an iterator that can be read once; say list",
    abc.Iterator: "can be read only once; say list",
    abc.Generator: "can be read only once; say list",
    abc.AsyncIterable: "cannot be stored; say list",
    abc.AsyncIterator: "cannot be stored; say list",
    cast("Any", abc).Callable: "a callable cannot be stored",
    bytearray: "would arrive as bytes; say bytes",
    memoryview: "cannot be stored; say bytes",
    range: "cannot be stored; say list[int], or pass the bounds",
    slice: "cannot be stored; pass the bounds",
    type: "a class cannot be stored; pass a name",
    re.Pattern: "its flags would be lost; pass the pattern as str",
}


def problems(annotation: Any, seen: Seen = frozenset()) -> Iterator[str]:
    """Why values of this annotation could not travel, one text for each reason.

    ``seen`` are the classes and aliases that are being looked into already.
    """
    if is_alias(annotation):
        if annotation in seen:
            return
        seen |= {annotation}
    found = members(annotation)
    yield from _clashes(found)
    for member in found:
        yield from _problems_of(member, seen)


def members(annotation: Any) -> list[Any]:
    """What a union is a union of, with aliases, NewTypes and plain metadata taken off."""
    if annotation is None:
        return [NoneType]
    origin = typing.get_origin(annotation)
    if is_union(origin):
        parts = (m for argument in typing.get_args(annotation) for m in members(argument))
        return list(dict.fromkeys(parts))
    if origin is Literal and _literal_problem(annotation) is None:
        kinds: list[Any] = [type(value) for value in typing.get_args(annotation)]
        return list(dict.fromkeys(kinds))
    inner = inside(annotation)
    return [annotation] if inner is annotation else members(inner)


def inside(annotation: Any) -> Any:
    """What an alias, a NewType or plain metadata stands around; the annotation itself otherwise."""
    if isinstance(annotation, typing.NewType):
        return cast("Any", annotation).__supertype__
    origin = typing.get_origin(annotation)
    if origin is Annotated and not is_opaque(annotation):
        return annotation.__origin__
    if origin in _QUALIFIERS:
        return typing.get_args(annotation)[0]
    return annotation.__value__ if is_alias(annotation) else annotation


def is_exact(annotation: Any) -> bool:
    """Whether strict validation alone makes sure that every value arrives unchanged."""
    if typing.get_origin(annotation) in (Annotated, Literal):
        return False
    if is_union(typing.get_origin(annotation)):
        others = [a for a in typing.get_args(annotation) if a is not NoneType]
        return len(others) == 1 and is_exact(others[0])
    if isinstance(annotation, typing.NewType):
        return is_exact(inside(annotation))
    return _is_exact_type(annotation)


def _is_exact_type(annotation: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in _EXACT_CONTAINERS:
        return is_exact(arguments[0])
    if origin is tuple:
        return all(a is Ellipsis or is_exact(a) for a in arguments)
    if origin is dict:
        return arguments[0] is str and is_exact(arguments[1])
    mapper = mapper_of(annotation)
    if mapper is not None:
        return all(is_exact(part.annotation) for part in key_of(mapper))
    return annotation is None or annotation in _EXACT


class EntityPlace(NamedTuple):
    """Where an annotation asks for a row: its mapped class, and whether None may stand there."""

    entity: type[Any]
    is_optional: bool


def entity_places(annotation: Any, seen: Seen = frozenset()) -> Iterator[EntityPlace]:
    """Every place for a row in an annotation, in containers too."""
    if is_alias(annotation):
        if annotation in seen:
            return
        seen |= {annotation}
    found = members(annotation)
    for member in found:
        if is_entity(member):
            yield EntityPlace(member, is_optional=NoneType in found)
        elif typing.get_origin(member) not in (Annotated, Literal):
            for argument in typing.get_args(member):
                yield from entity_places(argument, seen)


def is_entity(annotation: Any) -> bool:
    """Whether this is a mapped class. One that is mapped later is none until then."""
    return mapper_of(annotation) is not None


def accepts_context(annotation: Any) -> bool:
    """Whether a type checker would take a parameter with this annotation for the Context."""
    wide: tuple[Any, ...] = (Any, object, abc.Hashable, typing.Hashable, Context)
    return any(m in wide or isinstance(m, typing.TypeVar) for m in members(annotation))


def name_of(annotation: Any) -> str:
    """The annotation as one would write it, without modules."""
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return "None" if annotation is NoneType else annotation.__name__
    return re.sub(r"(?:\w+\.)+(?=\w)", "", str(annotation))


def _problems_of(member: Any, seen: Seen) -> Iterator[str]:
    base = _base_of(member)
    if base in _ANYTHING or base is Annotated:
        return
    mapper = mapper_of(base)
    if mapper is not None:
        yield from _problems_of_key(mapper)
        return
    reason = _refusal(member, base)
    if reason is not None:
        yield f"{name_of(member)}: {reason}"
    else:
        yield from _problems_in_arguments(member, base, seen)
        yield from _problems_in_fields(base, seen)


def _base_of(member: Any) -> Any:
    """The class of a generic alias, or the member itself."""
    return typing.get_origin(member) or member


def _refusal(member: Any, base: Any) -> str | None:
    if isinstance(base, typing.TypeVar | typing.ParamSpec | typing.TypeVarTuple):
        return "a type variable cannot be checked; write the types out"
    if base is Literal:
        return _literal_problem(member)
    if base in _REFUSED:
        return _REFUSED[base]
    return _class_refusal(member, base) if isinstance(base, type) else None


def _class_refusal(member: Any, base: type[Any]) -> str | None:
    if issubclass(base, Context):
        return "only the first positional parameter is the Context, annotated exactly `Context`"
    if base not in _CONTAINERS_OF_ROWS and any(entity_places(member)):
        return "rows can be in a list, a tuple, a deque, or the values of a dict"
    if issubclass(base, enum.Enum):
        odd = [m for m in base if not isinstance(m.value, str | int | float)]
        return f"the value of {odd[0]} is not a str, int or float" if odd else None
    return None


def _problems_of_key(mapper: Mapper[Any]) -> Iterator[str]:
    for name, annotation in key_of(mapper):
        attribute = f"{mapper.class_.__name__}.{name}"
        if annotation is None:
            yield (
                f"{attribute}: the type of this key's values is not known; annotate it Mapped[…], "
                "or give the column's type a python_type"
            )
        for reason in problems(annotation):
            yield f"{attribute}: {reason}"


def _literal_problem(literal: Any) -> str | None:
    plain = (str, int, bool, NoneType)
    odd = [value for value in typing.get_args(literal) if type(value) not in plain]
    return f"{odd[0]!r} would not come back; use str, int, bool, None" if odd else None


def _problems_in_arguments(member: Any, base: Any, seen: Seen) -> Iterator[str]:
    arguments = [a for a in typing.get_args(member) if a is not Ellipsis]
    if arguments and isinstance(base, type) and issubclass(base, abc.Mapping):
        yield from _key_problems(arguments[0])
    for argument in arguments:
        yield from problems(argument, seen)


def _key_problems(annotation: Any) -> Iterator[str]:
    found = members(annotation)
    if len(found) > 1:
        yield f"keys of {name_of(annotation)}: all keys travel as text, so use one type"
    for member in found:
        if is_entity(member):
            yield f"keys of {name_of(member)}: rows can't be keys; use the values of a dict"
            continue
        is_number = typing.get_origin(annotation) is Literal and member is not str
        if is_number or not _is_fit_key(_base_of(member)):
            yield f"keys of {name_of(member)}: would not come back, JSON keys are text"


def _is_fit_key(base: Any) -> bool:
    if _is_enum(base):
        return issubclass(base, int) or all(isinstance(m.value, str) for m in base)
    return base in _ANYTHING or not forms_of(base) & {"null", "array", "object"}


def _problems_in_fields(base: Any, seen: Seen) -> Iterator[str]:
    if base in seen:
        return
    for name, field in (fields_of(base) or {}).items():
        if isinstance(field.annotation, typing.TypeVar):  # a generic class: its arguments count
            continue
        for entity, _ in entity_places(field.annotation):
            yield (
                f"{base.__name__}.{name}: {name_of(entity)} is a mapped class, which can't be "
                "inside another; make it a parameter of its own, or hold its primary key there"
            )
        for reason in problems(field.annotation, seen | {base}):
            yield f"{base.__name__}.{name}: {reason}"


def _clashes(found: list[Any]) -> Iterator[str]:
    for one, other in itertools.combinations(found, 2):
        if NoneType not in (one, other) and (is_entity(one) or is_entity(other)):
            yield (
                f"{name_of(one)} | {name_of(other)}: a mapped class travels as its primary key, "
                "which can be told from None only; use a parameter for each"
            )
            continue
        form = _shared_form(one, other)
        if form is not None:
            yield (
                f"{name_of(one)} | {name_of(other)}: both travel as a JSON {form}, so one could "
                "arrive as the other; use one type, or a class that holds either"
            )


def _shared_form(one: Any, other: Any) -> str | None:
    """The form in which the two can be mistaken for each other; None if they can't."""
    mine, theirs = _base_of(one), _base_of(other)
    if _is_number_for(mine, theirs) or _is_number_for(theirs, mine):
        return "number"
    shared = forms_of(mine) & forms_of(theirs)
    if not shared or any({mine, theirs} <= pair for pair in _TOLD_APART):
        return None
    if shared == frozenset({"object"}) and _have_different_fields(mine, theirs):
        return None
    return min(shared)


def _is_number_for(base: Any, other: Any) -> bool:
    """Whether the base is an Enum of numbers, which the other one would read as well."""
    return (
        _is_enum(base) and other in _NUMERIC and any(isinstance(m.value, int | float) for m in base)
    )


def forms_of(base: Any) -> frozenset[str]:
    """The JSON forms in which values of this class travel; empty if only pydantic knows."""
    if base in _ANYTHING:
        return frozenset(form for form, _ in _FORMS) - {"null"}
    if not isinstance(base, type):
        return frozenset()
    if _is_enum(base):
        return frozenset[str]().union(*(forms_of(type(m.value)) for m in cast("Any", base)))
    if typing_extensions.is_typeddict(base) or dataclasses.is_dataclass(base):
        return frozenset({"object"})
    found = [form for form, kinds in _FORMS if issubclass(base, kinds)]
    return frozenset(found[:1])


def _have_different_fields(one: Any, other: Any) -> bool:
    """Whether an object's keys, or a Literal among its fields, tell of which class it is."""
    mine, theirs = fields_of(one), fields_of(other)
    if mine is None or theirs is None:
        return False
    return _have_different_tags(mine, theirs) or (_lacks(mine, theirs) and _lacks(theirs, mine))


def _lacks(fields: dict[str, Field], wanted: dict[str, Field]) -> bool:
    return any(field.required and name not in fields for name, field in wanted.items())


def _have_different_tags(mine: dict[str, Field], theirs: dict[str, Field]) -> bool:
    both = mine.keys() & theirs.keys()
    tags = [(_tags(mine[name].annotation), _tags(theirs[name].annotation)) for name in both]
    return any(one and other and not one & other for one, other in tags)


def _tags(annotation: Any) -> set[Any]:
    """The values of a Literal; nothing for anything else."""
    inner = inside(annotation)
    if inner is not annotation:
        return _tags(inner)
    return set(typing.get_args(annotation)) if typing.get_origin(annotation) is Literal else set()


def is_union(origin: Any) -> bool:
    """Whether this is the origin of a union, in either of its spellings."""
    return origin is Union or origin is types.UnionType


def is_alias(annotation: Any) -> bool:
    """Whether this is a name for a type, which may refer to itself."""
    # Python 3.12's own aliases are of another class than those of typing_extensions on 3.11.
    return type(annotation).__name__ == "TypeAliasType" and annotation is not JsonValue


def _is_enum(base: Any) -> bool:
    return isinstance(base, type) and issubclass(base, enum.Enum)


def is_opaque(annotation: Any) -> bool:
    """Whether metadata takes over how values are read or written (a PlainSerializer, say)."""
    return any(hasattr(m, "__get_pydantic_core_schema__") for m in annotation.__metadata__)
