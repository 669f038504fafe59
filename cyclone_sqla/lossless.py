"""Annotations in the form that pydantic reads and writes without loss."""

from __future__ import annotations

import base64
import types
import typing
from typing import Annotated, Any, Literal, TypeAlias, Union, cast

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from cyclone_sqla.annotations import inside, is_alias, is_opaque, is_union
from cyclone_sqla.entities import Entity
from cyclone_sqla.mapped import key_of, mapper_of

Seen: TypeAlias = frozenset[Any]


def lossless(annotation: Any, seen: Seen = frozenset()) -> Any:
    """The annotation with every ``bytes`` in it travelling as base64, and every row as its key."""
    if annotation is bytes:
        return Annotated[bytes, Base64()]
    mapper = mapper_of(annotation)
    if mapper is not None:
        key = [lossless(part.annotation) for part in key_of(mapper)]
        return cast("Any", Annotated)[annotation, Entity(annotation, key)]
    if isinstance(annotation, typing.NewType) or is_alias(annotation):
        return _lossless_name(annotation, seen)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return annotation if is_opaque(annotation) else _lossless_metadata(annotation, seen)
    if origin is None or origin is Literal:
        return annotation
    rewritten = tuple(lossless(a, seen) for a in arguments)
    if all(new is old for new, old in zip(rewritten, arguments, strict=True)):
        return annotation
    return _with_arguments(annotation, rewritten)


def _lossless_name(annotation: Any, seen: Seen) -> Any:
    """What a NewType or alias stands for, if there are bytes in it; an alias may name itself."""
    if annotation in seen:
        return annotation
    value = inside(annotation)
    rewritten = lossless(value, seen | {annotation})
    return annotation if rewritten is value else rewritten


def _lossless_metadata(annotation: Any, seen: Seen) -> Any:
    inner = lossless(annotation.__origin__, seen)
    return cast("Any", Annotated)[(inner, *annotation.__metadata__)]


def _with_arguments(annotation: Any, arguments: tuple[Any, ...]) -> Any:
    origin = typing.get_origin(annotation)
    if is_union(origin):
        return cast("Any", Union)[arguments]
    if isinstance(annotation, types.GenericAlias):
        return types.GenericAlias(cast("type[Any]", origin), arguments)
    return annotation.copy_with(arguments)


class Base64:
    """Bytes travel as base64 text: pydantic's own ways lose bytes that are not UTF-8."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Python side: bytes as they are. JSON side: base64 text."""
        text = core_schema.str_schema()
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(_from_base64, text),
            python_schema=core_schema.bytes_schema(strict=True),
            serialization=core_schema.plain_serializer_function_ser_schema(
                _to_base64, return_schema=text, when_used="json"
            ),
        )


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _to_base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
