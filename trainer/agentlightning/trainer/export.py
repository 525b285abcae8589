"""Rollouts as training sets of other trainers: the conversational forms that TRL and its kin read.

| format | a row | made of |
|---|---|---|
| `sft` | `messages` | each conversation of a rollout, to its last answer |
| `prompt-completion` | `prompt`, `completion` | each call: only what was answered there is to be learnt |
| `dpo` | `prompt`, `chosen`, `rejected` | the best against the worst rollout of a group: their first different answers to the same messages |
| `kto` | `prompt`, `completion`, `label` | each call; the label says whether its rollout's reward is at least `min_reward` |

Every row has `tools` if the call had, and says where it is from: `rollout_id`, `task_id`, `reward`.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from agentlightning.proto.dataset import Dataset
from agentlightning.trainer.conversation import (
    COLUMNS,
    Exchange,
    Message,
    chains,
    extends,
    read_exchange,
    with_parsed_arguments,
)
from agentlightning.trainer.recorded import Entry

__all__ = ["FORMATS", "Format", "Pairing", "export_rows", "write_jsonl", "write_parquet"]

Format = Literal["sft", "prompt-completion", "dpo", "kto"]
FORMATS: tuple[Format, ...] = get_args(Format)

Row = dict[str, Any]
BATCH = 64
"""Groups whose calls are held in memory."""

_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("name", pa.string()),
        ("reasoning_content", pa.string()),
        ("tool_calls", pa.list_(pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)]))),
        ("tool_call_id", pa.string()),
    ]
)  # fmt: skip
_COLUMNS: Mapping[Format, Sequence[str]] = {
    "sft": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "dpo": ("prompt", "chosen", "rejected"),
    "kto": ("prompt", "completion"),
}
_ORIGIN = {
    "sft": (("rollout_id", pa.string()), ("reward", pa.float64())),
    "prompt-completion": (("rollout_id", pa.string()), ("reward", pa.float64())),
    "dpo": (
        ("chosen_rollout_id", pa.string()),
        ("rejected_rollout_id", pa.string()),
        ("chosen_reward", pa.float64()),
        ("rejected_reward", pa.float64()),
    ),
    "kto": (("label", pa.bool_()), ("rollout_id", pa.string()), ("reward", pa.float64())),
}


@dataclass(frozen=True, slots=True)
class Pairing:
    """How preferences are told from rewards."""

    margin: float = 0.0
    """`dpo`: the best reward of a group must exceed the worst by more than this."""
    min_reward: float = 0.5
    """`kto`: from this reward on an answer is desirable."""


def export_rows(
    dataset: Dataset,
    groups: Sequence[Sequence[Entry]],
    form: Format,
    *,
    agents: Collection[str | None] | None = None,
    pairing: Pairing | None = None,
    left_out: Counter[str] | None = None,
) -> Iterator[Row]:
    """The rows of a training set, in order of groups and rollouts.

    Args:
        agents: only answers of these; None: of all.
        left_out: counts what gives no row, by reason.
    """
    pairing, left_out = pairing or Pairing(), Counter[str]() if left_out is None else left_out
    for start in range(0, len(groups), BATCH):
        batch = groups[start : start + BATCH]
        said = _exchanges(dataset, batch, agents, left_out)
        for group in batch:
            if form == "dpo":
                yield from _pairs(group, said, pairing, left_out)
                continue
            for entry in group:
                yield from _rows(entry, said[entry.rollout_id], form, pairing, left_out)


def write_jsonl(path: Path, rows: Iterable[Row]) -> int:
    """Write one JSON object a line, tool calls with their arguments as objects; returns how many."""
    count = 0
    with open(path, "w") as file:
        for row in rows:
            file.write(json.dumps(_with_objects(row), ensure_ascii=False) + "\n")
            count += 1
    return count


def write_parquet(path: Path, rows: Iterable[Row], form: Format) -> int:
    """Write Parquet, where `tools` and the arguments of tool calls are JSON text: columns have one type."""
    fields: list[Any] = [(name, pa.list_(_MESSAGE)) for name in _COLUMNS[form]]
    schema = pa.schema([*fields, ("tools", pa.string()), ("task_id", pa.string()), *_ORIGIN[form]])
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in _batched(rows, 1024):
            writer.write_table(pa.Table.from_pylist([_flat(row) for row in batch], schema=schema))
            count += len(batch)
    return count


def _exchanges(
    dataset: Dataset,
    groups: Sequence[Sequence[Entry]],
    agents: Collection[str | None] | None,
    left_out: Counter[str],
) -> dict[str, list[Exchange]]:
    """The answered calls of each rollout, in order."""
    keys = [entry.key for group in groups for entry in group]
    said: dict[str, list[Exchange]] = {rollout_id: [] for rollout_id, _ in keys}
    rows = dataset.table("transitions", attempts=keys, columns=[*COLUMNS]).to_pylist()
    for row in sorted(rows, key=lambda row: (row["rollout_id"], row["seq"])):
        exchange = read_exchange(row)
        if isinstance(exchange, str):
            left_out[exchange] += 1
        elif agents is not None and exchange.agent not in agents:
            left_out["not_selected"] += 1
        else:
            said[row["rollout_id"]].append(exchange)
    return said


def _rows(
    entry: Entry, said: Sequence[Exchange], form: Format, pairing: Pairing, left_out: Counter[str]
) -> Iterator[Row]:
    origin = {"task_id": entry.task_id, "rollout_id": entry.rollout_id, "reward": entry.reward}
    if form == "sft":
        for call in chains(said):
            yield {"messages": list(call.whole), **_tools(call), **origin}
        return
    for call in said:
        row = {"prompt": list(call.messages), "completion": [call.answer], **_tools(call), **origin}
        if form == "kto":
            if entry.reward is None:
                left_out["no_reward"] += 1
                continue
            row["label"] = entry.reward >= pairing.min_reward
        yield row


def _pairs(
    group: Sequence[Entry], said: Mapping[str, Sequence[Exchange]], pairing: Pairing, left_out: Counter[str]
) -> Iterator[Row]:
    """Best against worst; among equals the first by id. What both said to the same messages comes before, as prompt."""
    judged = [(entry.reward, entry) for entry in group if entry.reward is not None]
    if len(judged) < 2:
        left_out["group_without_two_rewards"] += 1
        return
    highest, best = max(judged, key=lambda item: item[0])
    lowest, worst = min(judged, key=lambda item: item[0])
    if highest - lowest <= pairing.margin:
        left_out["group_within_margin"] += 1
        return
    for good, bad in zip(said[best.rollout_id], said[worst.rollout_id], strict=False):
        if not _alike(good.messages, bad.messages):
            break  # their worlds differ from here on: no answer to the same messages is left
        if not _alike([good.answer], [bad.answer]):
            yield {
                "prompt": list(good.messages),
                "chosen": [good.answer],
                "rejected": [bad.answer],
                **_tools(good),
                "task_id": best.task_id,
                "chosen_rollout_id": best.rollout_id,
                "rejected_rollout_id": worst.rollout_id,
                "chosen_reward": highest,
                "rejected_reward": lowest,
            }
            return
    left_out["group_without_common_prompt"] += 1


def _alike(left: Sequence[Message], right: Sequence[Message]) -> bool:
    return len(left) == len(right) and extends(left, right)


def _tools(call: Exchange) -> Row:
    return {"tools": list(call.tools)} if call.tools else {}


def _with_objects(row: Row) -> Row:
    return {
        name: [with_parsed_arguments(message) for message in value] if _messages(value) else value
        for name, value in row.items()
    }


def _messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value)


def _flat(row: Row) -> Row:
    flat = {
        name: [_flat_message(m) for m in value] if _messages(value) else value for name, value in row.items()
    }
    if "tools" in row:
        flat["tools"] = json.dumps(row["tools"], ensure_ascii=False)
    return flat


def _flat_message(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
        ]
        content = "".join(map(str, texts)) if len(texts) == len(content) else json.dumps(content)
    return {**message, "content": content}


def _batched(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
