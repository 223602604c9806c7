"""What a connection shows the server and asks of it: nkey seed, inbox, certificates; nothing here is ever logged."""

from __future__ import annotations

import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

import nkeys

from shared.errors import FieldError
from shared.settings import ServiceSettings

INBOX = "_INBOX"


@dataclass(frozen=True)
class Credentials:
    """How to open a connection; without anything it is that of an anonymous user."""

    seed_file: str | None = None
    """The client reads it at each connect, so that a rotated key needs no restart."""
    inbox_prefix: str = INBOX
    tls: ssl.SSLContext | None = None


def credentials(settings: ServiceSettings) -> Credentials:
    """Those of ``settings``; raises FieldError naming the setting whose file cannot be used."""
    seed = settings.nats_seed_file
    if seed is not None:
        _check_seed(seed)
    usual = f"{INBOX}.{seed.resolve().stem}" if seed else INBOX  # where a link has a name that all nodes share
    return Credentials(str(seed) if seed else None, settings.nats_inbox_prefix or usual, _tls(settings))


def _check_seed(path: Path) -> None:
    setting = "LAXITY_NATS_SEED_FILE"
    seed = bytearray(_private(path, setting).strip())
    try:
        nkeys.from_seed(seed).wipe()
    except (nkeys.NkeysError, ValueError):
        raise FieldError(setting, str(path), "a file with one nkey seed, as laxity keys makes it") from None


def _private(path: Path, setting: str) -> bytes:
    """The content of a file that only its owner may read."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise FieldError(setting, f"{path} with mode {mode:03o}", "a file that only its owner may read (chmod 600)")
        return path.read_bytes()
    except OSError as error:
        raise FieldError(setting, f"{path}: {error.strerror}", "a file that can be read") from None


def _tls(settings: ServiceSettings) -> ssl.SSLContext | None:
    """None leaves it to the client: no encryption, or the system's authorities with ``tls://``."""
    ca, cert, key = settings.nats_ca, settings.nats_cert, settings.nats_key
    if ca is None and cert is None and key is None:
        return None
    if (cert is None) != (key is None):
        raise FieldError("LAXITY_NATS_KEY", str(key), "given exactly where LAXITY_NATS_CERT is")
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError):
        raise FieldError("LAXITY_NATS_CA", str(ca), "a readable file with certificates in PEM") from None
    if cert is not None and key is not None:
        _private(key, "LAXITY_NATS_KEY")
        try:
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError):
            raise FieldError("LAXITY_NATS_CERT", str(cert), "a certificate in PEM, and its key") from None
    return context
