"""Who works on a SQLite file: one worker alone, or any number together."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

from cyclone_sqla.errors import ConfigurationError

_held: set[int] = set()


class InstanceLock:
    """A lock of the operating system on ``<database>.cyclone-lock``, held until it is released.

    A worker that runs alone holds it exclusively, every other one shares it. So whoever holds it
    exclusively knows that a job which is running in the database runs nowhere. The system drops the
    lock when the process ends, however it ends; the file stays, and must not be deleted while a
    worker runs.
    """

    def __init__(self, database: Path, *, alone: bool) -> None:
        self._database = database
        self._path = database.with_name(f"{database.name}.cyclone-lock")
        self._alone = alone
        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock or refuse at once.

        Raises:
            ConfigurationError: another worker excludes this one, or the file can't be locked.
        """
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CREAT, 0o666)
            _held.add(self._file)
            self._lock(self._file)
        except BlockingIOError:
            self.release()
            raise ConfigurationError(self._refusal()) from None
        except OSError as exc:
            self.release()
            raise ConfigurationError(f"{self._path} can't be locked: {exc.strerror}") from exc

    def release(self) -> None:
        """Let others in."""
        file, self._file = self._file, None
        if file is not None:
            _held.discard(file)
            os.close(file)

    def _lock(self, file: int) -> None:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, (fcntl.LOCK_EX if self._alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        elif self._alone:
            raise OSError(errno.ENOTSUP, "Windows has no flock, so leave single_instance out")

    def _refusal(self) -> str:
        if self._alone:
            return f"single_instance: another worker is at work on {self._database}"
        return (
            f"a worker with single_instance is at work on {self._database}: stop it first, or "
            "start it without single_instance"
        )


def _let_go_in_child() -> None:
    """A child that an action forks shares the lock, and would hold it beyond the worker's death."""
    while _held:
        with suppress(OSError):
            os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
