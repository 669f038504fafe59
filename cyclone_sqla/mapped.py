"""What SQLAlchemy knows of a class: whether its instances are rows, and what their keys are."""

from __future__ import annotations

import sys
import types
import typing
from typing import Annotated, Any, NamedTuple, cast

from sqlalchemy import Column
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.inspection import inspect
from sqlalchemy.orm import InstanceState, Mapped, Mapper, class_mapper
from sqlalchemy.types import TypeDecorator


class KeyPart(NamedTuple):
    """One attribute of a primary key, and the type of its values; None if nobody can tell."""

    name: str
    annotation: Any


def mapper_of(base: Any) -> Mapper[Any] | None:
    """The mapper of a class; None if it is not mapped, or not yet. Configures nothing."""
    if not isinstance(base, type):
        return None
    try:
        return class_mapper(base, configure=False)
    except InvalidRequestError:
        return None


def state_of(value: object) -> InstanceState[Any] | None:
    """What SQLAlchemy notes down of an instance of a mapped class; None for any other value."""
    if not hasattr(type(value), "_sa_class_manager"):
        return None  # to inspect an Engine, say, would connect it
    return cast("InstanceState[Any] | None", inspect(value, raiseerr=False))


def identity_class(mapper: Mapper[Any]) -> type[Any]:
    """The class that stands for a key's table: with inheritance mostly the base of all."""
    return mapper.identity_key_from_primary_key((None,) * len(mapper.primary_key))[0]


def key_of(mapper: Mapper[Any]) -> list[KeyPart]:
    """The primary key, in the order of ``InstanceState.identity``."""
    columns = cast("tuple[Column[Any], ...]", mapper.primary_key)
    names = [mapper.get_property_by_column(column).key for column in columns]
    return [
        KeyPart(name, _annotation(mapper.class_, name, column))
        for name, column in zip(names, columns, strict=True)
    ]


def _annotation(base: type[Any], name: str, column: Column[Any]) -> Any:
    known = _python_type(column.type)
    if not isinstance(column.type, TypeDecorator):
        return known or _annotated(base, name)
    # One of the application's own; what it decorates may be far from what it gives.
    return _annotated(base, name) or known or _python_type(column.type.impl_instance)


def _python_type(column_type: Any) -> Any:
    try:
        known = column_type.python_type
    except NotImplementedError:
        return None
    return None if known is object else known


def _annotated(base: type[Any], name: str) -> Any:
    """The type in ``name: Mapped[type]``, without what else the annotation says."""
    for owner in base.__mro__:
        raw = vars(owner).get("__annotations__", {}).get(name)
        if raw is not None:
            return _within(_resolved(raw, owner))
    return None


def _resolved(raw: Any, owner: type[Any]) -> Any:
    names = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
    holder = types.SimpleNamespace(__annotations__={"it": raw})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["it"]
    except (NameError, TypeError, SyntaxError, AttributeError):
        return None  # SQLAlchemy has read it by other ways; the column's type has to do


def _within(annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    is_mapped = isinstance(origin, type) and issubclass(origin, Mapped)
    if origin is Annotated or is_mapped:
        return _within(typing.get_args(annotation)[0])
    return annotation
