"""Other systems to measure against, each in a virtual environment of its own.

    python benchmarks/peers.py            # make all of them (some gigabytes), or: python benchmarks/peers.py rotel mlflow

They live under ~/.cache/agentlightning/peers, or where AGENTLIGHTNING_PEERS says, and are made when a benchmark first
asks. Versions are pinned, so that a figure can be taken again. Nothing of ours depends on them.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PEERS", "Peer", "environment"]


@dataclass(frozen=True)
class Peer:
    """What to install, and into which Python; None is the one that runs the benchmark."""

    requirements: Sequence[str]
    python: str | None = None
    beside: bool = False
    """Whether it sees what that Python has installed: torch, which would be gigabytes again."""


PEERS = {
    "rotel": Peer(["rotel==0.0.1a15"]),
    "agentlightning-0.3": Peer(["agentlightning==0.3.0"]),
    "agentlightning-1.0": Peer(["agentlightning==1.0.2"], python="3.12"),
    "litellm": Peer(["litellm[proxy]==1.108.7"]),
    "mlflow": Peer(["mlflow==3.17.2"]),
    "trl": Peer(["trl==1.16.0", "datasets==5.2.0"], beside=True),
    "phoenix": Peer(["arize-phoenix==20.26.1"]),
}


def environment(name: str) -> Path | None:
    """The folder of a peer's environment, made now if need be.

    None, with a line on stderr that says why, where this machine cannot make it: a figure is then left out, never
    guessed.
    """
    home = os.environ.get("AGENTLIGHTNING_PEERS") or "~/.cache/agentlightning/peers"
    folder, peer = Path(home).expanduser() / name, PEERS[name]
    done = folder / "installed.txt"
    wanted = "\n".join(peer.requirements) + "\n"
    if done.exists() and done.read_text() == wanted:
        return folder
    if (base := _interpreter(peer.python)) is None:
        print(f"peer {name}: left out, it needs Python {peer.python}, which is not here", file=sys.stderr)
        return None
    print(
        f"peer {name}: installing {', '.join(peer.requirements)} into {folder}", file=sys.stderr, flush=True
    )
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    if peer.beside:
        site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        (Path(site) / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *peer.requirements]
    if (failed := subprocess.run(pip, check=False).returncode) != 0:
        print(f"peer {name}: left out, pip ended with {failed}", file=sys.stderr)
        return None
    done.write_text(wanted)
    return folder


def _interpreter(version: str | None) -> str | None:
    if version is None:
        return sys.executable
    managed = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}*/bin/python"))
    candidates = [str(path) for path in managed] + [f"python{version}"]
    for candidate in candidates:
        if (found := shutil.which(candidate)) and not subprocess.run(
            [found, "-c", ""], check=False, capture_output=True
        ).returncode:
            return found
    return None


def main() -> int:
    names = sys.argv[1:] or list(PEERS)
    if unknown := set(names) - set(PEERS):
        print(f"There is no peer {sorted(unknown)[0]!r}: choose from {', '.join(PEERS)}.", file=sys.stderr)
        return 2
    made = [environment(name) for name in names]  # every one, whatever the others do
    return 0 if all(made) else 1


if __name__ == "__main__":
    sys.exit(main())
