"""A worker as a process that can be killed, with actions that end badly."""

import logging
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from cyclone_sqla import Context, Cyclone, Worker
from tests.crashes import bank

MEGABYTE = 2**20

ROOM = 256 * MEGABYTE
"""Bytes that a process with a limit may have on top of what it has."""


def work(url: str, directory: Path, output: Path, settings: dict[str, Any]) -> None:
    """Work until this process is killed; what is logged goes to `output`."""
    with output.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    logging.basicConfig(level=logging.WARNING, stream=sys.__stderr__, force=True)
    Worker(application(url, directory), **settings).run()


def application(url: str, directory: Path) -> Cyclone:
    """Actions that tell by files in `directory` which attempt runs, and ask there to go on."""
    cyclone = Cyclone(url, hints=False)

    @cyclone.action(backoff=0.5)
    def die(ctx: Context) -> None:
        (directory / f"die.{ctx.attempt}").touch()
        os._exit(137)

    @cyclone.action
    def hold(ctx: Context) -> str:
        (directory / f"hold.{ctx.attempt}").touch()
        while not (directory / f"hold.{ctx.attempt}.go").exists():
            time.sleep(0.01)
        return f"attempt {ctx.attempt}"

    @cyclone.action(backoff=0.1)
    def devour(ctx: Context) -> None:
        if ctx.attempt == 1:
            limit_memory(psutil.Process().memory_info().vms + ROOM)
            devoured = [bytearray(MEGABYTE) for _ in range(2 * ROOM // MEGABYTE)]
            devoured.clear()

    @cyclone.action(backoff=0.2)
    def brief() -> None:
        time.sleep(0.02)

    bank.register(cyclone, sa.create_engine(url))

    return cyclone


def limit_memory(size: int) -> None:
    """Let this process have so many bytes at most, from now on."""
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
