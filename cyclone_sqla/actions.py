"""Actions: the functions that jobs run, typed from the call to the worker, and their registry."""

from __future__ import annotations

import difflib
import functools
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    overload,
)

from typing_extensions import Unpack

from cyclone_sqla.arguments import Arguments, Results
from cyclone_sqla.backoff import DEFAULT_BACKOFF, BackoffPolicy, Duration, as_policy
from cyclone_sqla.context import Context
from cyclone_sqla.entities import Missing
from cyclone_sqla.errors import InvalidJobError, RegistrationError, UnknownKindError
from cyclone_sqla.job_spec import JobRef, JobSpec
from cyclone_sqla.options import CheckedOptions, Options, check_name, check_options, with_options
from cyclone_sqla.signatures import (
    Signature,
    UnresolvedError,
    enclosing_names,
    is_async,
    own_name,
    read_signature,
    refuse_unfit_callable,
)

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from cyclone_sqla.binding import AsyncTarget, SyncTarget

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Encode: TypeAlias = (
    "Callable[[tuple[Any, ...], dict[str, Any], SyncTarget | AsyncTarget | None], str]"
)

# Building a schema may complete the user's own models: no work for two threads at once.
_building = threading.RLock()


class Producer(Protocol):
    """What an action hands its jobs to: the application, which knows the database."""

    @overload
    def enqueue_spec(self, target: SyncTarget, spec: JobSpec, /) -> JobRef: ...
    @overload
    def enqueue_spec(
        self, target: AsyncTarget, spec: JobSpec, /
    ) -> Coroutine[Any, Any, JobRef]: ...


class Enqueueable(Generic[P]):
    """Something that a call makes a job of: an action, or an action with options."""

    kind: str

    def __init__(
        self, kind: str, encode: Encode, fields: CheckedOptions, producer: Producer
    ) -> None:
        self.kind = kind
        self._encode = encode
        self._fields = fields
        self._producer = producer
        self._blank = JobSpec(kind=kind, arguments="", **fields)

    @overload
    def enqueue(self, target: SyncTarget, /, *args: P.args, **kwargs: P.kwargs) -> JobRef: ...
    @overload
    def enqueue(
        self, target: AsyncTarget, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, JobRef]: ...
    def enqueue(
        self, target: SyncTarget | AsyncTarget, /, *args: P.args, **kwargs: P.kwargs
    ) -> JobRef | Coroutine[Any, Any, JobRef]:
        """Insert a job with these arguments in the target's transaction: it exists if that commits.

        ``target`` is a Session, scoped_session or Connection, or one of their async kin; then await
        the answer. The arguments are checked and serialised at this call, before any SQL:
        PayloadError names the path of one that can't travel, and changing a list afterwards does no
        harm. A pending instance of a mapped class has the session flushed first.
        """
        return self._producer.enqueue_spec(target, self._spec(args, kwargs, target))

    def job(self, *args: P.args, **kwargs: P.kwargs) -> JobSpec:
        """The checked job, for ``enqueue_many``. PayloadError names the path of a bad argument.

        An instance of a mapped class needs its primary key: flush the session before.
        """
        return self._spec(args, kwargs, None)

    def using(self, **options: Unpack[Options]) -> BoundAction[P]:
        """The same with options, which win over those set before.

        :class:`~cyclone_sqla.options.Options` lists them. InvalidJobError names a bad one.
        """
        return BoundAction(
            self.kind, self._encode, with_options(self._fields, options), self._producer
        )

    def _spec(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: SyncTarget | AsyncTarget | None,
    ) -> JobSpec:
        return self._blank.carrying(self._encode(args, kwargs, target))


class BoundAction(Enqueueable[P]):
    """An action with options: what :meth:`Action.using` returns. Keep it and use it many times."""


class Action(Enqueueable[P], Generic[P, R_co]):
    """A function registered under a kind: call it to run it, ``enqueue`` to make a job of it.

    ``P`` is the function's signature without the Context, ``R_co`` what it returns (for an async
    function the coroutine).
    """

    fn: Callable[..., R_co]

    def __init__(
        self,
        fn: Callable[..., R_co],
        *,
        producer: Producer,
        kind: str | None = None,
        queue: str = "default",
        priority: int = 0,
        max_attempts: int = 25,
        timeout: timedelta | float | None = None,
        backoff: BackoffPolicy | Callable[[int], Duration] | Duration | None = None,
        retry_on: type[BaseException] | Iterable[type[BaseException]] = (),
        discard_on: type[BaseException] | Iterable[type[BaseException]] = (),
        missing: Missing = "discard",
    ) -> None:
        """RegistrationError says why the function or an option can't be used.

        ``timeout`` is a timedelta or seconds. ``discard_on`` are the exceptions after which no
        attempt can succeed, unless ``retry_on`` names the same class or a more special one.
        ``missing`` says what a row that has gone means.
        """
        self.fn = fn.__func__ if isinstance(fn, staticmethod) else fn
        refuse_unfit_callable(self.fn)
        kind = _checked_kind(self.fn, kind)
        super().__init__(
            kind,
            self.encode,
            _default_options(
                kind, queue=queue, priority=priority, max_attempts=max_attempts, timeout=timeout
            ),
            producer,
        )
        self.backoff = as_policy(backoff)
        self.retry_on = _exception_types(kind, "retry_on", retry_on)
        self.discard_on = _exception_types(kind, "discard_on", discard_on)
        self._missing: Missing = _checked_missing(kind, missing)
        self.is_async = is_async(self.fn)
        self._names = enclosing_names(self.fn)
        self._signature = self._read_early()
        self._arguments: Arguments | None = None
        self._results: Results | None = None
        # updated=(): the function's own attributes must not overwrite ours.
        functools.update_wrapper(cast("Callable[..., Any]", self), self.fn, updated=())

    @overload
    def __call__(self, ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> R_co:
        """Run the function here and now, as in a unit test: no job, no transaction.

        An action that takes the Context is given one first, by position.
        """
        if self.takes_context and not (args and isinstance(args[0], Context)):
            names = ", ".join(["ctx", *(p.name for p in self.signature.parameters)])
            raise TypeError(f"{self.kind} takes the Context first: {self.kind}({names})")
        return self.fn(*args, **kwargs)

    def encode(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: SyncTarget | AsyncTarget | None = None,
    ) -> str:
        """The JSON text of a call's arguments. PayloadError names the path of what can't travel.

        It is a :class:`~cyclone_sqla.entities.Draft` if ``target`` has to insert some rows first.
        """
        return self.arguments.encode(args, kwargs, target)

    def encode_raw(
        self, mapping: Mapping[str, Any], target: SyncTarget | AsyncTarget | None = None
    ) -> str:
        """The JSON text of arguments by name: all of the parameters' types, or all plain JSON.

        ``*args`` is a list and ``**kwargs`` an object under their own names. PayloadError as above.
        """
        return self.arguments.encode_mapping(mapping, target)

    def decode(self, text: str) -> tuple[list[Any], dict[str, Any]]:
        """Stored JSON text as the positional and keyword arguments after the Context.

        PayloadError if they don't fit the function.
        """
        return self.arguments.decode(text)

    def load(self, text: str, session: Session) -> tuple[list[Any], dict[str, Any]]:
        """The same for an action that :attr:`takes_rows`. Discard if one has gone."""
        return self.arguments.load(text, session)

    def encode_result(self, value: object) -> str | None:
        """A result as JSON text; None for None. PayloadError if JSON can't hold it."""
        if value is None:
            return None
        return (self._results or self._build_results()).encode(value)

    def check(self) -> None:
        """Resolve and build everything that is otherwise made on first use. RegistrationError."""
        _ = self.arguments

    @property
    def queue(self) -> str:
        """The queue of jobs that name none."""
        return cast("str", self._fields["queue"])

    @property
    def priority(self) -> int:
        """The priority of jobs that name none."""
        return cast("int", self._fields["priority"])

    @property
    def max_attempts(self) -> int:
        """How many runs a job has that says nothing else."""
        return cast("int", self._fields["max_attempts"])

    @property
    def timeout(self) -> timedelta | None:
        """How long a run may take if the job says nothing else."""
        return cast("timedelta | None", self._fields.get("timeout"))

    @property
    def defaults(self) -> CheckedOptions:
        """The options of jobs that name none, for ``build_spec``."""
        return dict(self._fields)

    @property
    def takes_context(self) -> bool:
        """Whether the function's first parameter is the Context."""
        return self.signature.takes_context

    @property
    def takes_rows(self) -> bool:
        """Whether there are instances of mapped classes among the arguments."""
        return self.arguments.have_rows

    @property
    def signature(self) -> Signature:
        """The parameters without the Context. RegistrationError if a name can't be resolved."""
        return self._signature or self._read_late()

    @property
    def arguments(self) -> Arguments:
        """How arguments become JSON text; built on first use. RegistrationError."""
        return self._arguments or self._build_arguments()

    def __repr__(self) -> str:
        return f"<Action {self.kind!r}>"

    def __reduce__(self) -> str:
        # Pickled as a global name, so that a spawned process finds its own.
        return cast("str", getattr(self, "__qualname__", self.kind))

    def _build_arguments(self) -> Arguments:
        with _building:
            if self._arguments is None:
                self._arguments = Arguments(self.kind, self.signature, self._missing)
            return self._arguments

    def _build_results(self) -> Results:
        with _building:
            if self._results is None:
                self._results = Results(self.kind, self.signature.returns)
            return self._results

    def _read_early(self) -> Signature | None:
        """The signature, or None while an annotation names what does not exist yet."""
        try:
            return self._read()
        except UnresolvedError:
            return None

    def _read_late(self) -> Signature:
        with _building:
            try:
                self._signature = self._signature or self._read()
            except UnresolvedError as exc:
                raise RegistrationError(
                    f"{self.kind}: {exc}; import it where the worker can see it, "
                    "not under TYPE_CHECKING"
                ) from exc
            return self._signature

    def _read(self) -> Signature:
        signature = read_signature(self.kind, self.fn, self._names)
        self._names = {}  # they are not needed any more, and keep alive what they name
        return signature


class ActionDecorator(Protocol):
    """What ``@cyclone.action(...)`` gives: a function in, an action of its signature out."""

    @overload
    def __call__(self, fn: Callable[Concatenate[Context, P], R], /) -> Action[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Action[P, R]: ...


class Registry:
    """The actions of an application, by kind."""

    def __init__(self) -> None:
        self._actions: dict[str, Action[..., Any]] = {}

    def add(self, action: Action[..., Any]) -> None:
        """Register an action. RegistrationError if another one has its kind."""
        other = self._actions.setdefault(action.kind, action)
        if other is not action:
            raise RegistrationError(
                f"{action.kind}: {_place(action)} cannot have this kind, {_place(other)} has it; "
                "give one of them kind=…"
            )

    def get(self, kind: str) -> Action[..., Any]:
        """The action of a kind. UnknownKindError names kinds that look like it."""
        return self._actions.get(kind) or self._unknown(kind)

    def find(self, kind: str) -> Action[..., Any] | None:
        """The action of a kind, or None: a producer need not have the code."""
        return self._actions.get(kind)

    def backoff_of(self, kind: str) -> BackoffPolicy:
        """How long a job of this kind waits after a failure; the default where the code is not."""
        action = self._actions.get(kind)
        return action.backoff if action is not None else DEFAULT_BACKOFF

    def kinds(self) -> tuple[str, ...]:
        """Every kind, sorted."""
        return tuple(sorted(self._actions))

    def queues(self) -> tuple[str, ...]:
        """The default queue of every action, sorted, each once."""
        return tuple(sorted({action.queue for action in self}))

    def check(self) -> None:
        """Resolve every annotation now. One RegistrationError lists all problems of all actions."""
        found: list[str] = []
        for action in self:
            try:
                action.check()
            except RegistrationError as exc:
                found.append(str(exc))
        if found:
            raise RegistrationError("\n".join(found))

    def __iter__(self) -> Iterator[Action[..., Any]]:
        return iter(tuple(self._actions.values()))

    def __len__(self) -> int:
        return len(self._actions)

    def __contains__(self, kind: object) -> bool:
        return kind in self._actions

    def _unknown(self, kind: str) -> NoReturn:
        near = difflib.get_close_matches(kind, self._actions, 3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise UnknownKindError(f"no action is registered for the kind {kind!r}{hint}")


def _checked_kind(fn: object, kind: str | None) -> str:
    name = kind if kind is not None else own_name(fn)
    if name is None:
        raise RegistrationError(f"{fn!r} has no name of its own; give it kind=…")
    try:
        return check_name("kind", name)
    except InvalidJobError as exc:
        raise RegistrationError(str(exc)) from exc


def _default_options(kind: str, **options: object) -> CheckedOptions:
    try:
        return check_options(options)
    except InvalidJobError as exc:
        raise RegistrationError(f"{kind}: {exc}") from exc


def _checked_missing(kind: str, missing: Missing) -> Missing:
    # Not everybody uses a type checker.
    if missing not in get_args(Missing):
        raise RegistrationError(f"{kind}: missing: must be 'discard' or 'none', not {missing!r}")
    return missing


def _exception_types(
    kind: str, option: str, given: type[BaseException] | Iterable[type[BaseException]]
) -> tuple[type[BaseException], ...]:
    types: tuple[Any, ...] = (given,) if isinstance(given, type) else tuple(given)
    for one in types:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise RegistrationError(f"{kind}: {option}: {one!r} is not an exception type")
    return types


def _place(action: Action[..., Any]) -> str:
    return f"{action.fn.__module__}.{getattr(action.fn, '__qualname__', repr(action.fn))}"
