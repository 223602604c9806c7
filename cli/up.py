"""``laxity up``: a whole cluster on this machine, in the foreground until TERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from argparse import ArgumentParser, Namespace
from pathlib import Path

from cli.client import default_state_dir
from cli.embedded import Embedded, say_on_stderr
from cli.output import Exit, Output
from cli.programs import Cluster, measured
from services.monitor.slices import UNKNOWN

HELP = "run a cluster on this machine until TERM or Ctrl-C"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=1, help="real nodes: 1 has this machine's cores, 0 has none")
    parser.add_argument("--fake-nodes", type=int, default=3, help="made-up nodes with three devices each")
    parser.add_argument("--placers", type=int, default=2)
    parser.add_argument("--trackers", type=int, default=1)
    parser.add_argument("--node-lists", type=int, default=1)
    parser.add_argument("--cores", type=int, help="how many cores the real node has (all)")
    parser.add_argument("--state-dir", type=Path, help="where everything is kept that outlives it")
    parser.add_argument("--ready-file", type=Path, help="gets the server's address and all pids once all is ready")
    parser.add_argument("--storage", choices=("file", "memory"), default="file", help="of the streams")
    parser.add_argument("--keep", action="store_true", help="leave containers running at the end; the next up has them")
    parser.add_argument("--heartbeat-us", type=int, default=1_000_000, help="period of the monitors")


def run(args: Namespace, output: Output) -> Exit:
    del output
    state_dir = (args.state_dir or default_state_dir()).absolute()
    cluster = Cluster(
        state_dir,
        nodes=args.nodes,
        fake_nodes=args.fake_nodes,
        placers=args.placers,
        trackers=args.trackers,
        node_lists=args.node_lists,
        storage=args.storage,
        cores=args.cores,
        sharing=measured() if args.nodes else UNKNOWN,
        heartbeat_us=args.heartbeat_us,
        prefix=args.prefix,
    )
    ready_files = [state_dir / "ready.json", *([args.ready_file.absolute()] if args.ready_file else [])]
    asyncio.run(_until_stopped(Embedded(cluster, ready_files, say_on_stderr, keep_containers=args.keep)))
    return Exit.OK


async def _until_stopped(embedded: Embedded) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await embedded.run(stop)
