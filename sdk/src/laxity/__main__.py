"""`python -m laxity run … -- COMMAND` marks programs that nobody can change; `include` says where laxity.h is."""

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import laxity
from laxity.tasks import Task

_UNITS = {"us": 1, "ms": 1_000, "s": 1_000_000}
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def deadline_us(text: str) -> int:
    """`50ms`, `1.5s`, `800us`; ArgumentTypeError for anything else."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)(us|ms|s)", text)
    value = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not 1 <= value <= laxity.MAX_DEADLINE_US:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, allowed: a time such as 50ms, 1.5s or 800us, at most 24 hours"
        )
    return value


def pattern(text: str) -> re.Pattern[bytes]:
    """A regular expression for lines of output."""
    try:
        return re.compile(text.encode())
    except re.error as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed: a regular expression ({error})") from None


def run(args: argparse.Namespace) -> int:
    """The command's exit code, 128 + number for one that a signal ended; signals that end us are handed on.

    Without patterns the whole run is one task, failed where the exit code is not 0. With them a line of its output that
    matches `--begin` begins a task, one that matches `--end` ends the oldest that is open; what is open at last failed.
    """
    name = args.name or Path(args.command[0]).name
    by_lines = args.begin is not None
    open_tasks = [] if by_lines else [laxity.begin(name, deadline_us=args.deadline)]
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    # Before the command starts, or one that comes at once would end us and leave it; an ignored one (nohup) stays so.
    caught = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, hand_on) for number in caught}
    try:
        process = subprocess.Popen(args.command, stdout=subprocess.PIPE if by_lines else None)
    except OSError as error:
        _end(open_tasks, failed=True)
        print(f"laxity: {args.command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    for number in early:
        process.send_signal(number)
    if process.stdout is not None:
        for line in process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            if args.begin.search(line):
                open_tasks.append(laxity.begin(name, deadline_us=args.deadline))
            if args.end.search(line) and open_tasks:
                open_tasks.pop(0).end()
    code = process.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    _end(open_tasks, failed=by_lines or code != 0)
    return code if code >= 0 else 128 - code


def checked(args: argparse.Namespace) -> int:
    """As `run`; ValueError where words do not go together, or there is no deadline."""
    if (args.begin is None) != (args.end is None):
        raise ValueError("--begin and --end go together")
    return run(args)


def _end(tasks: Sequence[Task], *, failed: bool) -> None:
    for task in tasks:
        task.end(failed=failed)


def parser(prog: str = "python -m laxity") -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=prog, description=__doc__)
    words = made.add_subparsers(dest="word", required=True)
    add_run(words.add_parser("run", help="run a command as a task with a deadline"))
    words.add_parser("include", help="print the folder of laxity.h: cc -I$(python -m laxity include) …")
    return made


def add_run(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--deadline", type=deadline_us, help="from begin to end, such as 50ms; LAXITY_DEADLINE_US if absent"
    )
    made.add_argument("--name", help="of the tasks; that of the command if absent")
    made.add_argument("--begin", type=pattern, metavar="REGEX", help="a line of output that begins a task")
    made.add_argument("--end", type=pattern, metavar="REGEX", help="a line of output that ends the oldest one")
    made.add_argument("command", nargs="+", metavar="COMMAND", help="after --, with its arguments")


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    args = made.parse_args(arguments)
    if args.word == "include":
        print(Path(__file__).parent)
        return 0
    try:
        return checked(args)
    except ValueError as error:
        made.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
