"""``laxity demo``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from cli.output import Exit, Output

HELP = "place, run, track and judge real tasks on a real bus, in about 45 s"


def arguments(parser: ArgumentParser) -> None:
    del parser


def run(args: Namespace, output: Output) -> Exit:
    del args, output
    return Exit.OK
