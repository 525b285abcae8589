"""A PostgreSQL server of the test session's own, from Debian's packages, reached by a Unix socket only.

Use as `with serving(folder) as server: server.create("name")`, which gives the URL of a new, empty database.
"""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Server", "serving"]

ACCOUNT = "postgres"
"""The server refuses to run as root; Debian's package brings this user."""


class Server:
    """A running server."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder = folder
        self._binaries = binaries

    def create(self, name: str) -> str:
        """The URL of a new database."""
        command = [str(self._binaries / "createdb"), "-h", str(self.folder), "-U", ACCOUNT, name]
        subprocess.run(command, check=True, capture_output=True)
        return f"postgresql://{ACCOUNT}@/{name}?host={self.folder}"


@contextlib.contextmanager
def serving(*, durable: bool = False) -> Iterator[Server]:
    """Start a server; it is gone, with its data, when the block ends. `durable`: commits are synced to disk."""
    binaries = find_binaries()
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # short: a socket's path has at most 107 characters
    data = folder / "data"
    prefix: list[str] = []
    if os.geteuid() == 0:
        account = pwd.getpwnam(ACCOUNT)
        os.chown(folder, account.pw_uid, account.pw_gid)
        prefix = ["runuser", "-u", ACCOUNT, "--"]
    try:
        initdb = [
            str(binaries / "initdb"),
            "-D",
            str(data),
            "-U",
            ACCOUNT,
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        ]
        _run([*prefix, *initdb])
        settings = {
            "listen_addresses": "''",
            "unix_socket_directories": str(folder),
            "max_connections": "200",
        }
        if not durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        control = [*prefix, str(binaries / "pg_ctl"), "-D", str(data), "-w", "-s"]
        _run([*control, "-l", str(folder / "log"), "-o", options, "start"])
        try:
            yield Server(folder, binaries)
        finally:
            _run([*control, "-m", "immediate", "stop"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_binaries() -> Path:
    """Where the server's programs are; installs Debian's package if it may. Raises RuntimeError with what to do."""
    if (found := _found()) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "postgresql"]
        for command in (["apt-get", "update", "-q"], install):
            subprocess.run(command, env=environment, check=False, capture_output=True)
        found = _found()
    if found is None:
        raise RuntimeError("These tests need PostgreSQL's server: run `apt-get install postgresql` as root.")
    return found


def _found() -> Path | None:
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    return versions[-1].parent if versions else None


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}")
