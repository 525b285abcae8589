"""The collector beside other receivers of OpenTelemetry spans, in one run.

    make bench-collector                                  # all peers; some ten minutes
    python benchmarks/collector_peers.py --peers rotel    # only some
    python benchmarks/collector_peers.py --rounds 9 --rollouts 72 --json figures.json

Peers, each in an environment of its own that `benchmarks/peers.py` makes: rotel (a compiled collector), the store of
agentlightning 0.3, MLflow and Phoenix, all with their defaults. Every round sends the same spans to each, one after the
other; rotel gzips what it forwards, also where it is told not to. Counted is the CPU of the server with all its children, never the sender's. The collector answers when a request
is synced to disk; of the peers none does.
"""

import argparse
import contextlib
import functools
import gzip
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import peers
from agent_spans import Rollout, make_rollouts
from receivers import (
    PROTOBUF,
    as_json,
    bodies_of,
    collector,
    mlflow,
    old_identities,
    old_spans,
    old_store,
    phoenix,
    rotel,
    rows,
    seal,
    send_grpc,
    send_http,
    sink,
    until,
)

# ---- measurements -------------------------------------------------------------------------------------


@dataclass
class Figure:
    """CPU seconds per 1000 spans and seconds to the acknowledgement, one entry per round."""

    cpu: list[float] = field(default_factory=list)
    acks: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.cpu)

    def p99_ms(self) -> float:
        return sorted(self.acks)[int(0.99 * (len(self.acks) - 1))] * 1e3


Figures = dict[str, Figure]


def measure_acks(options: argparse.Namespace, folder: Path, figures: Figures) -> None:
    """T1, T2, T4, T5: from the request to its acknowledgement. Ours: the receiving process, disk included."""
    with collector(folder / "ours") as ours, rotel(folder) as theirs:
        for turn in range(-1, options.rounds):  # the first one warms up
            batches = make_rollouts(f"ack{turn}", options.rollouts, 50, packed=False)
            singles = make_rollouts(f"one{turn}", max(4, options.rollouts // 4), 1, packed=False)
            batch, single = bodies_of(batches, 4), bodies_of(singles)
            text, zipped = as_json(batch), [gzip.compress(body, 6) for body in batch]
            shapes: list[tuple[str, int, str, Sequence[bytes], dict[str, str]]] = [
                ("HTTP protobuf, batches", _total(batches), "http", batch, PROTOBUF),
                ("gRPC, batches", _total(batches), "grpc", batch, {}),
                ("HTTP JSON, batches", _total(batches), "http", text, {"content-type": "application/json"}),
                (
                    "HTTP gzip, batches",
                    _total(batches),
                    "http",
                    zipped,
                    {**PROTOBUF, "content-encoding": "gzip"},
                ),
                ("HTTP protobuf, single spans", _total(singles), "http", single, PROTOBUF),
                ("gRPC, single spans", _total(singles), "grpc", single, {}),
            ]
            for case, spans, way, bodies, headers in shapes:
                for who, server in (("ours", ours), ("rotel", theirs)):
                    before = server.cpu(children=False)
                    acks = (
                        send_grpc(server, bodies, options.connections)
                        if way == "grpc"
                        else send_http(server, bodies, options.connections, headers)
                    )
                    if turn >= 0:
                        figure = figures.setdefault(f"{case} | {who}", Figure())
                        figure.cpu.append((server.cpu(children=False) - before) / spans * 1000)
                        figure.acks += acks
            seal(ours, [*batches, *singles])


def _total(rollouts: Sequence[Rollout]) -> int:
    return sum(rollout.spans for rollout in rollouts)


def measure_to_the_end(options: argparse.Namespace, folder: Path, figures: Figures, who: str) -> None:
    """T3: from the request to where the spans stay; ours to Parquet, rotel to another server, the others to their store."""
    place = folder / f"end-{who}"
    place.mkdir()
    with contextlib.ExitStack() as stack:
        if who in ("ours", "ours, packed ids"):
            server = stack.enter_context(collector(place))
        elif who == "rotel":
            url, counted = stack.enter_context(sink(place))
            server = stack.enter_context(rotel(place, url))
        elif who == "agentlightning 0.3":
            server = stack.enter_context(old_store(place))
        elif who == "MLflow":
            server = stack.enter_context(mlflow(place))
        else:
            server = stack.enter_context(phoenix(place))
        sent = 0
        slow = who in ("agentlightning 0.3", "MLflow", "Phoenix")
        count = max(4, options.rollouts // 4) if slow else options.rollouts
        for turn in range(-1, options.rounds):
            given = old_identities(server, count) if who == "agentlightning 0.3" else None
            rollouts = make_rollouts(
                f"end{turn}", count, 50, packed=who.endswith("packed ids"), identities=given
            )
            sent += _total(rollouts)
            before = server.cpu()
            acks = send_http(server, bodies_of(rollouts, 4), options.connections)
            if who.startswith("ours"):
                seal(server, rollouts)
            elif who == "rotel":
                until(lambda: int(counted.read_text() or 0) if counted.exists() else 0, sent, who)
            elif given:
                cpu = server.cpu()  # before asking, which costs it too
                if (kept := old_spans(server, given)) < _total(rollouts):
                    raise SystemExit(f"agentlightning 0.3 keeps {kept} of {_total(rollouts)} spans")
            elif who == "MLflow":
                until(functools.partial(rows, place / "mlflow.db", "spans"), sent, who)
            else:
                until(functools.partial(rows, place / "phoenix" / "phoenix.db", "spans"), sent, who)
            if turn >= 0:
                used = (cpu if given else server.cpu()) - before
                figure = figures.setdefault(f"to the end | {who}", Figure())
                figure.cpu.append(used / _total(rollouts) * 1000)
                figure.acks += acks


def measure_kill(options: argparse.Namespace, folder: Path) -> dict[str, tuple[int, int]]:
    """What is left of acknowledged spans after `kill -9` right after the last acknowledgement: (kept, acknowledged)."""
    left = {}
    for who in ("ours", *options.peers):
        place = folder / f"kill-{who}"
        place.mkdir()
        rollouts = make_rollouts("kill", 16, 50, packed=False)
        with contextlib.ExitStack() as stack:
            if who == "ours":
                server = stack.enter_context(collector(place))
            elif who == "rotel":
                url, counted = stack.enter_context(sink(place))
                server = stack.enter_context(rotel(place, url))
            elif who == "agentlightning-0.3":
                server = stack.enter_context(old_store(place))
                rollouts = make_rollouts(
                    "kill", 16, 50, packed=False, identities=(given := old_identities(server, 16))
                )
            elif who == "mlflow":
                server = stack.enter_context(mlflow(place))
            else:
                server = stack.enter_context(phoenix(place))
            send_http(server, bodies_of(rollouts), options.connections)
            server.kill()
            if who == "rotel":
                time.sleep(1)  # what is on its way to the sink may arrive
                kept = int(counted.read_text()) if counted.exists() else 0
        if who == "ours":
            with collector(place) as server:
                seal(server, rollouts)
            kept = _parquet_spans(place / "data")
        elif who == "agentlightning-0.3":
            with old_store(place) as server:
                kept = old_spans(server, given)
        elif who == "mlflow":
            kept = rows(place / "mlflow.db", "spans")
        elif who == "phoenix":
            kept = rows(place / "phoenix" / "phoenix.db", "spans")
        left[who] = (kept, _total(rollouts))
    return left


def _parquet_spans(data: Path) -> int:
    from agentlightning.proto.dataset import open_dataset

    return int(open_dataset(data).table("spans").num_rows)


def measure_size(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """T9: the token columns of the data set, and reading and writing them, beside gzipped JSON lines."""
    import pyarrow.parquet as pq

    from agentlightning.proto.dataset import open_dataset

    rollouts = make_rollouts("size", 4 * options.rollouts, 50, packed=True)
    with collector(folder / "size") as server:
        send_http(server, bodies_of(rollouts), options.connections)
        seal(server, rollouts)
    columns = ["prompt_token_ids", "response_token_ids", "response_logprobs"]
    dataset = open_dataset(folder / "size" / "data")
    tokens = sum(rollout.tokens for rollout in rollouts)
    size = 0
    for path in (folder / "size" / "data").rglob("*.parquet"):
        meta = pq.ParquetFile(path).metadata
        for group in range(meta.num_row_groups):
            for column in range(meta.num_columns):
                chunk = meta.row_group(group).column(column)
                if chunk.path_in_schema.split(".")[0] in columns:
                    size += chunk.total_compressed_size
    began = time.process_time()
    table = dataset.table("transitions", columns=columns)
    read = time.process_time() - began
    rows = table.to_pylist()
    began = time.process_time()
    with gzip.open(folder / "rows.jsonl.gz", "wt", compresslevel=6) as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    written_lines = time.process_time() - began
    began = time.process_time()
    with gzip.open(folder / "rows.jsonl.gz", "rt") as file:
        assert sum(1 for line in file if json.loads(line)) == len(rows)
    read_lines = time.process_time() - began
    return {
        "bytes per token": size / tokens,
        "JSONL.gz bytes per token": (folder / "rows.jsonl.gz").stat().st_size / tokens,
        "read": read_lines / read,
        "JSONL.gz write, s per million tokens": written_lines / tokens * 1e6,
    }


# ---- the table ----------------------------------------------------------------------------------------

TARGETS = {
    "HTTP protobuf, batches": "T1 ≤ 0.40",
    "gRPC, batches": "T2 ≤ 0.50",
    "HTTP JSON, batches": "T4 ≤ 0.20",
    "HTTP gzip, batches": "T4 ≤ 0.45",
    "HTTP protobuf, single spans": "T5 ≤ 1.0",
    "gRPC, single spans": "T5 ≤ 2.0",
}
ENDS = {
    "rotel": ("T3 ≤ 0.5", 0.5),
    "agentlightning 0.3": ("T3 ≤ 1/15", 1 / 15),
    "MLflow": ("T3 ≤ 1/18", 1 / 18),
    "Phoenix": ("T3 ≤ 1/50", 1 / 50),
}
PEER_NAMES = {
    "rotel": "rotel",
    "agentlightning-0.3": "agentlightning 0.3",
    "mlflow": "MLflow",
    "phoenix": "Phoenix",
}


def report(figures: Figures) -> None:
    print(
        f"\n{'CPU s per 1000 spans, medians':34}{'ours':>9}{'rotel':>9}{'ratio':>8}   {'target':12}{'p99 ack, ms':>16}"
    )
    for case, target in TARGETS.items():
        ours, theirs = figures.get(f"{case} | ours"), figures.get(f"{case} | rotel")
        if ours and theirs:
            print(
                f"{case:34}{ours.median:9.4f}{theirs.median:9.4f}{ours.median / theirs.median:7.2f}×   {target:12}"
                f"{f'{ours.p99_ms():.1f} / {theirs.p99_ms():.1f}':>16}"
            )
    ours = figures.get("to the end | ours")
    if not ours:
        return
    print(
        f"\n{'all the way, integer arrays':34}{'CPU':>9}{'ours to it':>12}   {'target':12}{'p99 ack, ms':>12}"
    )
    print(f"{'ours, to Parquet':34}{ours.median:9.4f}{'':15}{'':12}{ours.p99_ms():12.1f}")
    if packed := figures.get("to the end | ours, packed ids"):
        print(f"{'ours, to Parquet, packed ids':34}{packed.median:9.4f}{'':15}{'':12}{packed.p99_ms():12.1f}")
    for who, (target, _) in ENDS.items():
        if figure := figures.get(f"to the end | {who}"):
            ratio = ours.median / figure.median
            shown = f"{ratio:.2f}×" if ratio > 0.2 else f"1/{1 / ratio:.0f}"
            print(f"{who:34}{figure.median:9.4f}{shown:>12}   {target:12}{figure.p99_ms():12.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rollouts", type=int, default=72, help="of 14 spans, 6 of them model calls; per round"
    )
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument(
        "--peers", nargs="*", default=list(PEER_NAMES), choices=list(PEER_NAMES), metavar="PEER"
    )
    parser.add_argument("--dir", help="where to write (default: the system's temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here too")
    options = parser.parse_args()
    options.peers = [name for name in options.peers if peers.environment(name)]
    figures: Figures = {}
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {options.rounds} rounds"
    )
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        if "rotel" in options.peers:
            _progress("acknowledgements, ours and rotel")
            measure_acks(options, folder, figures)
        for who in ("ours", "ours, packed ids", *(PEER_NAMES[name] for name in options.peers)):
            _progress(f"all the way: {who}")
            measure_to_the_end(options, folder, figures, who)
        report(figures)
        _progress("kill -9 after the last acknowledgement")
        for who, (kept, sent) in measure_kill(options, folder).items():
            print(
                f"after kill -9: {PEER_NAMES.get(who, who):22}{kept:6} of {sent} acknowledged spans are left"
            )
        for what, value in (sizes := measure_size(options, folder)).items():
            print(f"{what:40}{value:8.2f}")
        if options.json:
            raw = {name: vars(figure) for name, figure in figures.items()}
            options.json.write_text(json.dumps({"figures": raw, "sizes": sizes}, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _progress(what: str) -> None:
    print(f"… {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
