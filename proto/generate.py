"""Generate the code of the transition service, or check that what is committed is current.

python proto/generate.py            # write
python proto/generate.py --check    # exit 1 if a file differs
"""

import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).parent
PACKAGE = "agentlightning/proto"


def generate(out: Path) -> list[Path]:
    """Run protoc for every .proto file; returns the generated files, relative to `out`."""
    sources = sorted(str(path.relative_to(HERE)) for path in (HERE / PACKAGE).glob("*.proto"))
    include = str(files("grpc_tools") / "_proto")
    options = [
        f"-I{HERE}",
        f"-I{include}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
    ]
    code = protoc.main(["protoc", *options, *sources])
    if code:
        sys.exit(code)
    return sorted(path.relative_to(out) for path in (out / PACKAGE).glob("*_pb2*"))


def main() -> int:
    if sys.argv[1:] != ["--check"]:
        for path in generate(HERE):
            print(HERE / path)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        stale = [
            path
            for path in generate(Path(folder))
            if not (HERE / path).exists() or not filecmp.cmp(Path(folder) / path, HERE / path, shallow=False)
        ]
    for path in stale:
        print(f"{HERE / path} is not current: run `python proto/generate.py`.", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
