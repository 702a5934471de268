"""Certificates for a test: an authority of its own, and what it signed."""

from __future__ import annotations

import subprocess
from pathlib import Path


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=60)


def _key(path: Path) -> Path:
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)
    return path


class Authority:
    """Signs certificates; `certificate` is what its clients trust."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._key = _key(folder / f"{name}.key")
        self.certificate = folder / f"{name}.pem"
        _openssl(
            *("req", "-x509", "-new", "-key", self._key, "-out", self.certificate, "-days", "2"),
            *("-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )

    def sign(self, name: str, alternatives: str) -> tuple[Path, Path]:
        """Certificate and key for the names, such as "IP:127.0.0.1"."""
        key, request = _key(self.folder / f"{name}.key"), self.folder / f"{name}.csr"
        certificate, more = self.folder / f"{name}.pem", self.folder / f"{name}.ext"
        more.write_text(f"subjectAltName={alternatives}\n")
        _openssl("req", "-new", "-key", key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-CAcreateserial", "-out", certificate, "-days", "2", "-extfile", more),
        )
        return certificate, key
