"""Certificates for tests, made by openssl: an authority, and certificates that it signs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


class Authority:
    """Signs certificates, in `directory`."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl to make certificates")
        directory.mkdir()
        self._directory = directory
        self.certificate = directory / "ca.pem"
        self._key = directory / "ca.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-keyout", self._key, "-out", self.certificate, "-days", "2"),
            *("-subj", "/CN=test authority"),
            # Without it and the identifier below, Python 3.13 refuses what the authority signed.
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )

    def sign(self, name: str, *, days: int = 2, address: str = "127.0.0.1") -> tuple[Path, Path]:
        """A certificate for an address, and its key. It has expired if `days` is negative."""
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        request = self._directory / f"{name}.csr"
        extensions = self._directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName=IP:{address}\nauthorityKeyIdentifier=keyid\n")
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", key, "-out", request, "-subj", f"/CN={name}"),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-CAcreateserial", "-out", certificate, "-days", str(days)),
            *("-extfile", extensions),
        )
        key.chmod(0o600)
        return certificate, key


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
