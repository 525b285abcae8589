"""Small data sets: an attempt of a few calls as rows, committed."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from agentlightning.proto.dataset import AttemptEntry, Dataset, Manifest, commit_manifest, write_files
from agentlightning.proto.schemas import ROLLOUTS, SPANS, TRANSITIONS
from agentlightning.proto.stores import Location, Store

START = 1_790_000_000_000_000  # µs


def transition(rollout: str, seq: int, **more: Any) -> dict[str, Any]:
    return {
        "run_id": "run",
        "split": "train",
        "rollout_id": rollout,
        "attempt": 0,
        "seq": seq,
        "call_id": f"{rollout}/{seq}",
        "span_id": f"{seq:016x}",
        "trace_id": "ab" * 16,
        "agent": "writer" if seq else "planner",
        "response_token_ids": list(range(seq, seq + 40)),
        "request": '{"messages":[]}',
        "token_source": "engine",
        "done": False,
        "start_time": START,
        "duration_ms": 1.0,
        "source": "gateway",
    } | more


def put(
    root: Location | Store,
    name: str,
    rollouts: Sequence[str],
    *,
    calls: int = 2,
    generation: int = 0,
    run: str = "run",
    split: str = "train",
    day: int = 0,
    truncated: bool = False,
) -> Manifest:
    """One commit with some attempts; of a later generation the calls are named by it."""
    moment = START + day * 86_400_000_000
    suffix = f"#{generation}" if generation else ""
    rows = [
        transition(
            rollout, seq, run_id=run, split=split, call_id=f"{rollout}/{seq}{suffix}", start_time=moment
        )
        for rollout in rollouts
        for seq in range(calls)
    ]
    counts = dict.fromkeys(
        ("calls_stored", "duplicate", "late", "orphan", "unparsed", "dropped_attributes"), 0
    )
    attempts = [
        {"run_id": run, "split": split, "rollout_id": rollout, "attempt": 0, "start_time": moment, **counts}
        for rollout in rollouts
    ]
    spans = [
        {
            "rollout_id": row["rollout_id"],
            "attempt": 0,
            "trace_id": row["trace_id"],
            "span_id": row["span_id"],
        }
        | {"signal": "span", "attributes": "[]"}
        for row in rows
    ]
    tables = {
        "transitions": pa.Table.from_pylist(rows, schema=TRANSITIONS),
        "rollouts": pa.Table.from_pylist(attempts, schema=ROLLOUTS),
        "spans": pa.Table.from_pylist(spans, schema=SPANS),
    }
    entries = [AttemptEntry(r, 0, run, calls, generation, truncated=truncated) for r in rollouts]
    return commit_manifest(
        root,
        "collector",
        write_files(root, name, tables),
        attempts=entries,
        journal={"id": "j", "low": 0, "high": 1, "commit": 1, "counters": {"calls": len(rows)}},
    )


def calls(dataset: Dataset) -> list[str]:
    """Which calls there are."""
    return sorted(dataset.table("transitions", columns=["call_id"]).column("call_id").to_pylist())
