"""The ``laxity`` command: which subcommands there are, what all of them share, and how they end."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from cli import defragment, events, explain, keys, learned, ledger, nodes, place, release, resize, run, status, up
from cli.demo import command as demo
from cli.output import CommandError, Exit, Output
from cli.simulate import command as simulate
from cli.top import command as top
from shared.errors import BusError, FieldError
from shared.log import configure

COMMANDS = {
    "place": place,
    "resize": resize,
    "defragment": defragment,
    "release": release,
    "run": run,
    "nodes": nodes,
    "events": events,
    "status": status,
    "top": top,
    "explain": explain,
    "learned": learned,
    "ledger": ledger,
    "keys": keys,
    "simulate": simulate,
    "up": up,
    "demo": demo,
}
CODES = """exit codes: 0 done; 1 decided against (rejected, failed, expired, unknown); 2 a mistake in the command line
or in a request; 3 queued or stored, not decided within --wait; 4 no server or service answers"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(Exit.USAGE, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="laxity", description="Place containers with deadlines and see what becomes of them.", epilog=CODES
    )
    shared = _Parser(add_help=False)
    shared.add_argument("--nats-url", help="server; else LAXITY_NATS_URL, a running laxity up, nats://127.0.0.1:4222")
    shared.add_argument("--prefix", default="rt", help="first token of all subjects")
    shared.add_argument("-o", "--output", choices=("table", "json"), default="table")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        sub = commands.add_parser(name, parents=[shared], help=module.HELP, description=module.HELP)
        module.arguments(sub)
        sub.set_defaults(run=module.run)
    return made


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = parser().parse_args(argv)
    output = Output(machine=args.output == "json")
    configure("error", "console")
    try:
        return int(args.run(args, output))
    except CommandError as error:
        output.error(str(error))
        return error.code
    except FieldError as error:
        output.error(str(error))
        return Exit.USAGE
    except BusError as error:
        output.error(str(error))
        return Exit.NO_ANSWER
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has enough
        sys.stderr.close()
        return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
