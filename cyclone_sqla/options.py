"""The options of an enqueue, checked in one place before any SQL."""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias, cast

from typing_extensions import TypedDict

from cyclone_sqla.errors import InvalidJobError
from cyclone_sqla.job_spec import MAX_PRIORITY, JobSpec, OnDuplicate, OnFailure
from cyclone_sqla.keys import check_key, plain, text_fault, unstorable

MAX_NAME_BYTES = 256
"""How long a kind, queue, tenant or trace id may be, in bytes of UTF-8."""

MAX_ATTEMPTS = 1_000_000
"""The largest ``max_attempts``."""

MAX_POSITION = 2**62
"""The largest ``position``."""

MAX_DURATION = timedelta(days=36_500)
"""The longest ``process_in`` and ``timeout``."""

MAX_HEADERS_BYTES = 65_536
"""How large all headers of a job may be together, in bytes of JSON."""


class Options(TypedDict, total=False):
    """What an enqueue may say beside the arguments. None, like leaving it out, means the default.

    =================== ===================================================================
    option              meaning
    =================== ===================================================================
    ``queue``           the queue that workers draw the job from
    ``priority``        -32768 … 32767, smaller first
    ``unique``          a key that at most one active job of the kind may hold
    ``on_duplicate``    the key is taken: ``"raise"`` DuplicateError, or ``"return"`` the holder
    ``idempotency_key`` one job of the kind, ever: a later enqueue returns the first one
    ``sequence``        a key whose jobs run one at a time, in the order in which they were enqueued
    ``on_failure``      when the job ends in failure, its sequence goes on and the job is kept as a
                        ``"dead-letter"``, goes on (``"skip"``), or stops until a person acts
                        (``"halt"``)
    ``position``        its place in the sequence, 1, 2, 3 …; it waits for the places before it
    ``reject_gap``      refuse a position if the one before is not there
    ``sequence_lock``   make the sequence's order that of the commits: waits for other transactions
    that
                        enqueue to the key with it
    ``process_in``      not before this delay has passed: a timedelta, or seconds, 0 or more
    ``process_at``      not before this time: an aware datetime; not with ``process_in``
    ``deadline``        discard the job if it has not ended by then: an aware datetime
    ``max_attempts``    how many runs the job may have, 1 … 1,000,000
    ``timeout``         how long one run may take: a timedelta, or seconds, more than 0
    ``tenant``          whom the job is for; a label
    ``trace_id``        the trace that the job belongs to; a label
    ``headers``         str to str, for what travels beside the arguments
    =================== ===================================================================
    """

    queue: str | None
    priority: int | None
    unique: str | None
    on_duplicate: OnDuplicate | None
    idempotency_key: str | None
    sequence: str | None
    on_failure: OnFailure | None
    position: int | None
    reject_gap: bool | None
    sequence_lock: bool | None
    process_in: timedelta | float | None
    process_at: datetime | None
    deadline: datetime | None
    max_attempts: int | None
    timeout: timedelta | float | None
    tenant: str | None
    trace_id: str | None
    headers: Mapping[str, str] | None


CheckedOptions: TypeAlias = dict[str, Any]
"""Options as a JobSpec takes them: checked, durations as timedelta, times in UTC, no None."""


def build_spec(
    kind: str,
    arguments: str,
    defaults: Mapping[str, object] | Options,
    options: Mapping[str, object] | Options,
) -> JobSpec:
    """A checked job. ``arguments`` is JSON text; ``options`` win over ``defaults``.

    Raises InvalidJobError (InvalidKeyError for a key) naming the option.
    """
    fields = with_options(check_options(defaults), options)
    return JobSpec(kind=check_name("kind", kind), arguments=arguments, **fields)


def with_options(fields: CheckedOptions, options: Mapping[str, object] | Options) -> CheckedOptions:
    """``fields`` overlaid with more options, which are checked here."""
    merged = {**fields, **check_options(options)}
    if "process_in" in merged and "process_at" in merged:
        raise InvalidJobError("process_in, process_at: give one of them, not both")
    for name in _OF_SEQUENCES:
        if merged.get(name) and "sequence" not in merged:
            raise InvalidJobError(f"{name}: needs a sequence")
    if merged.get("reject_gap") and "position" not in merged:
        raise InvalidJobError("reject_gap: needs a position")
    return merged


def check_options(options: Mapping[str, object] | Options) -> CheckedOptions:
    """Every option checked and brought into the form that is stored."""
    return {name: _check(name, value) for name, value in options.items() if value is not None}


def check_name(name: str, value: object) -> str:
    """The text, if it is fit to be shown and compared: printable, non-empty, at most 256 bytes."""
    fault = text_fault(value, MAX_NAME_BYTES)
    if fault is not None:
        raise InvalidJobError(f"{name}: {fault}")
    text = plain(cast("str", value))
    if not text.isprintable():
        raise InvalidJobError(f"{name}: must be printable: no control characters or line breaks")
    return text


def check_queue(name: str, value: object) -> str:
    """A name that a list of queues on the command line can hold."""
    queue = check_name(name, value)
    if "," in queue:
        raise InvalidJobError(f"{name}: must not hold a comma, which separates queues in a list")
    return queue


def _check(name: str, value: object) -> Any:
    check = _CHECKS.get(name)
    if check is None:
        near = difflib.get_close_matches(name, _CHECKS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidJobError(f"{name}: there is no such option{hint}")
    return check(name, value)


def _whole_number(low: int, high: int) -> Callable[[str, object], int]:
    def check(name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidJobError(f"{name}: must be an int, not {type(value).__name__}")
        if not low <= value <= high:
            raise InvalidJobError(f"{name}: must be from {low} to {high}")
        return int(value)

    return check


def _one_of(*choices: str) -> Callable[[str, object], str]:
    listed = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"

    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise InvalidJobError(f"{name}: must be {listed}")
        return plain(value)

    return check


def _check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidJobError(f"{name}: must be True or False, not {type(value).__name__}")
    return value


def _check_delay(name: str, value: object) -> timedelta:
    delay = _as_duration(name, value)
    if delay < timedelta(0):
        raise InvalidJobError(f"{name}: must not be negative")
    return delay


def _check_timeout(name: str, value: object) -> timedelta:
    timeout = _as_duration(name, value)
    if timeout <= timedelta(0):
        raise InvalidJobError(f"{name}: must be more than zero")
    return timeout


def _as_duration(name: str, value: object) -> timedelta:
    if isinstance(value, timedelta):
        seconds: float = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    else:
        raise InvalidJobError(
            f"{name}: must be a timedelta or a number of seconds, not {type(value).__name__}"
        )
    longest = MAX_DURATION.total_seconds()
    if not -longest <= seconds <= longest:  # not the other way round: NaN compares to nothing
        raise InvalidJobError(f"{name}: must be at most {MAX_DURATION.days} days")
    return value if isinstance(value, timedelta) else timedelta(seconds=seconds)


def _check_time(name: str, value: object) -> datetime:
    if not isinstance(value, datetime):
        raise InvalidJobError(f"{name}: must be an aware datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise InvalidJobError(
            f"{name}: naive datetime {value.isoformat()}; pass an aware one, "
            "for example datetime.now(timezone.utc) + timedelta(hours=1)"
        )
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidJobError(f"{name}: {value.isoformat()} is out of range in UTC") from None


def _check_headers(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidJobError(f"{name}: must map str to str, not be a {type(value).__name__}")
    headers = dict(cast("Mapping[object, object]", value))
    checked = {_header_key(name, k): _header_value(name, k, v) for k, v in headers.items()}
    size = len(json.dumps(checked, ensure_ascii=False).encode())
    if size > MAX_HEADERS_BYTES:
        raise InvalidJobError(f"{name}: take {size} bytes of JSON, more than {MAX_HEADERS_BYTES}")
    return checked


def _header_key(name: str, key: object) -> str:
    fault = text_fault(key, MAX_NAME_BYTES)
    if fault is not None:
        raise InvalidJobError(f"{name}: the key {reprlib.repr(key)} {fault}")
    return plain(cast("str", key))


def _header_value(name: str, key: object, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidJobError(f"{name}[{key!r}]: must be a str, not {type(value).__name__}")
    fault = unstorable(value)
    if fault is not None:
        raise InvalidJobError(f"{name}[{key!r}]: {fault}")
    return plain(value)


_OF_SEQUENCES = ("on_failure", "position", "reject_gap", "sequence_lock")

_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "queue": check_queue,
    "priority": _whole_number(-MAX_PRIORITY - 1, MAX_PRIORITY),
    "unique": check_key,
    "on_duplicate": _one_of("raise", "return"),
    "idempotency_key": check_key,
    "sequence": check_key,
    "on_failure": _one_of("dead-letter", "skip", "halt"),
    "position": _whole_number(1, MAX_POSITION),
    "reject_gap": _check_flag,
    "sequence_lock": _check_flag,
    "process_in": _check_delay,
    "process_at": _check_time,
    "deadline": _check_time,
    "max_attempts": _whole_number(1, MAX_ATTEMPTS),
    "timeout": _check_timeout,
    "tenant": check_name,
    "trace_id": check_name,
    "headers": _check_headers,
}
