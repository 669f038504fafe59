"""What JSON can hold and give back unchanged: where a value would be lost, and the path to it.

Nothing here knows about actions. A *path* is a tuple of steps (a key, an index, a field name), a
*fault* is a path with the reason.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, cast
from uuid import UUID

from pydantic import BaseModel
from pydantic_core import to_json

from cyclone_sqla.errors import PayloadError
from cyclone_sqla.keys import unstorable
from cyclone_sqla.mapped import state_of

MAX_DEPTH = 190
"""How deep lists and objects may be nested. The parser of the worker stops at 200."""

MAX_INT_DIGITS = 4300
"""The longest whole number that Python and the worker's parser read back from text."""

_TOO_LARGE = 10**MAX_INT_DIGITS

_LONG_PATH = 20
_SOME = object()
"""The step to an element of a set, which has no place of its own."""

_STR: set[type] = {str}

Path: TypeAlias = tuple[object, ...]


class Fault(NamedTuple):
    """Where a value would not arrive as it was given, and why."""

    path: Path
    reason: str

    def inside(self, step: object) -> Fault:
        """The same fault, seen from one container further out."""
        return Fault((step, *self.path), self.reason)

    def error(self, kind: str) -> PayloadError:
        """The fault as the error that the caller gets."""
        return PayloadError(kind, path_text(self.path), self.reason)


class StandIn(ABC):
    """What arrives in place of a value of which JSON holds no more than a reference."""

    __slots__ = ()

    @abstractmethod
    def as_json(self) -> Any:
        """The reference, as plain JSON values."""

    @abstractmethod
    def difference(self, sent: object) -> Fault | None:
        """Why it does not stand for this value; None if it does."""


def check_json(kind: str, value: object) -> str:
    """The JSON text of arguments for an action whose code is not at hand.

    ``value`` maps parameter names to plain JSON values: str, int, float, bool, None, list, and dict
    with str keys. Anything else would arrive as something else: a PayloadError with its path.
    """
    arguments = as_arguments(kind, value)
    fault = find_fault(arguments, not_plain_json)
    if fault is not None:
        raise fault.error(kind)
    return to_json(arguments).decode()


def as_arguments(kind: str, value: object) -> dict[str, Any]:
    """A mapping as a dict, its keys not checked yet. PayloadError for anything else."""
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    reason = f"the arguments must map parameter names to values, not be a {type(value).__name__}"
    raise PayloadError(kind, "", reason)


def check_size(kind: str, text: str, limit: int) -> None:
    """Refuse JSON text of more than ``limit`` bytes in UTF-8 with a PayloadError."""
    if len(text) * 4 <= limit:
        return
    size = len(text.encode())
    if size > limit:
        reason = (
            f"the arguments take {size:,} bytes of JSON, more than the limit of {limit:,}; "
            "store what is large elsewhere and pass its key"
        )
        raise PayloadError(kind, "", reason)


def path_text(path: Path) -> str:
    """The path as one would write it in Python: ``rows[3].name``; a very deep one is cut."""
    if len(path) > _LONG_PATH:
        return path_text(path[: _LONG_PATH - 1]) + f"…({len(path)} deep)"
    text = ""
    for step in path:
        if isinstance(step, str) and step.isidentifier() and len(step) <= 64:
            text += f".{step}" if text else step
        else:
            text += f"[{_label(step)}]"
    return text


def _label(step: object) -> str:
    if step is _SOME:
        return "…"
    try:
        return reprlib.repr(step)
    except ValueError:  # an int of more than 4300 digits has no repr
        return "…"


def find_fault(
    value: object, fault_of: Callable[[object], str | None], depth: int = 0
) -> Fault | None:
    """The first part of the value, itself included, for which ``fault_of`` gives a reason."""
    reason = fault_of(value)
    if reason is None and depth > MAX_DEPTH:
        reason = f"is nested more than {MAX_DEPTH} deep, or contains itself"
    if reason is not None:
        return Fault((), reason)
    for step, part in _parts(value):
        key_reason = fault_of(step) if isinstance(value, Mapping) else None
        if key_reason is not None:
            return Fault((step,), f"the key {key_reason}")
        fault = find_fault(part, fault_of, depth + 1)
        if fault is not None:
            return fault.inside(step)
    return None


def _parts(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, Mapping):
        yield from cast("Mapping[object, object]", value).items()
    elif isinstance(value, list | tuple | deque):
        yield from enumerate(cast("list[object]", value))
    elif isinstance(value, set | frozenset):
        yield from ((_SOME, element) for element in cast("set[object]", value))
    else:
        yield from fields_of(value).items()


def fields_of(value: object) -> dict[str, object]:
    """The fields of a dataclass or pydantic model; nothing for other values.

    Nothing for rows either, whatever else they are: to look at an attribute may load it.
    """
    if state_of(value) is not None:
        return {}
    if isinstance(value, BaseModel):
        names = type(value).model_fields
        return {n: getattr(value, n, None) for n in names} | (value.__pydantic_extra__ or {})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    return {}


def locate(value: object, labels: tuple[object, ...]) -> Path:
    """Those of a validator's labels that lead into the value; others name members of unions."""
    path: list[object] = []
    for label in labels:
        for step, part in _parts(value):
            if step == label or (str(step) == label and isinstance(value, Mapping)):
                path.append(step)
                value = part
                break
    return tuple(path)


def not_storable(value: object) -> str | None:
    """Why this leaf can't be in stored JSON text, whatever its annotation; None if it can."""
    if isinstance(value, str):
        return unstorable(value)
    if isinstance(value, int):
        return _too_large(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "is not a finite number; JSON has no NaN or infinity"
    return None


def not_plain_json(value: object) -> str | None:
    """Why this leaf or container is not plain JSON; None if it is."""
    if type(value) in (str, int, float, bool, NoneType, list, dict):
        return not_storable(value) or _odd_key(value)
    if state_of(value) is not None:
        return f"is a {type(value).__name__}; without the action's code give its primary key"
    return (
        f"is of type {type(value).__name__}; without the action's code only plain JSON can be "
        "sent: str, int, float, bool, None, list, and dict with str keys"
    )


def _odd_key(value: object) -> str | None:
    if not isinstance(value, dict):
        return None
    odd = [k for k in cast("dict[object, object]", value) if type(k) is not str]
    return f"has a key of type {type(odd[0]).__name__}; JSON has str keys only" if odd else None


def _too_large(value: int) -> str | None:
    if -_TOO_LARGE < value < _TOO_LARGE:
        return None
    return f"is a whole number of more than {MAX_INT_DIGITS} digits"


def difference(sent: object, back: object) -> Fault | None:
    """Where what comes back from JSON is not what was sent; None if it is the same.

    Stricter than ``==``: a bool is no int, ``-0.0`` is not ``0.0``, ``Decimal("1.0")`` is not
    ``Decimal("1.00")``, and two datetimes need the same wall time and the same offset. A value may
    be of a subclass of the arriving type: the annotation promises no more (a ``StrEnum`` given for
    a ``str`` arrives as its str).
    """
    if sent is back:
        return None
    kind = type(back)
    compare = _COMPARISONS.get(kind) or _comparison_for(kind)
    return compare(sent, back)


def _comparison_for(kind: type) -> _Comparison:
    for base in (dict, list, tuple, deque, StandIn):
        if issubclass(kind, base):
            return _COMPARISONS[base]
    return _compare_objects


def _compare_plain(sent: object, back: object) -> Fault | None:
    # True and False are singletons, so a bool that is the same was found by `is` before.
    if isinstance(sent, type(back)) and type(sent) is not bool and sent == back:
        return None
    return _changed(sent, back)


def _compare_decimals(sent: object, back: Decimal) -> Fault | None:
    if isinstance(sent, Decimal) and sent.as_tuple() == back.as_tuple():
        return None
    return _changed(sent, back)


def _compare_floats(sent: object, back: float) -> Fault | None:
    # An int may arrive as the equal float; one that has no equal float is refused here.
    if isinstance(sent, float | int) and type(sent) is not bool and sent == back:
        return None if math.copysign(1, sent) == math.copysign(1, back) else _changed(sent, back)
    return _changed(sent, back)


def _compare_times(sent: object, back: datetime | time) -> Fault | None:
    # `==` between zones is always False around a change of the clocks, and converting to UTC
    # overflows in year 1: compare what the wall clock shows, and its offset.
    if not isinstance(sent, datetime | time) or not isinstance(sent, type(back)):
        return _changed(sent, back)
    if sent.replace(tzinfo=None) != back.replace(tzinfo=None):
        return _changed(sent, back)
    if (sent.tzinfo is None) != (back.tzinfo is None) or sent.utcoffset() != back.utcoffset():
        return Fault((), "has a UTC offset that ISO 8601 text can't give back")
    return None


def _compare_deques(sent: Any, back: Any) -> Fault | None:
    if isinstance(sent, type(back)) and sent.maxlen != back.maxlen:
        return Fault((), "is a deque whose maxlen would be lost")
    return _compare_sequences(sent, back)


def _compare_sequences(sent: Any, back: Any) -> Fault | None:
    if not isinstance(sent, type(back)) or len(sent) != len(back):
        return _changed(sent, back)
    for index, (one, other) in enumerate(zip(sent, back, strict=True)):
        fault = difference(one, other)
        if fault is not None:
            return fault.inside(index)
    return None


def _compare_mappings(sent: Any, back: Any) -> Fault | None:
    if not isinstance(sent, type(back)):
        return _changed(sent, back)
    # A str that is found is the same key; another key may only be equal to it, as True is to 1.
    arrived = back if set(map(type, sent)) <= _STR else {key: key for key in back}
    for key, part in sent.items():
        fault = _compare_keys(key, arrived) or difference(part, back[key])
        if fault is not None:
            return fault.inside(key)
    return None if len(sent) == len(back) else Fault((), "would arrive with other keys")


def _compare_keys(key: object, arrived: Mapping[object, object]) -> Fault | None:
    if key in arrived:
        fault = None if type(key) is str else difference(key, arrived[key])
        return fault and Fault((), f"as a key: {fault.reason}")
    if not isinstance(key, str) and str(key) in arrived:
        return Fault((), f"the key, of type {type(key).__name__}, would arrive as str")
    return Fault((), "would be lost, or arrive under another key")


def _compare_sets(sent: Any, back: Any) -> Fault | None:
    if not isinstance(sent, type(back)) or len(sent) != len(back):
        return _changed(sent, back)
    given = {element: element for element in sent}
    for element in back:
        if element not in given or difference(given[element], element) is not None:
            return Fault((), "has an element that would arrive changed")
    return None


def _compare_objects(sent: Any, back: Any) -> Fault | None:
    if type(sent) is not type(back):
        return _changed(sent, back)
    if fields_of(back):
        return _compare_mappings(fields_of(sent), fields_of(back))
    if sent == back:
        return None
    # A class without __eq__ is compared by what it holds.
    held = getattr(back, "__dict__", None)
    same = held and _compare_mappings(vars(sent), held) is None
    return None if same else _changed(sent, back)


def _compare_stand_ins(sent: object, back: StandIn) -> Fault | None:
    return back.difference(sent)


def _changed(sent: object, back: object) -> Fault:
    if type(sent) is not type(back):
        return Fault((), f"{type(sent).__name__} would arrive as {_type_name(back)}")
    if isinstance(sent, list | tuple | set | frozenset | deque):
        return Fault((), "would arrive with another number of elements")
    return Fault((), f"this {type(sent).__name__} would arrive changed")


def _type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__


_Comparison: TypeAlias = Callable[[Any, Any], Fault | None]

_COMPARISONS: dict[type, _Comparison] = {
    **dict.fromkeys((str, int, bytes, UUID, date, timedelta), _compare_plain),
    Decimal: _compare_decimals,
    float: _compare_floats,
    datetime: _compare_times,
    time: _compare_times,
    list: _compare_sequences,
    tuple: _compare_sequences,
    deque: _compare_deques,
    dict: _compare_mappings,
    set: _compare_sets,
    frozenset: _compare_sets,
    StandIn: _compare_stand_ins,
}
