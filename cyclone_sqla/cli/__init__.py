"""The command line: `cyclone-sqla`, or `python -m cyclone_sqla`.

A command is imported when it is called, so that `work` never loads what only the others need.
"""

from __future__ import annotations

from importlib import import_module

import click

from cyclone_sqla.cli.failures import one_line_failures

COMMANDS = ("migrate", "work", "demo", "jobs", "queues", "sequences", "stats", "doctor")
"""The commands, in the order of the help. Each is `command` in the module of its name."""


class Commands(click.Group):
    """Finds a command when it is called, and lets its errors end the process with one line."""

    def invoke(self, ctx: click.Context) -> object:
        with one_line_failures():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"cyclone_sqla.cli.{cmd_name}").command
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cyclone-sqla")
def main() -> None:
    """A durable, ordered, transactional job queue inside your own SQLAlchemy database."""
