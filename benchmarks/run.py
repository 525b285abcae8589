"""Run every benchmark, one after the other, and print what each prints.

    python benchmarks/run.py [--run runs/quickstart] [NAME …]

Each file in this folder also runs by itself and has options of its own (`--help`). Keep the machine quiet: the ratios hold,
absolute figures do not.
"""

import argparse
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = (
    "collector",
    "convert",
    "collector_backlog",
    "gateway",
    "rollouts",
    "sdk",
    "controller",
    "engine",
    "samples",
    "packing",
    "training",
    "loops",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument(
        "--run", type=Path, default=Path("runs/quickstart"), help="a finished run, for `training`"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no benchmark {sorted(unknown)[0]!r}: choose from {', '.join(NAMES)}")
    failed = []
    print(
        f"Python {platform.python_version()} on {platform.machine()}, {platform.system()} {platform.release()}"
    )
    for name in options.names or NAMES:
        command = [sys.executable, str(HERE / f"{name}.py")]
        if name == "training":
            if not options.run.exists():
                print(f"\n== training: skipped, there is no run at {options.run} (make quickstart)")
                continue
            command.append(str(options.run))
        print(f"\n== {' '.join(command[1:])}", flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
