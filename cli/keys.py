"""``laxity keys``: a folder with one nkey seed per user, and the server configuration that says what each may do."""

from __future__ import annotations

import os
import secrets
import stat
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import nkeys

from cli.keys_kubernetes import manifests
from cli.output import CommandError, Exit, Output, table
from cli.permissions import Rules, User, configuration
from shared.subjects import decode

HELP = "make the keys of all users and the permissions that the server enforces"
SEED = ".nk"
CONFIGURATION = "authorization.conf"
PASSWORD = "cluster.password"  # noqa: S105 -- the name of its file
"""What servers of a NATS cluster in Kubernetes know each other by."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where seeds and authorization.conf are kept; made if absent")
    parser.add_argument("--node", action="append", default=[], metavar="NAME", help="a node, for its monitor's key")
    parser.add_argument("--client", action="append", default=[], metavar="NAME", help="one more client of its own")
    parser.add_argument("--rotate", action="append", default=[], metavar="USER", help="give this user a new key")
    parser.add_argument("--kubernetes", type=Path, metavar="FILE", help="write them as Secrets too, for kubectl apply")


def run(args: Namespace, output: Output) -> Exit:
    made = make(args.folder, Rules(args.prefix), args.node, args.client, args.rotate)
    if args.kubernetes is not None:
        _write(args.kubernetes, _manifests(args.folder, [user for user, _ in made]), 0o600)
    rows = [(user.name, user.account, "new" if new else "kept", seed_file(args.folder, user)) for user, new in made]
    body = {"folder": str(args.folder), "users": [{"name": user.name, "new": new} for user, new in made]}
    output.result(body, lambda console: console.print(table("", ("user", "account", "key", "seed file"), rows)))
    output.note(f"include {args.folder / CONFIGURATION} in nats-server.conf and reload the server")
    return Exit.OK


def make(
    folder: Path, rules: Rules, nodes: Sequence[str], clients: Sequence[str], rotate: Sequence[str] = ()
) -> list[tuple[User, bool]]:
    """Add what is missing, keep what is there, renew what ``rotate`` names; each user and whether its key is new.

    Nodes and clients of earlier calls stay users as long as their seed file is there. Raises CommandError, FieldError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    nodes, clients = _known(folder, "monitor-", nodes), _known(folder, "client-", clients)
    users = rules.users(nodes, clients)
    if unknown := set(rotate) - {user.name for user in users}:
        names = ", ".join(user.name for user in users)
        raise CommandError(f"no such user: {', '.join(sorted(unknown))}; there are {names}", Exit.USAGE)
    made = [(user, _has_new_seed(seed_file(folder, user), user.name in rotate)) for user in users]
    public = {user.name: public_key(seed_file(folder, user)) for user in users}
    _write(folder / CONFIGURATION, configuration(rules, users, public), 0o644)
    return made


def _known(folder: Path, kind: str, given: Sequence[str]) -> list[str]:
    """The names of one kind of user: those given, and those that have a seed already."""
    tokens = [path.name.removeprefix(kind).removesuffix(SEED) for path in sorted(folder.glob(f"{kind}*{SEED}"))]
    return list(dict.fromkeys([*map(decode, tokens), *given]))


def _manifests(folder: Path, users: Sequence[User]) -> str:
    seeds = {user.name: seed_file(folder, user).read_text(encoding="ascii") for user in users}
    password = folder / PASSWORD
    if not password.exists():
        _write(password, secrets.token_hex(16), 0o600)
    authorization = (folder / CONFIGURATION).read_text(encoding="ascii")
    return manifests(users, seeds, authorization, password.read_text(encoding="ascii"))


def seed_file(folder: Path, user: User) -> Path:
    return folder / f"{user.name}{SEED}"


def public_key(path: Path) -> str:
    """The public half of a seed; raises CommandError where the file holds none."""
    try:
        return str(nkeys.from_seed(bytearray(path.read_bytes().strip())).public_key.decode())
    except (nkeys.NkeysError, ValueError, OSError):
        raise CommandError(f"{path} holds no seed: remove it to get a new key", Exit.USAGE) from None


def _has_new_seed(path: Path, renew: bool) -> bool:
    """Make a seed where there is none or ``renew`` says so; a file that others may read is an error."""
    if path.exists() and not renew:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise CommandError(f"{path} can be read by others: chmod 600 it, or rotate the key", Exit.USAGE)
        return False
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    _write(path, seed.decode() + "\n", 0o600)
    return True


def _write(path: Path, text: str, mode: int) -> None:
    """Whole or not at all, and never for a moment with a wider mode than asked."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.touch(mode, exist_ok=False)
    beside.write_text(text, encoding="ascii")
    beside.replace(path)
