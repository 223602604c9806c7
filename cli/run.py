"""``laxity run``: a program that nobody can change, as tasks with deadlines; `python -m laxity run` does the same."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from cli.output import CommandError, Exit, Output

HELP = "run a command as a task with a deadline (needs the SDK)"


def arguments(parser: ArgumentParser) -> None:
    """Those of the SDK's own command. Where it is not installed there are none, and the rest of `laxity` works."""
    try:
        from laxity.__main__ import add_run
    except ImportError:
        return
    add_run(parser)


def run(args: Namespace, _output: Output) -> int:
    try:
        from laxity.__main__ import checked
    except ImportError:
        raise CommandError("laxity-sdk is not installed, which marks the tasks", Exit.USAGE) from None
    try:
        return checked(args)
    except ValueError as error:
        raise CommandError(str(error), Exit.USAGE) from None
