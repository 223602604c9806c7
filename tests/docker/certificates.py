"""Certificates as Docker's own tools have them, made by openssl: folders with ca.pem, cert.pem and key.pem."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_KEY = ("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
_CA = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign")


class Authority:
    """Signs for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("certificates are made with openssl")
        self.folder = folder
        folder.mkdir()
        self._openssl(*_KEY, "-out", "ca.key")
        self._openssl("req", "-x509", "-new", "-key", "ca.key", "-days", "2", "-subj", "/CN=ca", *_CA, "-out", "ca.pem")
        (folder / "san").write_text(
            "subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\nkeyUsage=digitalSignature\n"
        )

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True, timeout=30)

    def signed(self, name: str) -> Path:
        """A folder with a key, its certificate, and the authority."""
        made = self.folder / name
        made.mkdir()
        self._openssl(*_KEY, "-out", f"{name}/key.pem")
        self._openssl("req", "-new", "-key", f"{name}/key.pem", "-subj", f"/CN={name}", "-out", f"{name}.csr")
        by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san")
        self._openssl("x509", "-req", "-in", f"{name}.csr", *by, "-out", f"{name}/cert.pem")
        (made / "key.pem").chmod(0o600)
        shutil.copy(self.folder / "ca.pem", made / "ca.pem")
        return made
