"""Where the demo happens: a database that nothing else uses, worker processes, and their end."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateSchema, DropSchema

from cyclone_sqla.cli.demo_shop import QUEUE, cyclone
from cyclone_sqla.cli.failures import WrongUse, database_failures
from cyclone_sqla.cli.options import DATABASE_URL
from cyclone_sqla.urls import masked, worker_url

APP = "cyclone_sqla.cli.demo_shop:cyclone"

NAMES = ("worker-1", "worker-2")

REPLACEMENT = "worker-3"
"""Who takes the place of the one that is killed."""

SLOTS = 10
"""Of each worker: one for each account."""

LEASE = 2
"""Seconds until the jobs of a worker that was killed run again."""

GRACE = 2
"""Seconds that runs may go on when the workers are told to stop."""

PATIENCE = 20.0
"""Seconds until a worker that would not end is killed."""

LOCK_TIMEOUT = "30"
"""Seconds that a transaction of the shop waits for SQLite's one writer."""


@dataclass(frozen=True)
class Place:
    """A database, a schema (None: it has none) and a directory for logs, all for one demo."""

    url: sa.URL
    schema: str | None
    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        """How the shop is told, here and in the workers' processes."""
        return {DATABASE_URL: self.url.render_as_string(hide_password=False)}

    def __str__(self) -> str:
        if self.schema is not None:
            return f"{masked(self.url)}, schema {self.schema}"
        return f"SQLite, {self.url.database}"


@contextmanager
def make_place(url: sa.URL | None, interrupts: Interrupts, *, keep: bool) -> Generator[Place]:
    """A place of its own: a new SQLite file, or a new schema of a server.

    It is removed at the end, unless it is to be kept.

    Raises:
        WrongUse: the SQLite file is there already, so it may hold what is not the demo's.
        ConfigurationError: this kind of database is not supported.
        Failed: the server can't be reached, or does not let this user create a schema.
    """
    with ExitStack() as at_end:
        directory = Path(tempfile.mkdtemp(prefix="cyclone-demo-"))
        at_end.callback(shutil.rmtree, directory)
        place, remove = _place_for(url, directory)
        at_end.callback(remove, place)
        at_end.callback(interrupts.hold)
        if keep:
            at_end.pop_all()
        yield place


def _place_for(url: sa.URL | None, directory: Path) -> tuple[Place, Callable[[Place], None]]:
    if url is None:
        url = sa.URL.create("sqlite", database=str(directory / "shop.db"))
    if url.get_backend_name() == "sqlite":
        return Place(_new_file(worker_url(url)), None, directory), _remove_file
    cyclone.dialect(url.get_backend_name())  # or it is not supported
    place = Place(worker_url(url), f"cyclone_demo_{secrets.token_hex(4)}", directory)
    _on_server(place, CreateSchema(str(place.schema)))
    return place, _drop_schema


def _new_file(url: sa.URL) -> sa.URL:
    name = url.database or ":memory:"
    file = Path(name).absolute()
    if name == ":memory:" or name.startswith("file:") or file.exists():
        raise WrongUse(
            f"{masked(url)}: the demo needs a SQLite file of its own, so name one that is not "
            "there yet, as in sqlite:///new.db"
        )
    return url.set(database=str(file), query={"timeout": LOCK_TIMEOUT, **url.query})


def _remove_file(place: Place) -> None:
    for suffix in ("", "-wal", "-shm", ".cyclone-lock"):
        Path(f"{place.url.database}{suffix}").unlink(missing_ok=True)


def _drop_schema(place: Place) -> None:
    _on_server(place, DropSchema(str(place.schema), cascade=True))


def _on_server(place: Place, statement: CreateSchema | DropSchema) -> None:
    with database_failures(place.url):
        engine = sa.create_engine(place.url, poolclass=NullPool)
        with engine.begin() as connection:
            connection.execute(statement)


class Workers:
    """Two worker processes of the shop, started as anybody starts them: `cyclone-sqla work`.

    Each is known by its name, which stands before the slash in the worker of a job.
    """

    def __init__(self, place: Place, interrupts: Interrupts) -> None:
        self._place = place
        self._interrupts = interrupts
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # They end when this pipe closes, so none is left behind, however the demo ends.
        self._pipe, self._word = os.pipe()

    def __enter__(self) -> Self:
        try:
            with self._interrupts.held():
                for name in NAMES:
                    self._processes[name] = self._start(name)
        except BaseException:
            self._end(patience=0)
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._interrupts.held():
            self._end(PATIENCE if exc is None else 0)

    def kill(self, name: str) -> None:
        """End one of them as a power cut does, and start another in its place."""
        with self._interrupts.held():
            victim = self._processes.pop(name)
            victim.kill()
            victim.wait()
            self._processes[REPLACEMENT] = self._start(REPLACEMENT)

    def ended(self) -> list[str]:
        """Those that have ended though nobody told them to, each with what its log says last."""
        codes = {name: process.poll() for name, process in self._processes.items()}
        return [self._last_words(name, code) for name, code in codes.items() if code is not None]

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        with self._log(name).open("wb") as log:
            return subprocess.Popen(
                self._command(name),
                cwd=self._place.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._pipe,),
            )

    def _command(self, name: str) -> list[str]:
        options = ["--app", APP, "--queues", f"{QUEUE}:{SLOTS}", "--name", name]
        if self._place.schema is not None:
            options += ["--schema", self._place.schema]
        options += ["--lease", str(LEASE), "--rescue-interval", "0.5"]
        ending = ["--grace", str(GRACE), "--parent", str(self._pipe)]
        return [sys.executable, "-m", "cyclone_sqla", "work", *options, *ending]

    def _log(self, name: str) -> Path:
        return self._place.directory / f"{name}.log"

    def _last_words(self, name: str, code: int) -> str:
        lines = self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        return f"{name} ended with exit code {code}: {lines[-1] if lines else 'it said nothing'}"

    def _end(self, patience: float) -> None:
        """Let them stop by themselves; kill those that have not after ``patience`` seconds."""
        os.close(self._word)
        os.close(self._pipe)
        give_up = monotonic() + patience
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, give_up - monotonic()))
            process.kill()
            process.wait()


class Interrupts:
    """Ctrl-C, and SIGTERM and SIGHUP as well: KeyboardInterrupt, once.

    Further ones don't disturb the cleaning up. It can be held back where it would leave something
    behind. Where Python loses it, in the middle of a finalizer, :meth:`check` raises it again.
    """

    def __init__(self) -> None:
        self._came = False
        self._is_held = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt if one has come."""
        if self._came:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """From now on none is raised but by :meth:`check`."""
        self._is_held = True

    @contextmanager
    def held(self) -> Generator[None]:
        """One that comes in the block is raised after it."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        self.check()

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        is_first, self._came = not self._came, True
        if is_first and not self._is_held:
            raise KeyboardInterrupt
