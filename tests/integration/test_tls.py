"""Encrypted connections to a real server, with certificates made for the test."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.bus import Bus
from shared.errors import FieldError
from shared.settings import ServiceSettings
from shared.testing.nats_server import NatsServer

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=30)


def signed(folder: Path, name: str) -> None:
    """A key and a certificate of our authority, good for 127.0.0.1."""
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\nkeyUsage=digitalSignature\n")
    openssl(folder, *EC_KEY, "-out", f"{name}.key")
    openssl(folder, "req", "-new", "-key", f"{name}.key", "-subj", f"/CN={name}", "-out", f"{name}.csr")
    by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san")
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", *by, "-out", f"{name}.pem")
    (folder / f"{name}.key").chmod(0o600)


EC_KEY = ("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    openssl(folder, *EC_KEY, "-out", "ca.key")
    usage = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    openssl(folder, "req", "-x509", "-new", "-key", "ca.key", "-days", "2", "-subj", "/CN=ca", *usage, "-out", "ca.pem")
    signed(folder, "server")
    signed(folder, "client")
    return folder


@pytest.fixture
def encrypted(certificates: Path, tmp_path: Path) -> Iterator[str]:
    """A server that wants certificates of its clients too."""
    given = [f"--tls{what}={certificates / name}" for what, name in (("cert", "server.pem"), ("key", "server.key"))]
    with NatsServer(tmp_path / "nats", *given, "--tlsverify", f"--tlscacert={certificates / 'ca.pem'}") as server:
        yield server.url.replace("nats://", "tls://")


def settings(url: str, certificates: Path, **given: Any) -> ServiceSettings:
    files = {name: certificates / file for name, file in given.items()}
    return ServiceSettings.model_validate({"nats_url": url, **files})


async def connects(wanted: ServiceSettings) -> bool:
    try:
        async with asyncio.timeout(1.5):
            bus = await Bus.connect(wanted)
    except TimeoutError:
        return False
    await bus.connection.round_trip()
    await bus.close()
    return True


OURS = {"nats_ca": "ca.pem", "nats_cert": "client.pem", "nats_key": "client.key"}


async def test_with_the_authority_and_a_certificate_of_our_own_we_connect(encrypted: str, certificates: Path) -> None:
    assert await connects(settings(encrypted, certificates, **OURS))


@pytest.mark.parametrize("given", [{}, {"nats_ca": "ca.pem"}, {"nats_cert": "client.pem", "nats_key": "client.key"}])
async def test_with_less_than_that_we_do_not(encrypted: str, certificates: Path, given: dict[str, str]) -> None:
    assert not await connects(settings(encrypted, certificates, **given))


async def test_a_server_that_does_not_encrypt_is_refused_where_tls_is_asked_for(
    nats_url: str, certificates: Path
) -> None:
    assert not await connects(settings(nats_url.replace("nats://", "tls://"), certificates))
    assert not await connects(settings(nats_url, certificates, nats_ca="ca.pem"))
    assert await connects(settings(nats_url, certificates))


@pytest.mark.parametrize(
    ("given", "blamed"),
    [
        ({"nats_ca": "absent.pem"}, "LAXITY_NATS_CA"),
        ({"nats_ca": "ca.pem", "nats_cert": "client.pem"}, "LAXITY_NATS_KEY"),
        ({"nats_cert": "client.pem", "nats_key": "server.key"}, "LAXITY_NATS_CERT"),
        ({"nats_cert": "client.pem", "nats_key": "absent.key"}, "LAXITY_NATS_KEY"),
    ],
)
async def test_a_file_that_cannot_be_used_is_named(certificates: Path, given: dict[str, str], blamed: str) -> None:
    with pytest.raises(FieldError) as error:
        await Bus.connect(settings("tls://127.0.0.1:1", certificates, **given))
    assert blamed == error.value.field
