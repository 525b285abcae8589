"""Calls: the rows of the transitions table, as merging needs them."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["Call", "Ints", "read_calls"]

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A model call, as its row of the transitions table says."""

    rollout_id: str
    call_id: str
    attempt: int = 0
    seq: int = 0
    run_id: str | None = None
    group_id: str | None = None
    task_id: str | None = None
    split: str | None = None
    agent: str | None = None
    policy: str | None = None
    source: str = "gateway"
    prompt_ids: Ints | None = None
    response_ids: Ints | None = None
    logprobs: npt.NDArray[np.float32] | None = None
    model_version: int | None = None
    model_versions: tuple[int, ...] = ()
    temperature: float = 1.0
    """Of the distribution that was sampled. Greedy calls report log-probabilities under temperature 1."""
    error: str | None = None
    reward: float | None = None
    request: str | None = None
    response: str | None = None

    @property
    def has_tokens(self) -> bool:
        return self.prompt_ids is not None and self.response_ids is not None

    @property
    def prompt(self) -> Ints:
        """`prompt_ids` of a call that has tokens."""
        assert self.prompt_ids is not None
        return self.prompt_ids

    @property
    def sampled(self) -> Ints:
        """`response_ids` of a call that has tokens."""
        assert self.response_ids is not None
        return self.response_ids


def read_calls(transitions: pa.Table) -> list[Call]:
    """The rows of a transitions table."""
    names: tuple[str, ...] = (
        "rollout_id",
        "call_id",
        "attempt",
        "seq",
        "run_id",
        "group_id",
        "task_id",
        "split",
    )
    names += (
        "agent",
        "policy",
        "source",
        "model_version",
        "model_versions",
        "error",
        "reward",
        "request",
        "response",
    )
    columns = {name: transitions.column(name).to_pylist() for name in names}
    prompts = _lists(transitions.column("prompt_token_ids"), np.int32)
    responses = _lists(transitions.column("response_token_ids"), np.int32)
    logprobs = _lists(transitions.column("response_logprobs"), np.float32)
    sampling = transitions.column("sampling").to_pylist()
    temperatures = {text: _temperature(text) for text in set(sampling)}
    calls = []
    for row, values in enumerate(zip(*columns.values(), strict=True)):
        fields: dict[str, Any] = dict(zip(columns, values, strict=True))
        fields["model_versions"] = tuple(fields["model_versions"] or ())
        calls.append(
            Call(
                **fields,
                prompt_ids=prompts[row],
                response_ids=responses[row],
                logprobs=logprobs[row],
                temperature=temperatures[sampling[row]],
            )
        )
    return calls


def _lists(column: pa.ChunkedArray, dtype: npt.DTypeLike) -> list[Any]:
    """Each row as an array that shares the column's memory; None where null."""
    rows: list[Any] = []
    for chunk in column.chunks:
        values = chunk.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
        offsets = chunk.offsets.to_numpy()
        valid = chunk.is_valid().to_numpy(zero_copy_only=False)
        rows += [values[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(chunk))]
    return rows


def _temperature(sampling: str | None) -> float:
    if not sampling:
        return 1.0
    value = json.loads(sampling).get("temperature")
    return float(value) if value else 1.0
