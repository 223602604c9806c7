"""``laxity run``: a program that nobody can change, as tasks with deadlines; `python -m laxity run` does the same."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from cli.output import CommandError, Exit, Output
from laxity import __main__ as marked

HELP = "run a command as a task with a deadline"


def arguments(parser: ArgumentParser) -> None:
    marked.add_run(parser)


def run(args: Namespace, _output: Output) -> int:
    try:
        return marked.checked(args)
    except ValueError as error:
        raise CommandError(str(error), Exit.USAGE) from None
