"""Calls: the rows of the transitions table, as merging needs them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Bodies", "Call", "Ints", "read_calls"]

Ints = npt.NDArray[np.int32]


class Bodies:
    """Request and response of a call as on the wire. Of a table's row they are decoded only when asked for."""

    __slots__ = ("_requests", "_responses", "_row")

    def __init__(
        self,
        requests: pa.ChunkedArray | Sequence[str | None],
        responses: pa.ChunkedArray | Sequence[str | None],
        row: int = 0,
    ) -> None:
        self._requests, self._responses, self._row = requests, responses, row

    @property
    def request(self) -> str | None:
        return _text(self._requests, self._row)

    @property
    def response(self) -> str | None:
        return _text(self._responses, self._row)


@dataclass(slots=True, eq=False)  # frozen, making one would take twice as long
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
    bodies: Bodies | None = None
    finite: bool | None = None
    """Whether all of `logprobs` are finite; None: nobody has looked."""

    @property
    def request(self) -> str | None:
        return None if self.bodies is None else self.bodies.request

    @property
    def response(self) -> str | None:
        return None if self.bodies is None else self.bodies.response

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
    """The rows of a transitions table. Token lists share its memory."""
    count = len(transitions)
    values = {name: transitions.column(name) for name in transitions.column_names}
    requests, responses = values["request"], values["response"]
    sampling = _strings(values["sampling"])
    temperatures = {text: _temperature(text) for text in set(sampling)}
    logprobs = _lists(values["response_logprobs"], np.float32)
    return [
        Call(*fields)
        for fields in zip(
            _strings(values["rollout_id"]),
            _strings(values["call_id"]),
            values["attempt"].to_numpy().tolist(),
            values["seq"].to_numpy().tolist(),
            *(
                _strings(values[name])
                for name in ("run_id", "group_id", "task_id", "split", "agent", "policy", "source")
            ),
            _lists(values["prompt_token_ids"], np.int32),
            _lists(values["response_token_ids"], np.int32),
            logprobs,
            _sparse(values["model_version"], None),
            [tuple(v) for v in _sparse(values["model_versions"], ())],
            [temperatures[text] for text in sampling],
            _strings(values["error"]),
            _sparse(values["reward"], None),
            [Bodies(requests, responses, row) for row in range(count)],
            [True if _all_finite(values["response_logprobs"]) else None] * count,
            strict=True,
        )
    ]


def _text(column: Any, row: int) -> str | None:
    value = column[row]
    return value if value is None or isinstance(value, str) else value.as_py()


def _strings(column: pa.ChunkedArray) -> list[Any]:
    """As `to_pylist`, which makes an object of every value first."""
    if column.null_count == len(column):
        return [None] * len(column)
    return column.to_numpy(zero_copy_only=False).tolist()


def _sparse(column: pa.ChunkedArray, missing: Any) -> list[Any]:
    """The values of a column that is mostly null, or never."""
    if column.null_count == len(column):
        return [missing] * len(column)
    if column.null_count == 0 and not pa.types.is_list(column.type):
        return column.to_numpy().tolist()
    return [missing if value is None else value for value in column.to_pylist()]


def _lists(column: pa.ChunkedArray, dtype: npt.DTypeLike) -> list[Any]:
    """Each row as an array that shares the column's memory; None where null."""
    rows: list[Any] = []
    for chunk in column.chunks:
        values = chunk.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
        offsets = chunk.offsets.to_numpy().tolist()
        if chunk.null_count == 0:
            rows += [values[i:j] for i, j in pairwise(offsets)]
        else:
            valid = chunk.is_valid().to_numpy(zero_copy_only=False)
            rows += [values[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(chunk))]
    return rows


def _all_finite(column: pa.ChunkedArray) -> bool:
    return all(
        chunk.flatten().null_count == 0 and pc.all(pc.is_finite(chunk.flatten()), min_count=0).as_py()
        for chunk in column.chunks
    )


def _temperature(sampling: str | None) -> float:
    if not sampling:
        return 1.0
    value = json.loads(sampling).get("temperature")
    return float(value) if value else 1.0
