"""An exception as a record that can always be stored."""

from __future__ import annotations

import json
import linecache
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

T = TypeVar("T")

ERROR_LIMIT = 1_000
"""Characters in :attr:`Failure.error`."""

DETAILS_LIMIT = 16 * 1024
"""Bytes of UTF-8 in :attr:`Failure.details`."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in one attempt: clean text of bounded size, whatever the exception held.

    ``error`` is one line for people (``ValueError: no such account``). ``details`` is JSON text, an
    object with ``type``, ``message``, ``traceback`` (lines, the innermost call last), ``causes`` (a
    flat list of such objects, each with its ``relation``: cause, context or member of a group) and,
    where the library adds something, ``note``. Neither holds a NUL, another control character or a
    lone surrogate, so every database takes them. The exception and its frames are not kept.
    """

    error: str
    details: str

    @classmethod
    def of(cls, exc: BaseException, *, note: str = "") -> Failure:
        """The record of an exception. Never raises, whatever the exception does when looked at.

        ``note`` says what the exception can't know: ``attempt 8 of 8, none left``.
        """
        try:
            return _fit(_tell("", exc), _related(exc), note)
        except BaseException:  # noqa: BLE001 - a failure is recorded even where memory ran out
            return _MINIMAL

    @classmethod
    def because(cls, text: str, kind: str, *, cause: BaseException | None = None) -> Failure:
        """The record of a failure that is no exception: ``Expired: its deadline has passed``.

        Never raises. ``kind`` stands where an exception has its type; ``cause`` is recorded as one.
        """
        try:
            related = [] if cause is None else [_Related("cause", cause), *_related(cause)]
            return _fit(_Told("", kind, text, []), related, "")
        except BaseException:  # noqa: BLE001 - as above
            return _MINIMAL


_MINIMAL = Failure(
    error="an error that could not be recorded",
    details='{"type": "unknown", "message": "", "traceback": [], "causes": []}',
)


class _Place(NamedTuple):
    """One line of a traceback, without its frame."""

    file: str
    line: int
    function: str


class _Related(NamedTuple):
    """An exception behind the one that is told, and how it stands to the one before it."""

    relation: str
    exc: BaseException


class _Told(NamedTuple):
    """One exception in words, before it is cut to size."""

    relation: str
    kind: str
    message: str
    places: list[_Place]


class _Size(NamedTuple):
    """How much is told: characters of the message, lines of the traceback, causes."""

    message: int
    lines: int
    causes: int

    @property
    def of_cause(self) -> _Size:
        return _Size(self.message // 4, self.lines // 3, 0)


# From generous to tight. The last one fits even where every character is spelt out in seven bytes.
_SIZES = (_Size(4_000, 24, 10), _Size(2_000, 12, 6), _Size(1_000, 6, 2), _Size(400, 2, 0))
_LINE_LIMIT = 300
_NAME_LIMIT = 200
_NOTES = 10
_WALK_LIMIT = 1_000


def _fit(top: _Told, related: list[_Related], note: str) -> Failure:
    """The most generous record within the limits."""
    # In words once: a text of 50 MB is not made again for every size.
    causes = [_tell(*one) for one in _ends(related, _SIZES[0].causes)]
    details = ""
    for size in _SIZES:
        record = _record(top, size)
        record["causes"] = _cause_records(causes, len(related), size)
        if note:
            record["note"] = _clean(note, _NAME_LIMIT)
        details = json.dumps(record, ensure_ascii=False)
        if len(details.encode()) <= DETAILS_LIMIT:
            break
    return Failure(_error_line(top, note), details)


def _tell(relation: str, exc: BaseException) -> _Told:
    return _Told(relation, _type_name(exc), _cut(_message(exc), ERROR_LIMIT * 10), _places(exc))


def _error_line(top: _Told, note: str) -> str:
    line = f"{top.kind}: {top.message}" if top.message.strip() else top.kind
    extra = f" ({_clean(note, _NAME_LIMIT)})" if note else ""
    return _cut(" ".join(_clean(line, 2 * ERROR_LIMIT).split()), ERROR_LIMIT - len(extra)) + extra


def _record(told: _Told, size: _Size) -> dict[str, Any]:
    return {
        "type": _clean(told.kind, _NAME_LIMIT),
        "message": _clean(told.message, size.message),
        "traceback": _traceback(told.places, size.lines),
    }


def _traceback(places: list[_Place], limit: int) -> list[str]:
    """The first lines and, twice as many, the last: where the run came in, and where it broke."""
    if len(places) <= limit:
        return [_line(place) for place in places]
    head, tail = limit // 3, limit - limit // 3
    return [
        *(_line(place) for place in places[:head]),
        f"… {len(places) - limit:,} calls left out …",
        *(_line(place) for place in places[-tail:]),
    ]


def _line(place: _Place) -> str:
    source = _attempt(lambda: linecache.getline(place.file, place.line).strip(), "")
    where = f"{place.file}:{place.line} in {place.function}"
    return _clean(f"{where}: {source}" if source else where, _LINE_LIMIT)


def _cause_records(causes: list[_Told], total: int, size: _Size) -> list[dict[str, Any]]:
    """The nearest causes and the deepest ones: the end of a long chain is its root."""
    told = _ends(causes, size.causes)
    records = [{"relation": one.relation, **_record(one, size.of_cause)} for one in told]
    if total > len(told):
        left_out = f"{total - len(told):,} more"
        records.insert(
            len(told) // 2,
            {"relation": "left out", "type": "", "message": left_out, "traceback": []},
        )
    return records


def _ends(items: list[T], limit: int) -> list[T]:
    """All of a short list; half the limit from either end of a long one."""
    half = limit // 2
    return items if len(items) <= limit else [*items[:half], *items[len(items) - half :]]


# --- looking at an exception, none of whose parts can be trusted


def _type_name(exc: BaseException) -> str:
    """The name as tracebacks have it; this library's own exceptions are known without a module."""
    module = _attempt(lambda: _as_name(type(exc).__module__), "")
    name = _attempt(lambda: _as_name(type(exc).__qualname__), "?")
    plain = module in ("", "builtins", "__main__") or module.split(".")[0] == "cyclone_sqla"
    return name if plain else f"{module}.{name}"


def _as_name(name: object) -> str:
    return name if isinstance(name, str) else "?"


def _message(exc: BaseException) -> str:
    try:
        text = str(exc)
    except BaseException as trouble:  # noqa: BLE001 - __str__ may raise whatever it likes
        text = f"(its text can't be shown: str() raised {_type_name(trouble)})"
    return "\n".join([text, *_notes(exc)])


def _notes(exc: BaseException) -> list[str]:
    none: list[str] = []
    return _attempt(lambda: [str(n) for n in islice(getattr(exc, "__notes__", ()), _NOTES)], none)


def _places(exc: BaseException) -> list[_Place]:
    """The traceback from the first frame outside this library; all of it if there is none."""
    tb = _part(exc, "__traceback__", TracebackType)
    entered = tb
    while entered is not None and _is_ours(entered):
        entered = entered.tb_next
    return list(_walk(entered or tb))


def _is_ours(tb: TracebackType) -> bool:
    name = tb.tb_frame.f_globals.get("__name__")
    return isinstance(name, str) and name.startswith("cyclone_sqla.")


def _walk(tb: TracebackType | None) -> Iterator[_Place]:
    while tb is not None:
        code = tb.tb_frame.f_code
        yield _Place(code.co_filename, tb.tb_lineno, code.co_name)
        tb = tb.tb_next


def _related(exc: BaseException) -> list[_Related]:
    """Causes, contexts and members behind an exception, in the order one would tell them."""
    found: list[_Related] = []
    seen = {id(exc)}
    ahead = _neighbours(exc)[::-1]
    while ahead and len(found) < _WALK_LIMIT:
        related = ahead.pop()
        if id(related.exc) not in seen:
            seen.add(id(related.exc))
            found.append(related)
            ahead.extend(reversed(_neighbours(related.exc)))
    return found


def _neighbours(exc: BaseException) -> list[_Related]:
    members = [_Related("member", member) for member in _members(exc)]
    if (cause := _part(exc, "__cause__", BaseException)) is not None:
        return [_Related("cause", cause), *members]
    context = _part(exc, "__context__", BaseException)
    if context is None or _part(exc, "__suppress_context__", bool):
        return members
    return [_Related("context", context), *members]


def _members(exc: BaseException) -> list[BaseException]:
    none: list[BaseException] = []
    if not isinstance(exc, BaseExceptionGroup):
        return none
    group = cast("BaseExceptionGroup[BaseException]", exc)
    return _attempt(lambda: list(islice(group.exceptions, _WALK_LIMIT)), none)


def _part(exc: BaseException, name: str, kind: type[T]) -> T | None:
    """An attribute, if it can be read and really is what Python keeps there."""
    value: object = _attempt(lambda: getattr(exc, name), None)
    return cast("T", value) if issubclass(type(value), kind) else None


def _attempt(read: Callable[[], T], otherwise: T) -> T:
    """What ``read`` returns, or the second best where the exception's own code fails."""
    try:
        return read()
    except BaseException:  # noqa: BLE001 - whatever it was, the record goes on without this part
        return otherwise


# --- text that every database takes

_UNSTORABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _clean(text: str, limit: int) -> str:
    """At most ``limit`` characters, with what can't be stored or shown spelt out: ``\\x00``."""
    # Cut first, so that 50 MB are not searched; and again, because spelling out makes it longer.
    return _cut(_UNSTORABLE.sub(_spelt_out, _cut(text, limit)), limit)


def _spelt_out(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _cut(text: str, limit: int) -> str:
    """Head and tail of a long text: the beginning says what it was, the end often why."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    marker = f" … {len(text) - limit:,} characters left out … "
    return f"{text[: limit - tail - len(marker)]}{marker}{text[-tail:]}"
