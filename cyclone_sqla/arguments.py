"""Arguments and results to JSON and back: lossless, or refused with the path of the value."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Awaitable, Coroutine, Mapping
from types import GenericAlias
from typing import TYPE_CHECKING, Any, NotRequired, cast

import typing_extensions
from pydantic import (
    ConfigDict,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticSerializationError, from_json, to_json

from cyclone_sqla.annotations import entity_places, is_exact
from cyclone_sqla.context import Context
from cyclone_sqla.entities import Draft, Missing, Rows, Sending, Wanted
from cyclone_sqla.errors import PayloadError, RegistrationError
from cyclone_sqla.lossless import lossless
from cyclone_sqla.outcomes import Discard
from cyclone_sqla.payload import (
    MAX_INT_DIGITS,
    Fault,
    as_arguments,
    check_json,
    difference,
    find_fault,
    locate,
    not_plain_json,
    not_storable,
    path_text,
)
from cyclone_sqla.signatures import Signature, refuse_unfit

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from cyclone_sqla.binding import AsyncTarget, SyncTarget

_CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# A backslash before the u may itself be escaped: then this is the text "\u0000" and no NUL.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


class Arguments:
    """The arguments of one kind: from a call to JSON text, and from there to the worker's call.

    One JSON object holds them by their parameters' names; ``*args`` is a list in it, ``**kwargs``
    an object. What the caller left out is not stored: the default of the code that runs applies.
    ``missing`` says what a row that has gone means.
    """

    def __init__(self, kind: str, signature: Signature, missing: Missing = "discard") -> None:
        refuse_unfit(kind, signature.parameters)
        self.have_rows = any(any(entity_places(p.annotation)) for p in signature.parameters)
        """Whether there are rows of the application among them."""
        _refuse_missing(kind, signature.parameters, missing)
        self._missing = missing
        self._kind = kind
        self._layout = _Layout(kind, signature.parameters)
        self._exact = all(is_exact(p.annotation) for p in signature.parameters)
        adapter = _adapter(kind, signature.parameters)
        self._validator = adapter.validator
        self._to_json = functools.partial(adapter.serializer.to_json, by_alias=True, warnings=False)

    def encode(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: SyncTarget | AsyncTarget | None = None,
    ) -> str:
        """The JSON text of a call. PayloadError with the path of what can't travel.

        It is a :class:`~cyclone_sqla.entities.Draft` if ``target`` has to insert some rows first.
        """
        given = self._layout.by_name(args, kwargs)
        sending = Sending(target) if self.have_rows else None
        try:
            validated = self._validator.validate_python(given, strict=True, context=sending)
        except ValidationError as exc:
            raise _first_fault(exc, given).error(self._kind) from None
        return self._encode(given, validated, sending)

    def encode_mapping(
        self, mapping: Mapping[str, Any], target: SyncTarget | AsyncTarget | None = None
    ) -> str:
        """The JSON text of arguments given by name, under the names that they are stored by.

        The values are either all of the parameters' types (``Decimal("9.99")``), or all plain JSON
        as it would be stored (``"9.99"``). PayloadError with the path otherwise.
        """
        given = as_arguments(self._kind, mapping)
        sending = Sending(target) if self.have_rows else None
        try:
            validated = self._validator.validate_python(given, strict=True, context=sending)
        except ValidationError as exc:
            return self._checked_json(given, exc)
        return self._encode(given, validated, sending)

    def _checked_json(self, given: dict[str, Any], exc: ValidationError) -> str:
        if find_fault(given, not_plain_json) is not None:
            raise _first_fault(exc, given).error(self._kind) from None
        text = check_json(self._kind, given)
        self._load(text)
        return text

    def decode(self, text: str) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments for the function. PayloadError if they don't fit."""
        return self._layout.as_call(self._load(text))

    def load(self, text: str, session: Session) -> tuple[list[Any], dict[str, Any]]:
        """The same, with the rows loaded. Discard names one that has gone and must not be."""
        wanted = Wanted()
        references = self._load(text, wanted)
        loaded = wanted.load(session)
        if self._missing == "discard" and not loaded.is_whole:
            fault = find_fault(references, loaded.absence) or Fault((), "a row is gone")
            raise Discard(f"{path_text(fault.path)}: {fault.reason}")
        return self._layout.as_call(self._load(text, loaded))

    def _load(self, text: str, rows: Rows | None = None) -> dict[str, Any]:
        try:
            values = self._validator.validate_json(text, strict=True, context=rows)
            return cast("dict[str, Any]", values)
        except ValidationError as exc:
            raise _first_fault(exc, _parsed(text)).error(self._kind) from None

    def _encode(
        self, given: dict[str, Any], validated: dict[str, Any], sending: Sending | None
    ) -> str:
        try:
            data = self._to_json(validated)
        except PydanticSerializationError as exc:
            raise self._undumpable(validated, str(exc)).error(self._kind) from None
        if b"\\u0000" in data and _NUL.search(data):
            raise self._nul_in(given, validated).error(self._kind)
        if not self._exact or _is_doubtful(data):
            self._check_round_trip(given, data, sending)
        if sending is not None and sending.unflushed:
            return Draft.of(self._kind, data.decode(), validated, sending.unflushed)
        return data.decode()

    def _undumpable(self, values: dict[str, Any], message: str) -> Fault:
        """The serializer gives no path: dump each argument alone, then look inside the bad one."""
        for name, value in values.items():
            try:
                self._to_json({name: value})
            except PydanticSerializationError as exc:
                fault = find_fault(value, _not_dumpable) or Fault((), _first_line(str(exc)))
                return fault.inside(name)
        return Fault((), _first_line(message))

    def _nul_in(self, given: dict[str, Any], validated: dict[str, Any]) -> Fault:
        names = [n for n, v in validated.items() if _NUL.search(self._to_json({n: v}))]
        return find_fault(given, not_storable) or Fault(tuple(names[:1]), "holds a NUL character")

    def _check_round_trip(
        self, given: dict[str, Any], data: bytes, sending: Sending | None
    ) -> None:
        try:
            back = self._validator.validate_json(data, strict=True, context=sending)
        except ValidationError as exc:
            lost = find_fault(given, not_storable) or _first_fault(exc, given)
            raise lost.error(self._kind) from None
        # Compared with what the caller gave: what validation made of it would hide a change.
        fault = difference(given, back)
        if fault is not None:
            raise (find_fault(given, not_storable) or fault).error(self._kind)


class _Layout:
    """How the arguments of a call lie in one mapping, by the names of the parameters."""

    def __init__(self, kind: str, parameters: tuple[inspect.Parameter, ...]) -> None:
        self._kind = kind
        self._defaults = {p.name: p.default for p in parameters}
        self._positional = [p.name for p in parameters if p.kind in _POSITIONAL]
        self._positional_only = {p.name for p in parameters if p.kind is p.POSITIONAL_ONLY}
        self._named = {p.name for p in parameters if p.kind in _NAMED}
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._options = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._all_named = len(self._named) == len(parameters)

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The mapping of a call. PayloadError for one that the function could not take.

        What is missing is left to the validator.
        """
        if self._all_named and not args:
            return kwargs  # the usual call; the validator refuses unknown names as well
        count = len(self._positional)
        given: dict[str, Any] = dict(zip(self._positional, args, strict=False))
        if len(args) > count:
            given[self._name_of_rest(args)] = list(args[count:])
        return self._with_keywords(given, kwargs)

    def as_call(self, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the keyword arguments for the function."""
        if self._all_named:
            return [], values
        rest: list[Any] = values.pop(self._rest, []) if self._rest else []
        options: dict[str, Any] = values.pop(self._options, {}) if self._options else {}
        by_position = self._positional if rest else self._unnamed(values)
        positional = [values.pop(name, self._defaults[name]) for name in by_position]
        return [*positional, *rest], {**values, **options}

    def _unnamed(self, values: dict[str, Any]) -> list[str]:
        """The parameters up to the last given one that can be passed by position only."""
        only = self._positional_only & values.keys()
        given = [place for place, name in enumerate(self._positional, 1) if name in only]
        return self._positional[: max(given, default=0)]

    def _name_of_rest(self, args: tuple[Any, ...]) -> str:
        if self._rest is not None:
            return self._rest
        reason = f"takes {len(self._positional)} positional arguments, not {len(args)}"
        if any(isinstance(a, Context) for a in args):
            reason += "; leave the Context out, the worker passes it"
        raise PayloadError(self._kind, "", reason)

    def _with_keywords(self, given: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name not in self._named:
                options[self._name_of_option(name)] = value
            elif name in given:
                raise PayloadError(self._kind, name, "is given twice, by position and by name")
            else:
                given[name] = value
        return {**given, self._options: options} if options and self._options else given

    def _name_of_option(self, name: str) -> str:
        if self._options is not None:
            return name
        by_position = name in self._positional_only
        reason = "can be passed by position only" if by_position else "is not expected here"
        raise PayloadError(self._kind, name, reason)


class Results:
    """What an action returns, as JSON text: by its return annotation where that can travel."""

    def __init__(self, kind: str, returns: Any) -> None:
        self._kind = kind
        self._codec = _result_codec(kind, returns)

    def encode(self, value: Any) -> str | None:
        """The JSON text of a result; None for None. PayloadError if JSON can't hold it.

        Without a fit annotation the value is kept as well as JSON can: a tuple becomes a list.
        """
        if value is None:
            return None
        if self._codec is not None:
            return self._codec.encode((), {"result": value})[len('{"result":') : -1]
        fault = find_fault(value, not_storable)
        if fault is not None:
            raise fault.inside("result").error(self._kind)
        return self._dump(value)

    def _dump(self, value: Any) -> str:
        try:
            data = to_json(value, bytes_mode="base64")
        except PydanticSerializationError as exc:
            raise PayloadError(self._kind, "result", _first_line(str(exc))) from None
        if _NUL.search(data):
            raise PayloadError(self._kind, "result", "holds a NUL character")
        return data.decode()


def _result_codec(kind: str, returns: Any) -> Arguments | None:
    if typing.get_origin(returns) in (Awaitable, Coroutine):
        returns = typing.get_args(returns)[-1]
    if returns in (Any, object, None, type(None)):
        return None
    result = inspect.Parameter("result", inspect.Parameter.KEYWORD_ONLY, annotation=returns)
    try:
        codec = Arguments(kind, Signature((result,), takes_context=False, returns=None))
    except RegistrationError:
        return None
    return None if codec.have_rows else codec  # a row that is returned may be pending yet


def _refuse_missing(kind: str, parameters: tuple[inspect.Parameter, ...], missing: Missing) -> None:
    """RegistrationError for ``missing="none"`` where None could not be given."""
    if missing == "discard":
        return
    places = [(p.name, place) for p in parameters for place in entity_places(p.annotation)]
    if not places:
        raise RegistrationError(f"{kind}: missing: no parameter takes a mapped class")
    for name, place in places:
        if not place.is_optional:
            entity = place.entity.__name__
            raise RegistrationError(
                f"{kind}: parameter {name!r}: with missing='none' a row that has gone arrives as "
                f"None; write `{entity} | None` there"
            )


def _adapter(kind: str, parameters: tuple[inspect.Parameter, ...]) -> TypeAdapter[dict[str, Any]]:
    try:
        return TypeAdapter(_typed_dict(parameters))
    except (PydanticUserError, NameError, TypeError) as exc:
        for parameter in parameters:
            reason = _schema_problem(parameter)
            if reason is not None:
                raise RegistrationError(f"{kind}: parameter {parameter.name!r}: {reason}") from exc
        raise RegistrationError(f"{kind}: {_first_line(str(exc))}") from exc


def _schema_problem(parameter: inspect.Parameter) -> str | None:
    try:
        TypeAdapter(_typed_dict((parameter,)))
    except PydanticSchemaGenerationError as exc:
        reason = _first_line(str(exc)).partition(". ")[0]
        hint = "; if it is to be mapped, map it before the action is used"
        return reason + hint if "<class " in reason else reason
    except (PydanticUserError, NameError, TypeError) as exc:
        return _first_line(str(exc))
    return None


def _typed_dict(parameters: tuple[inspect.Parameter, ...]) -> Any:
    # A functional TypedDict takes any parameter name; the fields of a model do not.
    new_typed_dict = cast("Any", typing_extensions).TypedDict
    typed_dict = new_typed_dict("Arguments", {p.name: _field(p) for p in parameters})
    typed_dict.__pydantic_config__ = _CONFIG
    return typed_dict


def _field(parameter: inspect.Parameter) -> Any:
    annotation = lossless(parameter.annotation)
    if parameter.kind is parameter.VAR_POSITIONAL:
        annotation = GenericAlias(list, (annotation,))
    elif parameter.kind is parameter.VAR_KEYWORD:
        annotation = GenericAlias(dict, (str, annotation))
    elif parameter.default is parameter.empty:
        return annotation
    return cast("Any", NotRequired)[annotation]


def _first_fault(exc: ValidationError, value: object) -> Fault:
    error = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    labels = error["loc"]
    if error["type"] == "missing":
        return Fault((*locate(value, labels[:-1]), labels[-1]), "is missing")
    if error["type"] == "extra_forbidden":
        return Fault(locate(value, labels), "is not expected here")
    return Fault(locate(value, labels), error["msg"])


def _is_doubtful(data: bytes) -> bool:
    """Whether even an exact type may be changed: by an int too long to be read back, or by a lone
    surrogate in a dict's key, which the serializer replaces without a word.
    """
    return len(data) > MAX_INT_DIGITS or b"\xef\xbf\xbd" in data


def _parsed(text: str) -> object:
    try:
        return from_json(text)
    except ValueError:
        return None


def _not_dumpable(value: object) -> str | None:
    if isinstance(value, bytes):
        return _not_utf8(value)
    return not_storable(value)


def _not_utf8(value: bytes) -> str | None:
    try:
        value.decode()
    except UnicodeDecodeError:
        return (
            "holds bytes that are not UTF-8; inside a class of your own they travel only if its "
            "config says ser_json_bytes='base64' and val_json_bytes='base64'"
        )
    return None


def _first_line(message: str) -> str:
    return message.partition("\n")[0].strip()
