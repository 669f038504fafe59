"""Every check of the project, each in an environment of its own: `python -m nox -s tests`."""

import json
import os
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["tests", "lint", "types", "layers"]

_PROJECT = nox.project.load_toml("pyproject.toml")


def _group(name: str) -> list[str]:
    return list(nox.project.dependency_groups(_PROJECT, name))


_OF_SQLALCHEMY = [
    "tests/binding",
    *(f"tests/life/test_{name}.py" for name in ("contract", "enqueue", "enqueue_many", "port")),
    "tests/life/test_unique.py",
    "tests/migrations/test_schema.py",
    "tests/worker/test_unit_of_work.py",
]
_PROCESSES = max(3, os.cpu_count() or 1)  # on two cores three: many tests wait for a worker


@nox.session
@nox.parametrize("sqlalchemy", ["2.0.36", "2.1.0"], ids=["sqlalchemy-2.0", "sqlalchemy-2.1"])
def tests(session: nox.Session, sqlalchemy: str) -> None:
    """The tests, on both releases of SQLAlchemy; on the older one those that meet it, if quick."""
    session.install("-e", ".[test]", f"sqlalchemy~={sqlalchemy}")
    selection = ["-m", "not slow and not soak", *_OF_SQLALCHEMY] if sqlalchemy == "2.0.36" else []
    options = ["-n", str(_PROCESSES), "--dist", "worksteal", *selection]
    # The names of tests with sets in them have to be the same in every process.
    environment = {"PYTHONHASHSEED": "0"}
    session.run("python", "-m", "pytest", *options, *session.posargs, env=environment)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting."""
    session.install(*_group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """The types of the package, and what users' code sees of them, under mypy and pyright."""
    session.install("-e", ".[test]", *_group("types"))
    session.run("mypy")
    session.run("pyright", "--pythonpath", f"{session.bin}/python")


@nox.session
def layers(session: nox.Session) -> None:
    """Every module imports only what lies below it."""
    session.install("-e", ".", *_group("layers"))
    session.run("lint-imports")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation; a warning is an error."""
    session.install("-e", ".[async,binary]", *_group("docs"))
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")


@nox.session
def soak(session: nox.Session) -> None:
    """The crash tests at full size; with `-- --minutes 10`, faults at random for so long."""
    session.install("-e", ".[test]")
    at_random = any(argument.startswith("--minutes") for argument in session.posargs)
    tool = ["tests.soak"] if at_random else ["pytest", "-m", "soak"]
    session.run("python", "-m", *tool, *session.posargs)


@nox.session
def audit(session: nox.Session) -> None:
    """Known vulnerabilities of what the package installs. It asks a service: CI doesn't run it."""
    session.install(".[async,binary]")
    freeze = ("python", "-m", "pip", "freeze", "--exclude", "cyclone-sqla")
    wanted, report = (
        Path(session.create_tmp()) / name for name in ("installed.txt", "report.json")
    )
    wanted.write_text(str(session.run(*freeze, silent=True)))
    report.unlink(missing_ok=True)
    session.install(*_group("audit"))
    options = ["--no-deps", "--disable-pip", "--progress-spinner=off", "--format=json"]
    given = [f"--requirement={wanted}", f"--output={report}"]
    session.run("pip-audit", *options, *given, success_codes=[0, 1])
    if not report.exists():
        session.error("nothing was audited: the source of advisories can't be reached")
    audited = json.loads(report.read_text())["dependencies"]
    if found := [package for package in audited if package.get("vulns")]:
        session.error(f"vulnerable: {json.dumps(found, indent=1)}")
    session.log(f"{len(audited)} packages, no known vulnerability")


@nox.session
def benchmarks(session: nox.Session) -> None:
    """The measurements, `bench_*.py`; they are no part of the tests."""
    _measure(session, "bench_*.py")


@nox.session
def scale(session: nox.Session) -> None:
    """One, two, four and eight worker processes against one server."""
    _measure(session, "scale_*.py")


def _measure(session: nox.Session, files: str) -> None:
    session.install("-e", ".[test]")
    options = ["-o", f"python_files={files}", "-o", "timeout=0", "-s"]
    session.run("python", "-m", "pytest", *options, "tests/benchmarks", *session.posargs)
