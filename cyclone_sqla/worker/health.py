"""How a worker is, for those who watch processes: whether it lives, and whether it can work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cyclone_sqla import schema_version

ANSWERED_WITHIN = 15.0
"""Seconds without an answer, or three poll intervals if they are longer, after which the database
counts as not reachable.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker as it is now.

    ``loops``: each loop by name, whether it runs and its latest round succeeded. ``is_reachable``:
    whether the database has answered lately. ``hears``: whether hints arrive; None where the
    worker doesn't listen. It is no part of being ready: a deaf worker polls. ``revision`` is that
    of the tables, as of the worker's last sign of life.
    """

    is_live: bool
    is_stopping: bool
    loops: Mapping[str, bool]
    is_reachable: bool
    hears: bool | None
    revision: str | None

    @property
    def is_ready(self) -> bool:
        """Whether it claims jobs and can settle them."""
        return (
            self.is_live
            and not self.is_stopping
            and self.is_reachable
            and self.revision in schema_version.SUPPORTED
            and bool(self.loops)
            and all(self.loops.values())
        )


NOT_STARTED = WorkerStatus(
    is_live=True, is_stopping=False, loops={}, is_reachable=False, hears=None, revision=None
)
"""Before the worker has reached its database."""
