"""`cyclone-sqla work`: run the jobs of an application, until a signal says stop.

==== ==========================================================================================
code meaning
==== ==========================================================================================
0    stopped as asked: every run has ended and is written down
1    it could not start, because the database could not be reached or refused
2    an option, a setting or the application is wrong
3    the queue's tables are missing or of another version; the message says what to run
4    a run, or a database that fell silent, would not end in time: its jobs' leases run out
5    --max-jobs or --max-memory is reached and every run has ended: start it again
130  a second signal ended it at once: the leases of its jobs run out
==== ==========================================================================================

With ``--processes`` it is the code of the process that ended worst; 5 is then never the end.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import click

from cyclone_sqla import schema_version
from cyclone_sqla.app import Cyclone
from cyclone_sqla.cli import logs
from cyclone_sqla.cli.failures import (
    Failed,
    Interrupted,
    WrongUse,
    database_failures,
    one_line_failures,
)
from cyclone_sqla.cli.options import DATABASE_URL, Target, find_target, target_options
from cyclone_sqla.cli.sizes import size
from cyclone_sqla.cli.stopping import Stopper
from cyclone_sqla.dialects.migrating import migrating
from cyclone_sqla.errors import ConfigurationError, SchemaError
from cyclone_sqla.settings import DEFAULT_SETTINGS, WorkerSettings, parse_queues
from cyclone_sqla.worker.health_server import LOOPBACK, HealthServer, answers_for, answers_of
from cyclone_sqla.worker.processes import Processes
from cyclone_sqla.worker.worker import Worker

log = logging.getLogger("cyclone_sqla.worker")


class Unfit(Failed):
    """The queue's tables are missing or of another version."""

    exit_code = 3


class Unfinished(Failed):
    """Something would not end in time."""

    exit_code = 4


SPENT = 5
"""The exit code of a process that wants a fresh one in its place."""

AFTER_GRACE = 15.0
"""Seconds beyond the grace after which a process that is told to stop is gone in any case."""

AFTER_WORK = 5.0
"""Seconds for the interpreter to end when the worker has: an action may have left a thread."""

EPILOG = """\b
Exit codes:
    0  stopped as asked, and every run has ended
    1  the database could not be reached, or refused
    2  an option, a setting or the application is wrong
    3  the queue's tables are missing or of another version
    4  something would not end in time; its leases run out
    5  --max-jobs or --max-memory is reached, and every run has ended: start it again
  130  a second signal ended it at once; its leases run out
"""


class _WithArguments(click.Command):
    """Keeps its arguments as they were given, for the command lines of other processes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = tuple(args)
        return super().parse_args(ctx, args)


def _seconds(name: str, default: float, text: str) -> Callable[[Any], Any]:
    return click.option(
        name, type=float, default=default, show_default=True, metavar="SECONDS", help=text
    )


@click.command("work", cls=_WithArguments, epilog=EPILOG)
@target_options
@click.option(
    "--queues",
    metavar="LIST",
    help="Queues and their slots, like ledger:5,mail:20.  [default: all of the application]",
)
@click.option(
    "--concurrency",
    type=int,
    default=DEFAULT_SETTINGS.concurrency,
    show_default=True,
    metavar="N",
    help="Slots of a queue for which --queues names none.",
)
@_seconds("--poll", DEFAULT_SETTINGS.poll, "Look for jobs this often if no hint comes.")
@_seconds(
    "--lease", DEFAULT_SETTINGS.lease, "How long a run may go unrenewed before others take its job."
)
@_seconds("--rescue-interval", DEFAULT_SETTINGS.rescue_interval, "Look for lost runs this often.")
@_seconds(
    "--grace",
    DEFAULT_SETTINGS.grace,
    "How long runs may go on after the first signal. The process is gone "
    f"{AFTER_GRACE:g} s after that at the latest.",
)
@_seconds(
    "--query-timeout",
    DEFAULT_SETTINGS.query_timeout,
    "PostgreSQL: connect anew if a step of the worker's own has no answer for so long.",
)
@click.option("--no-listen", is_flag=True, help="Find new jobs by polling alone.")
@click.option(
    "--listen-url", metavar="URL", help="PostgreSQL without a transaction pooler, for LISTEN."
)
@click.option("--no-prepare", is_flag=True, help="No prepared statements, for some poolers.")
@click.option("--name", metavar="NAME", help="Of this worker.  [default: host:process]")
@click.option(
    "--single-instance",
    is_flag=True,
    help="SQLite: let no other worker work on the file, and run again at once what a crashed "
    "one left behind.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Run N workers, NAME-1 to NAME-N, and start those again that crash.",
)
@click.option(
    "--max-jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="After N runs let the rest end, and give way to a fresh process: with --processes it is "
    "started, a single one ends with exit code 5.",
)
@click.option(
    "--max-memory",
    type=size,
    metavar="SIZE",
    help="The same beyond so much memory, like 512M or 2G; looked at when a run has ended.",
)
@click.option(
    "--health-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Answer /livez and /readyz by HTTP. With --processes for all of them; they answer "
    "themselves on the N ports that follow.",
)
@click.option(
    "--health-host",
    default=LOOPBACK,
    show_default=True,
    metavar="HOST",
    help="Where to answer them.",
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    show_default=True,
)
@click.option("--parent", type=int, hidden=True)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    database_url: str | None,
    schema: str | None,
    app: str | None,
    processes: int,
    parent: int | None,
    log_format: logs.LogFormat,
    log_level: str,
    health_port: int | None,
    health_host: str,
    **options: Any,
) -> None:
    """Run jobs until SIGTERM or SIGINT (Ctrl-C).

    Then nothing new is begun, what runs may end within the grace, and the process goes. A second
    signal ends it at once.
    """
    settings = _settings(**options)
    logs.set_up(log_format, log_level, settings.name or "")
    with _failures_as_log_lines(ctx, log_format):
        if processes > 1:
            ctx.exit(_supervise(ctx.obj, settings, processes, health_port, health_host))
        with _unfit_tables():
            target = find_target(database_url, schema, app, say=log.warning)
            ctx.exit(_work(target, settings, parent, health_port, health_host))


def _settings(
    *,
    queues: str | None,
    concurrency: int,
    no_listen: bool,
    no_prepare: bool,
    name: str | None,
    **others: Any,
) -> WorkerSettings:
    settings = WorkerSettings(
        concurrency=concurrency,
        listen=not no_listen,
        prepare=not no_prepare,
        name=name or f"{socket.gethostname()}:{os.getpid()}",
        **others,
    )
    if queues is None:
        return settings
    slots = {queue: count or concurrency for queue, count in parse_queues(queues).items()}
    return replace(settings, queues=slots)


# ---- one process -------------------------------------------------------------------------------


def _work(
    target: Target,
    settings: WorkerSettings,
    parent: int | None,
    health_port: int | None,
    health_host: str,
) -> int:
    """The exit code of a worker's whole life."""
    worker = Worker(_app(target), settings, database=target.database)
    if health_port is not None:
        HealthServer(health_host, health_port, answers_of(worker.status))
    stopper = Stopper(
        worker.ask_to_stop,
        patience=settings.grace + AFTER_GRACE,
        late_code=Unfinished.exit_code,
        parent=parent,
    )
    with database_failures(target.url):
        _create_missing_tables(target, worker.cyclone)
        has_ended = worker.run()
    code = (SPENT if worker.is_spent else 0) if has_ended else Unfinished.exit_code
    stopper.expect_end(code, AFTER_WORK)
    return code


def _app(target: Target) -> Cyclone:
    if target.app is None:
        raise ConfigurationError(
            "whose jobs? give --app module:attribute, like --app shop.jobs:cyclone, or "
            "[tool.cyclone-sqla] app in pyproject.toml"
        )
    if target.app.schema != target.schema:
        target.app.use_schema(target.schema)
    return target.app


def _create_missing_tables(target: Target, app: Cyclone) -> None:
    """An embedded database needs no set-up, a server's is a person's to change."""
    backend = target.url.get_backend_name()
    if not app.dialect(backend).embedded:
        return
    with migrating(backend, timedelta(seconds=DEFAULT_SETTINGS.lock_timeout)).reading(
        target.database
    ) as connection:
        current = schema_version.read(connection, target.schema)
    if current is None:
        log.info("%s has no tables of cyclone-sqla yet: running cyclone-sqla migrate", target)
        _migrate(target)


def _migrate(target: Target) -> None:
    """In a process of its own, because migrations load what no worker needs."""
    command = [sys.executable, "-m", "cyclone_sqla", "migrate"]
    if target.schema is not None:
        command += ["--schema", target.schema]
    # Not among the arguments, which everybody on this host can read.
    environment = {**os.environ, DATABASE_URL: target.url.render_as_string(hide_password=False)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().removeprefix("Error: ")
        raise Failed(f"the tables could not be created: {reason}")


# ---- several processes -------------------------------------------------------------------------


def _supervise(
    arguments: Sequence[str],
    settings: WorkerSettings,
    count: int,
    health_port: int | None,
    health_host: str,
) -> int:
    """The exit code of a parent's whole life. It loads no application and opens no connection."""
    if settings.single_instance:
        raise ConfigurationError("--single-instance and --processes don't go together")

    def child(number: int, pipe: int) -> list[str]:
        own = ["--processes", "1", "--name", f"{settings.name}-{number}", "--parent", str(pipe)]
        if health_port is not None:
            own += ["--health-port", str(health_port + number), "--health-host", LOOPBACK]
        return [sys.executable, "-m", "cyclone_sqla", "work", *arguments, *own]

    if health_port is not None:
        ports = {f"{settings.name}-{n}": health_port + n for n in range(1, count + 1)}
        HealthServer(health_host, health_port, answers_for(ports))
    processes = Processes(
        child,
        count,
        fatal=(WrongUse.exit_code, Unfit.exit_code),
        patience=settings.grace + AFTER_GRACE + AFTER_WORK,
        renewed=SPENT,
    )
    code = processes.run()
    return Interrupted.exit_code if code is None else code


# ---- failures ----------------------------------------------------------------------------------


@contextmanager
def _unfit_tables() -> Generator[None]:
    try:
        yield
    except SchemaError as exc:
        raise Unfit(str(exc)) from exc


@contextmanager
def _failures_as_log_lines(ctx: click.Context, log_format: logs.LogFormat) -> Generator[None]:
    """Whoever reads objects gets objects to the end."""
    try:
        with one_line_failures():
            yield
    except click.ClickException as exc:
        if log_format != "json":
            raise
        log.critical(exc.format_message())
        ctx.exit(exc.exit_code)
