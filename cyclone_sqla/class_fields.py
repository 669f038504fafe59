"""The fields of a class that values are made of, whichever way it was defined."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple, cast

import typing_extensions
from pydantic import BaseModel


class Field(NamedTuple):
    """What a field may hold, and whether every value has it."""

    annotation: Any
    required: bool


def fields_of(base: Any) -> dict[str, Field] | None:
    """The fields of a dataclass, model, TypedDict or NamedTuple; None for anything else."""
    if isinstance(base, type) and issubclass(base, BaseModel):
        return _model_fields(base)
    required = _required_by_name(base)
    if required is None:
        return None
    try:
        hints = typing_extensions.get_type_hints(base, include_extras=True)
    except (NameError, TypeError):
        return {}  # pydantic knows more ways to resolve names, and says what is missing
    return {name: Field(hints[name], need) for name, need in required.items()}


def _model_fields(model: type[BaseModel]) -> dict[str, Field]:
    own = model.__pydantic_decorators__
    if own.field_serializers or own.model_serializers:
        return {}  # how its values travel is its own affair
    return {
        name: Field(_with_metadata(field.annotation, field.metadata), field.is_required())
        for name, field in model.model_fields.items()
    }


def _with_metadata(annotation: Any, metadata: list[Any]) -> Any:
    return cast("Any", Annotated)[(annotation, *metadata)] if metadata else annotation


def _required_by_name(base: Any) -> dict[str, bool] | None:
    """Which fields there are, and whether each one is in every value."""
    if typing_extensions.is_typeddict(base):
        return {name: name in base.__required_keys__ for name in base.__annotations__}
    if isinstance(base, type) and dataclasses.is_dataclass(base):
        return {f.name: _has_no_default(f) for f in dataclasses.fields(base)}
    other = cast("Any", base)
    return _required_in_tuple(other) if hasattr(other, "_field_defaults") else None


def _required_in_tuple(named_tuple: Any) -> dict[str, bool]:
    return {name: name not in named_tuple._field_defaults for name in named_tuple._fields}


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.init and field.default is missing and field.default_factory is missing
