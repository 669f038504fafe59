"""Everything that the pages show is run, or compared with what it speaks of."""

import re
import shlex
from pathlib import Path

import click
import pytest

from cyclone_sqla import lifecycle
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
    for _, command, *arguments in commands:
        known = options_of(command)
        given = {argument for argument in arguments if argument.startswith("-")}
        assert given <= known, f"{command} has no {given - known}"


def options_of(command: str) -> set[str]:
    context = click.Context(main)
    found = main.get_command(context, command)
    assert found is not None, f"there is no command {command}"
    return {option for parameter in found.params for option in parameter.opts}


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
