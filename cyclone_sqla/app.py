"""The application's handle: its actions, its database, and enqueue."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast, overload

import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session
from typing_extensions import Unpack

from cyclone_sqla import operations
from cyclone_sqla.actions import Action, ActionDecorator, Registry
from cyclone_sqla.backoff import BackoffPolicy, Duration
from cyclone_sqla.binding import AsyncTarget, SyncTarget, run
from cyclone_sqla.bulk_control import BulkControl
from cyclone_sqla.clock import Clock, DatabaseClock
from cyclone_sqla.context import Context
from cyclone_sqla.dialects import Dialect, HintMode, dialect_of
from cyclone_sqla.entities import Draft, Missing
from cyclone_sqla.errors import ConfigurationError, SchemaError
from cyclone_sqla.hints import CALL_TO_ADMIT
from cyclone_sqla.job_spec import JobRef, JobSpec, OnDuplicate, OnFailure
from cyclone_sqla.models import job_class
from cyclone_sqla.options import Options, build_spec, check_options
from cyclone_sqla.payload import check_json, check_size
from cyclone_sqla.reading import Reading
from cyclone_sqla.urls import masked, parsed

P = ParamSpec("P")
R = TypeVar("R")


MAX_PAYLOAD = 1024 * 1024
"""How large a job's arguments may be unless the application says otherwise, in bytes of JSON."""

Database: TypeAlias = "str | sa.URL | Engine | Any"
"""A URL, an Engine or AsyncEngine, a (async_)sessionmaker, or a callable that returns one of these.
"""


class Cyclone(BulkControl, Reading):
    """The queue of one application.

    ``database`` is where its workers find the jobs: a URL, an Engine, an AsyncEngine, a
    sessionmaker, or a callable that returns one of these; it may be given later, by assigning to
    :attr:`database`. Enqueue does not need it: a job goes where its caller's transaction goes.

    ``schema`` is the database schema of the queue's tables, None for the connection's default one.
    ``instance`` is stored with every job as its origin. ``max_payload`` bounds a job's arguments,
    in bytes of JSON. ``hints`` says whether workers are told of new jobs: after the commit (True),
    not at all (False: they find them by polling), or ``"transaction"`` (PostgreSQL only: a NOTIFY
    inside the caller's transaction, which makes committing transactions queue up). ``hint_url`` is
    a way to the database for the hints' own connection, where the application's engine can't be
    copied.
    """

    def __init__(
        self,
        database: Database | None = None,
        *,
        schema: str | None = None,
        instance: str | None = None,
        max_payload: int = MAX_PAYLOAD,
        hints: HintMode = True,
        hint_url: str | sa.URL | None = None,
        on_failure: OnFailure | Callable[[JobSpec], OnFailure] = "dead-letter",
        clock: Clock | None = None,
    ) -> None:
        self.database = database
        self.instance = instance
        self.max_payload = max_payload
        self.hints: HintMode = hints
        self.hint_url = parsed(hint_url) if isinstance(hint_url, str) else hint_url
        self.on_failure = on_failure
        self.clock = clock or DatabaseClock()
        self.registry = Registry()
        self._ids: Iterator[int] | None = None
        self._dialects: dict[str, Dialect]
        self._checked: weakref.WeakSet[sa.Dialect]
        self.use_schema(schema)

    # ---- actions ---------------------------------------------------------------------------------

    @overload
    def action(self, fn: Callable[Concatenate[Context, P], R], /) -> Action[P, R]: ...
    @overload
    def action(self, fn: Callable[P, R], /) -> Action[P, R]: ...
    @overload
    def action(
        self,
        /,
        *,
        kind: str | None = None,
        queue: str = "default",
        priority: int = 0,
        max_attempts: int = 25,
        timeout: timedelta | float | None = None,
        backoff: BackoffPolicy | Callable[[int], Duration] | Duration | None = None,
        retry_on: Sequence[type[BaseException]] = (),
        discard_on: Sequence[type[BaseException]] = (),
        missing: Missing = "discard",
    ) -> ActionDecorator: ...
    def action(self, fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Register a function as the action of a kind of job.

        ``kind`` is the stored name, by default the function's own: keep it when you rename the
        function. ``max_attempts``, ``timeout`` (a timedelta, or seconds), ``queue`` and
        ``priority`` are defaults that an enqueue can override. ``backoff`` says how long a failed
        attempt waits. Exceptions of ``discard_on`` are not retried, unless ``retry_on`` names the
        same class or a more special one. ``missing`` is for parameters that take a row: if it has
        gone when the job runs, the job is discarded, or with "none" gets None for it.

        Raises RegistrationError for a function that cannot be an action.
        """
        if fn is not None:
            return self._register(fn, options)

        def decorate(fn: Callable[..., Any]) -> Action[..., Any]:
            return self._register(fn, options)

        return decorate

    def _register(self, fn: Callable[..., Any], options: Mapping[str, Any]) -> Action[..., Any]:
        action: Action[..., Any] = Action(fn, producer=self, **options)
        self.registry.add(action)
        return action

    def check(self) -> None:
        """Resolve the annotations of every action; raise RegistrationError with all that is wrong.

        Workers do this at start. One call in a test finds a bad signature before production does.
        """
        self.registry.check()

    # ---- enqueue ---------------------------------------------------------------------------------

    @overload
    def enqueue(
        self,
        target: SyncTarget,
        kind: str,
        arguments: Mapping[str, Any],
        /,
        **options: Unpack[Options],
    ) -> JobRef: ...
    @overload
    def enqueue(
        self,
        target: AsyncTarget,
        kind: str,
        arguments: Mapping[str, Any],
        /,
        **options: Unpack[Options],
    ) -> Coroutine[Any, Any, JobRef]: ...
    def enqueue(
        self,
        target: SyncTarget | AsyncTarget,
        kind: str,
        arguments: Mapping[str, Any],
        /,
        **options: Unpack[Options],
    ) -> JobRef | Coroutine[Any, Any, JobRef]:
        """Enqueue by name: for a producer that does not have the action's code.

        If the kind is registered here, the arguments are checked against its action and its
        defaults apply; otherwise they must be plain JSON values.

        Raises PayloadError, InvalidJobError, DuplicateError, TransactionError, SchemaError.
        """
        action = self.registry.find(kind)
        defaults = {} if action is None else action.defaults
        text = self.encode_arguments(kind, arguments, target)
        return self.enqueue_spec(target, build_spec(kind, text, defaults, options))

    def encode_arguments(
        self,
        kind: str,
        arguments: Mapping[str, Any],
        target: SyncTarget | AsyncTarget | None = None,
    ) -> str:
        """Arguments as JSON text, checked against the action of the kind, else as plain JSON.

        Raises PayloadError.
        """
        action = self.registry.find(kind)
        if action is not None:
            return action.encode_raw(arguments, target)
        return check_json(kind, arguments)

    @overload
    def enqueue_many(
        self,
        target: SyncTarget,
        jobs: Iterable[JobSpec],
        /,
        *,
        on_duplicate: OnDuplicate | None = None,
    ) -> list[JobRef]: ...
    @overload
    def enqueue_many(
        self,
        target: AsyncTarget,
        jobs: Iterable[JobSpec],
        /,
        *,
        on_duplicate: OnDuplicate | None = None,
    ) -> Coroutine[Any, Any, list[JobRef]]: ...
    def enqueue_many(
        self,
        target: SyncTarget | AsyncTarget,
        jobs: Iterable[JobSpec],
        /,
        *,
        on_duplicate: OnDuplicate | None = None,
    ) -> list[JobRef] | Coroutine[Any, Any, list[JobRef]]:
        """Enqueue many jobs in one step; the answer to the i-th job is the i-th JobRef.

        ``on_duplicate`` overrides what the jobs themselves say. With "raise" it is all or nothing:
        nothing is inserted and DuplicateError lists every offending input. With "return" a
        duplicate's JobRef has ``created=False`` and names the holder.

        On PostgreSQL a hundred plain jobs or more are copied, which SQLAlchemy's events don't see.
        """
        specs = [self._settled_spec(spec) for spec in jobs]
        if on_duplicate is not None:
            specs = [spec._replace(on_duplicate=on_duplicate) for spec in specs]

        def work(connection: Connection, session: Session | None) -> list[JobRef]:
            if not specs:
                return []
            dialect = self.dialect_for(connection)
            refs = operations.enqueue_many(connection, dialect, specs, self.instance)
            new = zip(specs, refs, strict=True)
            self._hint(connection, session, {_called_for(spec) for spec, ref in new if ref.created})
            return refs

        lost = f"{len(specs)} jobs of enqueue_many" if specs else None
        return run(target, work, self.job_class, lost)

    @overload
    def enqueue_spec(self, target: SyncTarget, spec: JobSpec, /) -> JobRef: ...
    @overload
    def enqueue_spec(
        self, target: AsyncTarget, spec: JobSpec, /
    ) -> Coroutine[Any, Any, JobRef]: ...
    def enqueue_spec(
        self, target: SyncTarget | AsyncTarget, spec: JobSpec, /
    ) -> JobRef | Coroutine[Any, Any, JobRef]:
        """Enqueue a job that :meth:`Action.job` made."""
        spec = self._settled_spec(spec)
        flush = isinstance(spec.arguments, Draft)

        def work(connection: Connection, session: Session | None) -> JobRef:
            dialect = self.dialect_for(connection)
            whole = self._completed(spec) if flush else spec
            ref = operations.enqueue(connection, dialect, whole, self.instance)
            if ref.created:
                self._hint(connection, session, {_called_for(spec)})
            return ref

        return run(target, work, self.job_class, f"a {spec.kind} job", flush=flush)

    def _completed(self, spec: JobSpec) -> JobSpec:
        """The job with the keys of the rows that the session has inserted by now."""
        text = cast("Draft", spec.arguments).completed()
        check_size(spec.kind, text, self.max_payload)
        return spec._replace(arguments=text)

    def _settled_spec(self, spec: JobSpec) -> JobSpec:
        """The job as it will be stored: of bearable size, its sequence's failure mode settled."""
        # Not everybody uses a type checker.
        if not isinstance(spec, JobSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"enqueue_many takes jobs made by action.job(…), not {type(spec).__name__}"
            )
        if not isinstance(spec.arguments, Draft):
            check_size(spec.kind, spec.arguments, self.max_payload)
        if spec.sequence is None or spec.on_failure is not None:
            return spec
        mode = self.on_failure(spec) if callable(self.on_failure) else self.on_failure
        return spec._replace(**check_options({"on_failure": mode}))

    def _hint(
        self,
        connection: Connection,
        session: Session | None,
        queues: Collection[str],
    ) -> None:
        """Tell workers after the commit, of jobs that are new."""
        if queues:
            dialect = self.dialect(connection.dialect.name)
            dialect.tell_workers(connection, session, queues, mode=self.hints, url=self.hint_url)

    # ---- database --------------------------------------------------------------------------------

    @property
    def url(self) -> sa.URL | None:
        """The URL of the application's database; None if it has not been given."""
        resolved = self.resolve_database()
        return resolved.url if isinstance(resolved, Engine) else resolved

    def resolve_database(self) -> Engine | sa.URL | None:
        """The application's database as a synchronous Engine or a URL."""
        return _resolve(self.database)

    def resolve_source(self) -> Any:
        """What the application gave as its database: of a callable, what it returns."""
        source = self.database
        while callable(source) and not hasattr(source, "kw"):
            source = source()
        return source

    def use_schema(self, schema: str | None) -> None:
        """Find the queue's tables in this schema from now on: for a program that is told which."""
        self.schema = schema
        self.job_class = job_class(schema)
        self._dialects = {}
        self._checked = weakref.WeakSet()

    def use_clock(self, clock: Clock) -> None:
        """Go by this clock from now on: for tests."""
        self.clock = clock
        for dialect in self._dialects.values():  # whose statements take long to build anew
            dialect.clock = clock

    def use_ids(self, ids: Iterable[int] | None) -> None:
        """Give new jobs these ids, one after the other: for tests whose rows are always the same.

        None for those that the database draws, which must not meet the given ones.
        """
        self._ids = None if ids is None else iter(ids)
        for dialect in self._dialects.values():
            dialect.ids = self._ids

    def dialect(self, name: str) -> Dialect:
        """This application's statements for SQLAlchemy's name of a database, built once."""
        if name not in self._dialects:
            self._dialects[name] = dialect_of(name, self.schema, self.clock)
            self._dialects[name].ids = self._ids
        return self._dialects[name]

    def dialect_for(self, connection: Connection) -> Dialect:
        dialect = self.dialect(connection.dialect.name)
        if connection.dialect not in self._checked:
            self._require_tables(connection, dialect)
            self._checked.add(connection.dialect)
        return dialect

    def _require_tables(self, connection: Connection, dialect: Dialect) -> None:
        if dialect.has_tables(connection):
            return
        where = f" (schema {self.schema!r})" if self.schema else ""
        raise SchemaError(
            f"{masked(connection.engine.url)}{where} has no {dialect.tables.job.name} table: run "
            "`cyclone-sqla migrate` on it, or enqueue in a transaction of the database that has it"
        )


def _called_for(spec: JobSpec) -> str:
    return spec.queue if spec.sequence is None else CALL_TO_ADMIT


def _resolve(database: Any) -> Engine | sa.URL | None:
    if database is None or isinstance(database, Engine | sa.URL):
        return database
    if isinstance(database, str):
        return parsed(database)
    engine = getattr(database, "sync_engine", None)
    if isinstance(engine, Engine):
        return engine
    bind = getattr(database, "kw", {}).get("bind")
    if bind is not None:
        return _resolve(bind)
    if callable(database) and not hasattr(database, "kw"):
        return _resolve(database())
    raise ConfigurationError(
        "database: give a URL, an Engine or AsyncEngine, a sessionmaker with a bind, or a "
        f"callable that returns one of these, not {type(database).__name__}"
    )
