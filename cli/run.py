"""``laxity run``: a program that nobody can change, as tasks with deadlines; `python -m laxity run` does the same."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from types import ModuleType

from cli.output import CommandError, Exit, Output

HELP = "run a command as a task with a deadline (needs the SDK)"


def arguments(parser: ArgumentParser) -> None:
    """Those of the SDK's own command. Where it is not installed there are none, and the rest of `laxity` works."""
    if sdk := _sdk():
        sdk.add_run(parser)


def run(args: Namespace, _output: Output) -> int:
    sdk = _sdk()
    if sdk is None:
        raise CommandError("laxity-sdk is not installed, which marks the tasks", Exit.USAGE)
    try:
        return int(sdk.checked(args))
    except ValueError as error:
        raise CommandError(str(error), Exit.USAGE) from None


def _sdk() -> ModuleType | None:
    try:
        from laxity import __main__ as sdk
    except ImportError:
        return None
    return sdk
