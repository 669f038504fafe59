"""Which jobs are meant: what a listing and the bulk forms of people's verbs are given."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, fields
from datetime import datetime

from cyclone_sqla.errors import InvalidJobError
from cyclone_sqla.keys import check_key
from cyclone_sqla.lifecycle import State
from cyclone_sqla.options import check_name


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """The jobs of which all that is given holds; None leaves a thing open.

    ``created_before`` and ``created_after`` are aware datetimes, ``sequence`` is a key,
    ``dead_letter=True`` means discarded jobs that nobody has dealt with yet.

    Raises InvalidJobError naming what can't be.
    """

    state: State | str | None = None
    queue: str | None = None
    kind: str | None = None
    sequence: str | None = None
    tenant: str | None = None
    created_before: datetime | None = None
    created_after: datetime | None = None
    dead_letter: bool | None = None

    def __post_init__(self) -> None:
        _check_state(self.state)
        for name in ("queue", "kind", "tenant"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name))
        if self.sequence is not None:
            check_key("sequence", self.sequence)
        for name in ("created_before", "created_after"):
            _check_time(name, getattr(self, name))

    @property
    def is_empty(self) -> bool:
        """Whether it means every job there is."""
        return all(getattr(self, field.name) is None for field in fields(self))


def _check_state(state: object) -> None:
    if state is not None and not (isinstance(state, str) and state in set(State)):
        raise InvalidJobError(f"state: one of {', '.join(State)}, not {reprlib.repr(state)}")


def _check_time(name: str, value: object) -> None:
    is_aware = isinstance(value, datetime) and value.utcoffset() is not None
    if value is not None and not is_aware:
        raise InvalidJobError(f"{name}: must be an aware datetime")
