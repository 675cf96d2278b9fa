"""Emulators of Google Cloud Storage and of Azure's blobs, for tests of tables there.

    gs      fake-gcs-server, built once by `go install` into the directory of `tests.kit.s3`. It lacks what deltalake
            needs: a PUT with a condition, and listings that start after a name
    abfs    Azurite, installed once by `npm install` into the same directory

A test that asks for one is skipped, with the reason, where there is no Go, or no npm.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from pyarrow import fs

from tests.kit.commands import accepts, free_port
from tests.kit.s3 import build_go_program, cache_directory
from tests.kit.waiting import eventually

BUCKET: Final = "tidelog-tests"
# The account of Azurite, which everybody knows.
ACCOUNT: Final = "devstoreaccount1"
ACCOUNT_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_GOOGLE: Final = "github.com/fsouza/fake-gcs-server@latest"
_AZURITE: Final = "azurite@3"
_INSTALL_S: Final = 900


class Emulator(NamedTuple):
    """A running store with an empty bucket."""

    scheme: str  # of addresses in it
    options: dict[str, str]  # storage options of tables in it
    store: fs.FileSystem  # as another program reaches it

    def address(self, name: str) -> str:
        return f"{self.scheme}://{BUCKET}/{name}"


@contextmanager
def run_emulator(scheme: str, directory: Path) -> Iterator[Emulator]:
    """Run the emulator for gs or abfs with its files in a directory."""
    port = free_port()
    command = _google_command(directory, port) if scheme == "gs" else _azure_command(directory, port)
    with open(directory / "store.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        eventually(lambda: accepts(port), 60, process=process, why=lambda: (directory / "store.log").read_text())
        made = _google(port) if scheme == "gs" else _azure(port)
        made.store.create_dir(BUCKET)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://127.0.0.1:{port}")
            yield made
    finally:
        process.kill()
        process.wait()


def _google_command(directory: Path, port: int) -> list[str]:
    binary = build_go_program(_GOOGLE, "fake-gcs-server")
    if binary is None:
        pytest.skip("tables in Google's store need Go, to build fake-gcs-server")
    address = f"127.0.0.1:{port}"
    at = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", address]
    return [str(binary), *at, "-external-url", f"http://{address}", "-backend", "memory", "-data", str(directory)]


def _google(port: int) -> Emulator:
    store = fs.GcsFileSystem(anonymous=True, endpoint_override=f"127.0.0.1:{port}", scheme="http", project_id="tests")
    options = {"GOOGLE_BASE_URL": f"http://127.0.0.1:{port}", "GOOGLE_SKIP_SIGNATURE": "true"}
    return Emulator("gs", options, store)


def _azure_command(directory: Path, port: int) -> list[str]:
    program = _install_azurite()
    if program is None:
        pytest.skip("tables in Azure's store need npm, to install Azurite")
    at = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(directory)]
    return [str(program), *at, "--skipApiVersionCheck", "--disableTelemetry", "--silent"]


def _install_azurite() -> Path | None:
    place = cache_directory() / "azurite"
    target = place / "node_modules" / ".bin" / "azurite-blob"
    if target.exists():
        return target
    if (npm := shutil.which("npm")) is None:
        return None
    place.mkdir(parents=True, exist_ok=True)
    with open(cache_directory() / "azurite.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            command = [npm, "install", "--prefix", str(place), "--no-save", "--omit=dev", _AZURITE]
            subprocess.run(command, check=True, capture_output=True, timeout=_INSTALL_S)
    return target


def _azure(port: int) -> Emulator:
    address = f"127.0.0.1:{port}"
    store = fs.AzureFileSystem(
        account_name=ACCOUNT,
        account_key=ACCOUNT_KEY,
        blob_storage_authority=address,
        dfs_storage_authority=address,
        blob_storage_scheme="http",
        dfs_storage_scheme="http",
    )
    options = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        "AZURE_STORAGE_USE_EMULATOR": "true",
    }
    return Emulator("abfs", options, store)
