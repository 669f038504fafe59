"""What holds for every file of the repository, for ever."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]

_OF_ONE_MACHINE = re.compile(
    r"""
      (?<![\w.])/(?:home|Users|root|work)/\w     # somebody's home
    | (?<![\w.])/tmp/\w+/                        # somebody's scratch directory
    | \bpypi\.org | \bpythonhosted\.org | \bregistry\.npmjs\.org
    | --(?:extra-)?index-url | --find[-]links
    """,
    re.VERBOSE,
)
_UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
_CATCH_ALLS = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


@cache
def _tracked_files() -> list[Path]:
    # A checkout that belongs to somebody else is none of git's business here.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listing = subprocess.run(command, cwd=_CHECKOUT, check=True, capture_output=True, text=True)
    paths = (_CHECKOUT / name for name in listing.stdout.rstrip("\0").split("\0"))
    return [path for path in paths if path.is_file()]


def _python_files(folder: str) -> list[Path]:
    inside = (path for path in _tracked_files() if path.is_relative_to(_CHECKOUT / folder))
    return [path for path in inside if path.suffix == ".py"]


def _defines_tests(path: Path) -> bool:
    nodes = ast.parse(path.read_text()).body
    names = (getattr(node, "name", "") for node in nodes)
    return any(name.startswith(("test_", "Test")) for name in names)


def test_a_helper_lives_beside_its_caller() -> None:
    assert [path for path in _tracked_files() if path.name in _CATCH_ALLS] == []


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    strangers = {
        str(path.relative_to(_CHECKOUT)): found.group()
        for path in _tracked_files()
        if (found := _OF_ONE_MACHINE.search(path.read_text(errors="replace")))
    }
    assert strangers == {}


def test_nothing_is_unpickled_and_no_text_becomes_code() -> None:
    """What is in the database is data, whoever wrote it."""
    found: list[str] = []
    for path in _python_files("cyclone_sqla"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    found += [f"{path.name}: {name.name}" for name in names if name.name in _UNSAFE]
                case ast.ImportFrom(module=str(module)) if module in _UNSAFE:
                    found.append(f"{path.name}: {module}")
                case ast.Call(func=ast.Name(id="eval" | "exec" | "compile" as name)):
                    found.append(f"{path.name}: {name}()")
    assert found == []


def test_every_test_is_collected() -> None:
    modules = [
        path
        for path in _python_files("tests")
        if not path.name.startswith(("test_", "bench_", "scale_"))
    ]
    assert [path for path in modules if _defines_tests(path)] == []


def test_the_folder_of_the_migrations_never_hides_the_installed_alembic() -> None:
    # Python prefers a package with an __init__.py, wherever it is on the path, to a folder without.
    assert not (_CHECKOUT / "alembic" / "__init__.py").exists()
    question = "import alembic.config; print(alembic.config.__file__)"
    answer = subprocess.run(
        [sys.executable, "-c", question], cwd=_CHECKOUT, check=True, capture_output=True, text=True
    )
    assert not Path(answer.stdout.strip()).is_relative_to(_CHECKOUT / "alembic")
