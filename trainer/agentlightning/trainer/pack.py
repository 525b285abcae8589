"""Prefix-tree packing: whatever samples have in common is computed once.

The samples of a micro-batch become one tree of tokens. Samples sorted by their tokens lie in depth-first order, so a
sample adds to the tree only what follows its common prefix with the one before it. Flattened, node i may look at node j
exactly if j ≤ i < end(j), where end(j) closes j's subtree (`tree_attention`); its position is its depth. The log-probability of a token is
read at the node before it; the output layer runs on those nodes only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer.samples import Sample
from agentlightning.trainer.tree_attention import blocks_of, use_tree_attention

__all__ = ["Outputs", "Packed", "check_depth", "check_model", "forward", "pack", "plan"]

Ints = npt.NDArray[np.int64]

OUTPUT_ROWS = 1024
"""Rows of logits held at once: with 50k tokens of vocabulary 200 MB in fp32."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Some samples as one tree of N nodes with R rows of logits and T trained tokens."""

    samples: tuple[int, ...]
    """Which samples, as numbers into the list that was packed."""
    input_ids: Ints  # (N,)
    depth: Ints  # (N,)
    end: Ints  # (N,) one past the last node of each node's subtree
    rows: Ints  # (R,) nodes whose logits are needed; a node counts twice if read at two temperatures
    temperatures: npt.NDArray[np.float32]  # (R,)
    row: Ints  # (T,) the row that predicts each trained token, ascending
    targets: Ints  # (T,)
    sample: Ints  # (T,) number of the sample among `samples`
    call: Ints  # (T,) number of the call that sampled the token, from 0
    position: Ints  # (T,) place of the token in its sample


def plan(samples: Sequence[Sample], max_tokens: int) -> list[list[int]]:
    """Micro-batches of at most `max_tokens` nodes, as numbers of samples; a larger sample goes alone.

    Neighbours in sorted order share the longest prefixes, so each micro-batch is a run of them. Samples of one group are
    kept together where they fit.
    """
    paths = [_path(sample) for sample in samples]
    order = [i for i in _sorted(paths) if len(paths[i])]
    batches: list[list[int]] = []
    used = 0
    for unit in _runs(order, samples):
        whole = _nodes([paths[i] for i in unit])
        more = _nodes([paths[i] for i in ([batches[-1][-1]] if batches else []) + unit])
        more -= len(paths[batches[-1][-1]]) if batches else 0
        if batches and used + more > max_tokens >= whole:
            batches.append([])  # the group fits, but not here
            used = 0
        for i in unit:
            last = batches[-1][-1] if batches and batches[-1] else None
            new = len(paths[i]) - (_common(paths[last], paths[i]) if last is not None else 0)
            if not batches or (batches[-1] and used + new > max_tokens):
                batches.append([])
                used, new = 0, len(paths[i])
            batches[-1].append(i)
            used += new
    return batches


def pack(samples: Sequence[Sample], numbers: Sequence[int]) -> Packed:
    """The tree of the samples that `numbers` names."""
    paths = [_path(samples[i]) for i in numbers]
    tokens: list[npt.NDArray[np.int32]] = []
    depths: list[Ints] = []
    ends = np.zeros(sum(map(len, paths)), np.int64)
    count = 0
    nodes = np.zeros(0, np.int64)  # from the root to the end of the sample before
    previous = np.zeros(0, np.int32)
    read: list[tuple[Ints, Ints, npt.NDArray[np.float32], int]] = []
    calls: list[Ints] = []
    first_call = 0
    for k in _sorted(paths):
        path = paths[k]
        common = _common(previous, path)
        ends[nodes[common:]] = count
        nodes = np.concatenate([nodes[:common], np.arange(count, count + len(path) - common)])
        tokens.append(path[common:])
        depths.append(np.arange(common, len(path)))
        count, previous = count + len(path) - common, path
        positions, temperature = _trained(samples[numbers[k]])
        read.append((nodes[positions - 1], positions, temperature, k))
        calls.append(_calls(samples[numbers[k]])[positions] + first_call)
        first_call += len(samples[numbers[k]].segments) + 1
    ends[nodes] = count
    node = np.concatenate([r[0] for r in read])
    position = np.concatenate([r[1] for r in read])
    number = np.concatenate([np.full(len(r[1]), r[3], np.int64) for r in read])
    warmth, warm = np.unique(np.concatenate([r[2] for r in read]), return_inverse=True)
    keys, row = np.unique(node * max(1, len(warmth)) + warm, return_inverse=True)
    order = np.argsort(row, kind="stable")
    targets = np.concatenate([samples[numbers[r[3]]].token_ids[r[1]] for r in read])
    return Packed(
        samples=tuple(numbers),
        input_ids=np.concatenate(tokens).astype(np.int64),
        depth=np.concatenate(depths),
        end=ends[:count],
        rows=keys // max(1, len(warmth)),
        temperatures=warmth[keys % max(1, len(warmth))],
        row=row[order],
        targets=targets[order].astype(np.int64),
        sample=number[order],
        call=np.concatenate(calls)[order],
        position=position[order],
    )


class Outputs(NamedTuple):
    """What was read at the trained tokens, (T,) in fp32."""

    logp: Tensor
    entropy: Tensor | None
    """Of the distribution that each token was sampled from, if asked for."""
    hidden: Tensor
    """(R, D): the hidden states of `packed.rows`; `hidden[packed.row]` are those in which the tokens were sampled."""


def forward(model: Any, packed: Packed, *, entropy: bool = False) -> Outputs:
    """Log-probabilities of the trained tokens.

    `model` is a causal language model of transformers (Any: its classes share no typed interface).
    """
    use_tree_attention(model)
    device = model.get_input_embeddings().weight.device
    hidden = model.get_decoder()(
        input_ids=_tensor(packed.input_ids, device)[None],
        attention_mask=torch.ones(
            1, 1, 1, 1, dtype=torch.bool, device=device
        ),  # unused: the tree says it all
        position_ids=_tensor(packed.depth, device)[None],
        use_cache=False,
        tree=blocks_of(packed.end, device),
    ).last_hidden_state[0, _tensor(packed.rows, device)]  # (R, D)
    head = model.get_output_embeddings()
    temperatures = _tensor(packed.temperatures, device)
    row, targets = _tensor(packed.row, device), _tensor(packed.targets, device)
    logp, entropies = [], []
    for start in range(0, len(packed.rows), OUTPUT_ROWS):
        stop = min(start + OUTPUT_ROWS, len(packed.rows))
        first, last = np.searchsorted(packed.row, [start, stop])
        arguments = (
            head,
            hidden[start:stop],
            temperatures[start:stop],
            row[first:last] - start,
            targets[first:last],
        )
        if len(packed.rows) > OUTPUT_ROWS and torch.is_grad_enabled():
            # Logits of one chunk at a time, again in the backward pass.
            part, spread = checkpoint(_read, *arguments, entropy, use_reentrant=False)
        else:
            part, spread = _read(*arguments, entropy)
        logp.append(part)
        entropies.append(spread)
    if not logp:
        nothing = hidden.sum().float() * 0 + hidden.new_zeros(0, dtype=torch.float32)
        return Outputs(nothing, nothing if entropy else None, hidden)
    return Outputs(torch.cat(logp), torch.cat(entropies) if entropy else None, hidden)


def check_model(model: Any) -> None:
    """Raise a ConfigError unless packed log-probabilities of this model are those of its own forward pass."""
    name = type(model).__name__
    use_tree_attention(model)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = np.random.default_rng(0).integers(0, vocabulary, (2, 12)).astype(np.int32)
    tokens[1, :6] = tokens[0, :6]
    device = model.get_input_embeddings().weight.device
    with torch.no_grad(), _evaluating(model):
        full = model(input_ids=_tensor(tokens.astype(np.int64), device), use_cache=False).logits.float()
        expected = full.log_softmax(-1)[:, :-1].gather(
            2, _tensor(tokens[:, 1:, None].astype(np.int64), device)
        )
        samples = [_whole(row) for row in tokens]
        packed = pack(samples, [0, 1])
        logp = forward(model, packed).logp
    difference = (logp - expected[packed.sample, packed.position - 1, 0]).abs().max().item()
    if not difference < 0.01:
        raise ConfigError(
            f"{name} cannot be trained: its packed log-probabilities differ by {difference:.3g} from its own. "
            "Models with recurrent layers, or that transform their logits, are not supported."
        )


def check_depth(model: Any, packed: Packed) -> None:
    """Raise a ConfigError if a sample is longer than the model can see."""
    longest = int(packed.depth.max()) + 1 if packed.depth.size else 0
    window = getattr(model.config, "sliding_window", None) if _slides(model.config) else None
    limit = min(x for x in (window, getattr(model.config, "max_position_embeddings", None), 2**31) if x)
    if longest > limit:
        raise ConfigError(
            f"A sample of {longest} tokens is longer than the {limit} that {type(model).__name__} sees. "
            "Lower the agent's max_tokens or the engine's --max-model-len."
        )


def _slides(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return "sliding_attention" in kinds
    return bool(getattr(config, "use_sliding_window", True))


def _read(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    temperatures: Tensor,
    row: Tensor,
    targets: Tensor,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperatures[:, None]  # (R, V)
    total = logits.logsumexp(-1)
    logp = logits[row, targets] - total[row]
    if not entropy:
        return logp, logp
    spread = total - (logits.softmax(-1) * logits).sum(-1)
    return logp, spread[row]


def _path(sample: Sample) -> npt.NDArray[np.int32]:
    """What must be computed of a sample: all before its last trained token."""
    trained = np.nonzero(sample.mask)[0]
    return sample.token_ids[: trained[-1]] if trained.size else sample.token_ids[:0]


def _trained(sample: Sample) -> tuple[Ints, npt.NDArray[np.float32]]:
    positions = np.nonzero(sample.mask)[0]
    temperature = np.ones(len(sample.token_ids), np.float32)
    for segment in sample.segments:
        temperature[segment.start : segment.end] = segment.temperature
    return positions, temperature[positions]


def _calls(sample: Sample) -> Ints:
    """For each token the number of the call that sampled it; tokens of no call are one of their own."""
    calls = np.full(len(sample.token_ids), len(sample.segments), np.int64)
    for number, segment in enumerate(sample.segments):
        calls[segment.start : segment.end] = number
    return calls


def _whole(tokens: npt.NDArray[np.int32]) -> Sample:
    """A sample of which every token but the first is trained."""
    nothing = np.zeros(len(tokens), np.float32)
    mask = np.arange(len(tokens)) > 0
    identity: dict[str, Any] = dict.fromkeys(("run_id", "group_id", "task_id", "split", "policy"))
    return Sample(
        "", 0, 0, **identity, token_ids=tokens, mask=mask, logprobs=nothing, versions=nothing.astype(np.int32),
        segments=(), call_ids=(), reason="first",
    )  # fmt: skip


def _sorted(paths: Sequence[npt.NDArray[np.int32]]) -> list[int]:
    # Big-endian bytes compare as the numbers do.
    return sorted(range(len(paths)), key=lambda i: (paths[i].astype(">i4").tobytes(), i))


def _common(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    length = min(len(left), len(right))
    different = np.nonzero(left[:length] != right[:length])[0]
    return int(different[0]) if different.size else length


def _nodes(paths: Sequence[npt.NDArray[np.int32]]) -> int:
    """Nodes of the tree of sorted paths."""
    shared = sum(_common(a, b) for a, b in pairwise(paths))
    return sum(map(len, paths)) - shared


def _runs(order: Sequence[int], samples: Sequence[Sample]) -> Iterator[list[int]]:
    """Neighbours of one group."""
    run: list[int] = []
    for i in order:
        if run and samples[run[-1]].group_id != samples[i].group_id:
            yield run
            run = []
        run.append(i)
    if run:
        yield run


def _tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
