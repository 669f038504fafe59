"""ARCHITECTURE.md speaks of the package as it is."""

import re
from importlib import import_module
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]

PACKAGE = CHECKOUT / "cyclone_sqla"

TEXT = (CHECKOUT / "ARCHITECTURE.md").read_text()

NAMED = re.findall(r"`([^`\s]+)`", TEXT)

FUNCTIONS = [name.removesuffix("()") for name in NAMED if name.endswith("()")]


def test_every_path_that_it_names_exists() -> None:
    paths = [name for name in NAMED if name.endswith((".py", "/", ".toml")) or "/" in name]
    assert len(paths) > 30
    missing = [p for p in paths if not (PACKAGE / p).exists() and not (CHECKOUT / p).exists()]
    assert missing == []


def test_every_module_of_the_package_is_named() -> None:
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    packages = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert (modules | packages) - set(NAMED) == set()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_that_it_names_exists(name: str) -> None:
    assert callable(_found(f"cyclone_sqla.{name}"))


def _found(dotted: str) -> object:
    """What a name like `package.module.Class.method` stands for."""
    parts = dotted.split(".")
    is_class = [part[0].isupper() for part in parts]
    end = is_class.index(True) if any(is_class) else len(parts) - 1
    found: object = import_module(".".join(parts[:end]))
    for part in parts[end:]:
        found = getattr(found, part)
    return found


def test_it_is_one_page() -> None:
    assert len(TEXT.splitlines()) <= 70
