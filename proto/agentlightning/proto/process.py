"""How a component's process begins, says that it is ready, and ends.

Every server command keeps the same contract: it locks its state directory, writes a ready file when
it serves, stops gracefully on SIGTERM, and does not outlive the process that started it.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import json
import logging
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from agentlightning.proto.errors import ConfigError, LightningError

__all__ = [
    "die_with_parent",
    "is_loopback",
    "lock_directory",
    "read_ready",
    "read_token",
    "require_token",
    "run_main",
    "setup_logging",
    "stop_event",
    "write_private",
    "write_ready",
]

PARENT_VARIABLE = "AGENTLIGHTNING_PARENT_PID"
LOCK_WAIT = 10.0
"""Seconds to wait for a predecessor that is still shutting down."""


def run_main(command: Callable[[], int]) -> int:
    """Run a command; a user's mistake becomes one sentence on stderr and exit code 2."""
    try:
        return command()
    except LightningError as error:
        print(f"agl: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `agl inspect … | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def setup_logging(component: str, level: str = "info") -> None:
    """One line per event on stderr."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {component} %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


def die_with_parent() -> None:
    """If the process was started by `agl train`, end when that one ends, even by `kill -9`."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the line above
        sys.exit(0)


@contextlib.contextmanager
def lock_directory(path: Path, what: str) -> Iterator[None]:
    """Hold `path` (created if absent) for this process alone. Raises ConfigError if another has it."""
    path.mkdir(parents=True, exist_ok=True)
    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    owner = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
                    raise ConfigError(
                        f"{what} at {path} is in use by process {owner}: stop that one, or choose another directory."
                    ) from None
                time.sleep(0.05)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def write_ready(path: Path | str | None, addresses: Mapping[str, str]) -> None:
    """Say that this process serves, and where. Does nothing if no ready file was asked for."""
    if path is None:
        return
    write_private(Path(path), json.dumps({"pid": os.getpid(), "addresses": dict(addresses)}) + "\n")


def read_ready(path: Path) -> dict[str, str] | None:
    """The addresses in a ready file; None while there is none."""
    try:
        addresses = json.loads(path.read_text())["addresses"]
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return {str(name): str(address) for name, address in addresses.items()}


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_token(path: Path | str) -> str:
    """A bearer token from the first line of a file. Raises ConfigError with what is wrong with it."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"The token file {path} cannot be read: {error.strerror}.") from None
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        raise ConfigError(f"The token file {path} can be read by others: run `chmod 600 {path}`.")
    token = text.strip()
    if not token or "\n" in token:
        raise ConfigError(f"The token file {path} must hold one token on one line.")
    return token


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def require_token(host: str, token_file: object, what: str) -> None:
    """Refuse to serve without a token anywhere but on loopback."""
    if token_file is None and not is_loopback(host):
        raise ConfigError(
            f"{what} would listen on {host} without a token: give --token-file, or listen on 127.0.0.1."
        )


def stop_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, for the running event loop."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event
