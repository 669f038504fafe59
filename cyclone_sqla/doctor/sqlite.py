"""What may be wrong with a SQLite file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection

from cyclone_sqla.dialects import Dialect
from cyclone_sqla.doctor.findings import Finding, Limits, warning


def findings(connection: Connection, dialect: Dialect, limits: Limits) -> Iterator[Finding]:
    """All that is wrong with the file."""
    file = dialect.file_of(connection)
    size = _log_size(file) if file is not None else 0
    if size > limits.log:
        yield warning(
            "large-log",
            f"The write-ahead log of {file} has {size:,} bytes: a reader that never ends keeps it "
            "from being written back.",
            "End the transactions of long readers, then run: PRAGMA wal_checkpoint(TRUNCATE);",
        )


def _log_size(file: Path) -> int:
    log = file.with_name(f"{file.name}-wal")
    return log.stat().st_size if log.exists() else 0
