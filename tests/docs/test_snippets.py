"""Everything that the pages show is run, or compared with what it speaks of."""

import re
import shlex
from pathlib import Path

import click
import pytest

from cyclone_sqla import explanations, lifecycle
from cyclone_sqla.cli import main

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "snippets"}
    for number, block in enumerate(blocks(page, "python")):
        code = compile(block, f"{name(page)}, block {number}", "exec", dont_inherit=True)
        exec(code, namespace)
    if engine := namespace.get("engine"):
        engine.dispose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "sh")], ids=name)
def test_the_commands_of_a_page_exist_with_their_options(page: Path) -> None:
    lines = [line for block in blocks(page, "sh") for line in block.splitlines() if line]
    commands = [shlex.split(line) for line in lines if line.startswith("cyclone-sqla")]
    for _, *words in commands:
        known = options_of(words)
        given = {word for word in words if word.startswith("-")}
        assert given <= known, f"{shlex.join(words)}: there is no {given - known}"


def options_of(words: list[str]) -> set[str]:
    """The options of the command that a line calls, which may be one of a group."""
    command: click.Command | None = main
    for word in words:
        if not isinstance(command, click.Group):
            break
        command = command.get_command(click.Context(command), word)
        assert command is not None, f"there is no command {word}"
    assert not isinstance(command, click.Group), f"{words} ends at a group"
    assert command is not None
    return {option for parameter in command.params for option in parameter.opts}


def test_the_table_of_reasons_has_the_code_of_every_reason() -> None:
    page = (DOCS / "reference" / "reasons.md").read_text()
    documented = set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE))
    source = Path(explanations.__file__).read_text()
    fixed = set(re.findall(r'^        return "([\w-]+)"$', source, re.MULTILINE))
    ends = {str(state) for state in lifecycle.TERMINAL}
    pauses = {f"{what}-paused" for what in ("job", "queue", "sequence")}
    assert documented == fixed | ends | pauses


def test_the_table_of_transitions_is_the_one_that_the_statements_are_built_from() -> None:
    page = (DOCS / "reference" / "states.md").read_text()
    rows = re.findall(r"^\| (?!verb|---)(.*) \|$", page, re.MULTILINE)
    assert [tuple(row.split(" | ")) for row in rows] == [
        (
            transition.verb,
            ", ".join(transition.sources),
            transition.target + (f" ({transition.waits_for})" if transition.waits_for else ""),
            transition.meaning,
        )
        for transition in lifecycle.TRANSITIONS
    ]


def test_every_page_can_be_reached_from_the_first() -> None:
    index = (DOCS / "index.md").read_text()
    listed = set(re.findall(r"^([\w/-]+)$", index, re.MULTILINE))
    assert {name(page).removesuffix(".md") for page in PAGES} - {"index"} <= listed
