"""Whatever is written on a command line: it ends with a code and a line of ours."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cyclone_sqla import ConfigurationError, CycloneError, WorkerSettings
from cyclone_sqla.cli import main
from cyclone_sqla.clock import DatabaseClock
from cyclone_sqla.failures import Failure
from cyclone_sqla.outcomes import Discarded
from cyclone_sqla.schema_version import check_schema
from tests.databases import Database
from tests.fuzz.nasty import EXAMPLES, LEAVES, PLAIN, TEXTS, broken, examples, mostly
from tests.life.hands import Hands

pytestmark = pytest.mark.timeout(120 + 2 * EXAMPLES)

ON_THE_QUEUE = ("jobs", "queues", "sequences", "stats", "doctor")

LONG_LIVED = ("work", "demo")
"""Commands of which only the command line is read here."""


def commands(*names: str) -> list[tuple[tuple[str, ...], click.Command]]:
    """The commands below these, with the words that call them."""
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name in names:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        group = command.commands if isinstance(command, click.Group) else {}
        found += [((name, sub), each) for sub, each in group.items()] or [((name,), command)]
    return found


SENSIBLE = st.one_of(PLAIN, st.integers(0, 12).map(str), st.just("line"), st.just("60s"))


@st.composite
def lines(draw: st.DrawFn, among: list[tuple[tuple[str, ...], click.Command]]) -> list[str]:
    """A command with some of its options and arguments."""
    words, command = draw(st.sampled_from(among))
    drawn = [draw(_words_of(p)) for p in command.params if draw(_chance_of(p))]
    return [*words, *(word for some in drawn for word in some)]


def _chance_of(parameter: click.Parameter) -> st.SearchStrategy[bool]:
    is_rare = parameter.name in ("database_url", "schema", "app", "help")
    return st.sampled_from([False] * (15 if is_rare else 2) + [True])


def _words_of(parameter: click.Parameter) -> st.SearchStrategy[list[str]]:
    values = st.one_of(TEXTS, SENSIBLE)
    if isinstance(parameter.type, click.Choice):
        values = st.one_of(st.sampled_from(list(parameter.type.choices)), values)
    if isinstance(parameter, click.Argument):
        return st.lists(values, max_size=2)
    assert isinstance(parameter, click.Option)
    if parameter.is_flag:
        return st.just([parameter.opts[0]])
    return values.map(lambda value: [parameter.opts[0], value])


@pytest.fixture
def queue(
    database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hands]:
    """One with jobs that nobody would like to see in a terminal."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setenv("CYCLONE_DATABASE_URL", database.url)
    with closing(Hands(database, DatabaseClock())) as hands:
        nasty = "\x1b[31m\x9b2J\u202e[bold]\r\n%s"
        failed = Discarded(Failure.because(nasty, kind=nasty))
        stranger = hands.enqueue(headers={nasty: nasty}, unique=nasty, process_in=60)
        hands.change(stranger, kind=nasty, queue=nasty, tenant=nasty, trace_id=nasty, origin=nasty)
        hands.enqueue(sequence=nasty, on_failure="halt")
        hands.admit()
        hands.settle_all([(job, failed) for job in hands.claim()])
        hands.enqueue(sequence=nasty)
        hands.enqueue(sequence="line", on_failure="halt")
        hands.act("pause_queue", "default", by=nasty)
        hands.act("pause_sequence", nasty, by=nasty)
        yield hands


@pytest.mark.usefixtures("queue")
def test_a_command_ends_with_a_code_and_tells_nothing_that_a_terminal_obeys() -> None:
    @examples(25)
    @given(words=lines(commands(*ON_THE_QUEUE)))
    def call(words: list[str]) -> None:
        result = CliRunner().invoke(main, words, color=True)
        assert result.exit_code in (0, 1, 2), result.exception
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "Traceback" not in result.output
        assert result.output.replace("\n", "").isprintable(), ascii(result.output)

    call()


def test_the_command_line_of_a_process_is_read_or_refused() -> None:
    @examples(40)
    @given(words=lines(commands(*LONG_LIVED)))
    def read(words: list[str]) -> None:
        name, *rest = words
        command = main.get_command(click.Context(main), name)
        assert command is not None
        try:
            command.make_context(name, rest)
        except (click.exceptions.Exit, click.UsageError, ConfigurationError):
            return

    read()


def test_a_setting_is_taken_or_refused() -> None:
    names = [field.name for field in fields(WorkerSettings)]
    values = st.one_of(LEAVES, st.dictionaries(TEXTS, LEAVES, max_size=2))

    @examples(40)
    @given(given_=st.dictionaries(st.sampled_from(names), values, max_size=4))
    def make(given_: dict[str, Any]) -> None:
        try:
            with broken():
                WorkerSettings(**given_)
        except ConfigurationError:
            return

    make()


def test_a_name_of_a_schema_is_taken_or_refused() -> None:
    @examples(40)
    @given(name=mostly(TEXTS))
    def check(name: Any) -> None:
        try:
            check_schema(name)
        except CycloneError:
            return

    check()
