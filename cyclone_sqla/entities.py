"""Rows of the application as arguments: they travel as their primary keys and arrive loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast
from uuid import UUID, uuid4

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, core_schema, to_json
from sqlalchemy import ColumnElement, select, tuple_
from sqlalchemy.orm import InstanceState, Mapper, Session, class_mapper, selectin_polymorphic

from cyclone_sqla.binding import session_of
from cyclone_sqla.mapped import identity_class, state_of
from cyclone_sqla.payload import Fault, StandIn, difference, find_fault, not_storable

if TYPE_CHECKING:
    from cyclone_sqla.binding import AsyncTarget, SyncTarget

Missing = Literal["discard", "none"]
"""What a run does about a row that has gone: it discards its job, or is given None for it."""

ROWS_AT_ONCE = 500
"""How many rows one statement loads."""

Key: TypeAlias = tuple[Any, ...]

_CONFIG = ConfigDict(strict=True, allow_inf_nan=False)
_TOKEN = f"unflushed-{uuid4().hex}-"
"""What stands for the key of a row that is not inserted yet; it never leaves the process."""

_QUOTED_TOKEN = re.compile(f'"({_TOKEN}[0-9]+)"')

_COMPARED_AS_IN_DATABASES = (int, UUID)


class Entity:
    """A mapped class among annotations: a key in JSON, and an instance in Python.

    ``key`` are the types of the values of its primary key, in the form that travels without loss.
    """

    def __init__(self, base: type[Any], key: Sequence[Any]) -> None:
        self.base = base
        self._mapper: Mapper[Any] = class_mapper(base, configure=False)
        self._is_single = len(key) == 1
        whole: Any = GenericAlias(tuple, tuple(key))
        self._json: Any = key[0] if self._is_single else whole
        self._adapter: TypeAdapter[Key] = TypeAdapter(whole, config=_CONFIG)

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """What is read is a :class:`Reference`, unless the context of the validation has the row.

        Written is a Reference, or an :class:`Unflushed` one: never an instance.
        """
        key = handler.generate_schema(self._json)
        stored = core_schema.with_info_after_validator_function(self._from_key, key)
        token = core_schema.with_info_after_validator_function(
            _from_token, core_schema.str_schema()
        )
        return core_schema.json_or_python_schema(
            json_schema=core_schema.tagged_union_schema(
                {"primary key": stored, "unflushed": token}, discriminator=_form
            ),
            python_schema=core_schema.with_info_plain_validator_function(self._from_instance),
            serialization=core_schema.plain_serializer_function_ser_schema(
                _as_json, return_schema=core_schema.any_schema()
            ),
        )

    def __deepcopy__(self, memo: object) -> Entity:
        return self  # pydantic copies some schemas, with all that they call: down to the mapper

    def key_of(self, state: InstanceState[Any]) -> Key:
        """The primary key of a stored row, without any SQL. ValidationError if it can't travel."""
        return self._adapter.validate_python(state.identity, strict=True)

    def as_json(self, key: Key) -> Any:
        """The key as plain JSON values: of one column the value itself, of several a list."""
        values = self._adapter.dump_python(key, mode="json", by_alias=True)
        return values[0] if self._is_single else values

    def from_json(self, text: str) -> Key:
        """The key that :meth:`as_json` gave, from JSON text."""
        whole = f"[{text}]" if self._is_single else text
        return self._adapter.validate_json(whole, strict=True)

    def _from_key(self, value: Any, info: core_schema.ValidationInfo) -> object:
        reference = Reference(self, (value,) if self._is_single else value)
        context = cast("Rows | None", info.context)
        return reference if context is None else context.row(reference)

    def _from_instance(self, value: object, info: core_schema.ValidationInfo) -> StandIn:
        state = state_of(value) if isinstance(value, self.base) else None
        if state is None:
            name = type(value).__name__
            raise _unfit(f"must be an instance of {self.base.__name__}, not of {name}")
        self._refuse_lost(state)
        if state.identity is not None:
            return Reference(self, self._fit_key(state))
        sending = cast("Sending", info.context)
        if state.session is None or state.session is not sending.session:
            raise _unfit(_no_key(state))
        return sending.postpone(self, value)

    def _refuse_lost(self, state: InstanceState[Any]) -> None:
        name = state.class_.__name__
        mine, its = self._mapper, state.mapper
        if its is not mine and identity_class(its) is not identity_class(mine):
            raise _unfit(
                f"is a {name}, which has its own table and keys beside those of "
                f"{self.base.__name__}; annotate the parameter with {name}"
            )
        is_marked = state.session is not None and state.object in state.session.deleted
        if is_marked or state.was_deleted:
            raise _unfit(
                f"this {name} is deleted, so the job would not find it; pass the values that the "
                "action needs"
            )

    def _fit_key(self, state: InstanceState[Any]) -> Key:
        try:
            return self.key_of(state)
        except ValidationError as exc:
            raise _unfit(_unfit_key(exc)) from None


class Reference(StandIn):
    """A row by its class and its primary key."""

    __slots__ = ("entity", "key")

    def __init__(self, entity: Entity, key: Key) -> None:
        self.entity = entity
        self.key = key

    def as_json(self) -> Any:
        """The key as plain JSON values."""
        return self.entity.as_json(self.key)

    def difference(self, sent: object) -> Fault | None:
        """Whether the key arrives unchanged."""
        state = state_of(sent)
        if state is None:
            return Fault((), "would arrive as another row")
        fault = difference(state.identity, self.key)
        return fault and Fault((), f"its primary key {fault.reason}")

    def __str__(self) -> str:
        key = to_json(self.as_json()).decode()
        return f"{self.entity.base.__name__} with the primary key {key}"


class Unflushed(StandIn):
    """A row that has no key before the session is flushed."""

    __slots__ = ("entity", "instance", "token")

    def __init__(self, entity: Entity, instance: object, token: str) -> None:
        self.entity = entity
        self.instance = instance
        self.token = token

    def as_json(self) -> str:
        """What stands in the JSON until the key is known."""
        return self.token

    def difference(self, sent: object) -> Fault | None:
        """Whether it is the same object."""
        return None if sent is self.instance else Fault((), "would arrive as another row")

    def key_text(self) -> str:
        """The key as JSON text, once the session has been flushed. ValueError says why not."""
        state = cast("InstanceState[Any]", state_of(self.instance))
        if state.identity is None:
            raise ValueError(_no_key(state))
        try:
            key = self.entity.key_of(state)
            text = to_json(self.entity.as_json(key)).decode()
            fault = find_fault(key, not_storable) or difference(
                state.identity, self.entity.from_json(text)
            )
        except ValidationError as exc:
            raise ValueError(_unfit_key(exc)) from None
        if fault is not None:
            raise ValueError(f"its primary key {fault.reason}")
        return text


class Draft(str):
    """JSON text of arguments that leaves open the keys of rows which are not inserted yet."""

    __slots__ = ("_kind", "_unflushed", "_values")
    _kind: str
    _values: object
    _unflushed: Mapping[str, Unflushed]

    @classmethod
    def of(cls, kind: str, text: str, values: object, unflushed: Mapping[str, Unflushed]) -> Draft:
        """``values`` are the validated arguments, in which the rows by their tokens have paths."""
        draft = cls(text)
        draft._kind, draft._values, draft._unflushed = kind, values, unflushed
        return draft

    def completed(self) -> str:
        """The text with the keys, once the session has been flushed. PayloadError."""
        return _QUOTED_TOKEN.sub(lambda found: self._key_text(self._unflushed[found[1]]), self)

    def _key_text(self, row: Unflushed) -> str:
        try:
            return row.key_text()
        except ValueError as exc:
            raise self._fault(row, str(exc)).error(self._kind) from None

    def _fault(self, row: Unflushed, reason: str) -> Fault:
        found = find_fault(self._values, lambda value: reason if value is row else None)
        return found or Fault((), reason)


class Rows(Protocol):
    """What a validation of JSON makes of references."""

    def row(self, reference: Reference) -> object:
        """What stands in the validated arguments for this reference."""
        ...


class Sending:
    """The rows in the arguments of one call, on their way to JSON."""

    def __init__(self, target: SyncTarget | AsyncTarget | None) -> None:
        self._target = target
        self.unflushed: dict[str, Unflushed] = {}

    @property
    def session(self) -> Session | None:
        """The session that will insert the job, and with it what is pending there."""
        return session_of(self._target)

    def postpone(self, entity: Entity, instance: object) -> Unflushed:
        """A stand-in for a row that the session will have inserted before the job."""
        token = f"{_TOKEN}{len(self.unflushed)}"
        self.unflushed[token] = Unflushed(entity, instance, token)
        return self.unflushed[token]

    def row(self, reference: Reference) -> Reference:
        """The reference itself: nothing is loaded."""
        return reference


class Wanted:
    """Notes down which rows there are in stored arguments."""

    def __init__(self) -> None:
        self._keys: dict[type[Any], dict[Key, None]] = {}

    def row(self, reference: Reference) -> Reference:
        """The reference itself, for now."""
        self._keys.setdefault(reference.entity.base, {})[reference.key] = None
        return reference

    def load(self, session: Session) -> Loaded:
        """The rows, with a statement for each class and ``ROWS_AT_ONCE`` rows of it."""
        rows = {base: _load(session, base, list(keys)) for base, keys in self._keys.items()}
        is_whole = all(len(rows[base]) == len(keys) for base, keys in self._keys.items())
        return Loaded(rows, is_whole=is_whole)


class Loaded:
    """The rows of stored arguments that are there; it ``is_whole`` if none has gone."""

    def __init__(self, rows: Mapping[type[Any], Mapping[Key, object]], *, is_whole: bool) -> None:
        self.is_whole = is_whole
        self._rows = rows

    def row(self, reference: Reference) -> object:
        """The row; None if it has gone."""
        return self._rows[reference.entity.base].get(reference.key)

    def absence(self, value: object) -> str | None:
        """Why this value can't be had, if it refers to a row that has gone."""
        if isinstance(value, Reference) and self.row(value) is None:
            return f"the {value} is gone"
        return None


def _load(session: Session, base: type[Any], keys: list[Key]) -> dict[Key, object]:
    mapper = class_mapper(base)
    options = _whole(mapper)
    if len(keys) == 1:
        return _found(keys, lambda key: session.get(base, key, options=options))
    rows: dict[Key, object] = {}
    for start in range(0, len(keys), ROWS_AT_ONCE):
        some = keys[start : start + ROWS_AT_ONCE]
        statement = select(base).where(_is_one_of(mapper, some)).options(*options)
        for row in session.scalars(statement).unique():
            rows[cast("Any", state_of(row)).identity] = row

    def look(key: Key) -> object:
        if key in rows or _is_compared_as_in_databases(key):
            return rows.get(key)
        return session.get(base, key, options=options)

    return _found(keys, look)


def _found(keys: list[Key], look: Callable[[Key], object]) -> dict[Key, object]:
    return {key: row for key in keys if (row := look(key)) is not None}


def _is_one_of(mapper: Mapper[Any], keys: list[Key]) -> ColumnElement[bool]:
    columns = mapper.primary_key
    if len(columns) == 1:
        return columns[0].in_([key[0] for key in keys])
    return tuple_(*columns).in_(keys)


def _whole(mapper: Mapper[Any]) -> list[Any]:
    """Options that load the columns of subclasses too: an async action could not do it later."""
    below = [m.class_ for m in mapper.self_and_descendants if m is not mapper and not m.concrete]
    return [selectin_polymorphic(mapper.class_, below)] if below else []


def _is_compared_as_in_databases(key: Key) -> bool:
    """Whether what is no equal key in Python is none in a database: a CHAR there may be padded."""
    return all(type(part) in _COMPARED_AS_IN_DATABASES for part in key)


def _as_json(value: StandIn) -> Any:
    return value.as_json()


def _from_token(token: str, info: core_schema.ValidationInfo) -> Unflushed:
    return cast("Sending", info.context).unflushed[token]


def _form(value: object) -> str:
    is_token = isinstance(value, str) and value.startswith(_TOKEN)
    return "unflushed" if is_token else "primary key"


def _no_key(state: InstanceState[Any]) -> str:
    name = state.class_.__name__
    if state.session is None:
        return (
            f"this {name} is in no session and was never stored, so it has no primary key; add it "
            "to the session that you enqueue with, or pass one that is stored"
        )
    return (
        f"this {name} is not inserted yet, so it has no primary key; call flush() on its session "
        "first, or enqueue with that very session"
    )


def _unfit_key(exc: ValidationError) -> str:
    error = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    return (
        f"its primary key can't travel: {error['msg']}. Does the annotation of its attribute say "
        "what the values are?"
    )


def _unfit(reason: str) -> PydanticCustomError:
    return PydanticCustomError("row", cast("Any", reason))
