"""Statistics over states: what different rollouts of a group did from the same point.

**Anchors** (GiGPO, arXiv 2505.10978). Calls of a group that were made in the same state are compared by what was earned
from there on: A = A_rollout + ω·A_state. The state is what the model saw: its prompt, token by token, or (`observation`)
only what came after its last answer, for agents whose growing history makes every prompt unique.

**Trees** (as in TreeRL, arXiv 2506.11902). Calls of a group form a tree: a call's parent is the longest other call whose
tokens begin its prompt, and the root is the group. A node's value is the mean reward of the rollouts that pass through
it, and A = V(node) − V(parent). Calls with the same prompt and answer are one node, so a shared prefix counts once.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from agentlightning.trainer.samples import Sample

__all__ = ["Anchor", "Visit", "anchors", "tree_advantages", "visits"]

Anchor = Literal["prompt", "observation"]


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """A trained call, and what the model saw before it."""

    rollout_id: str
    call_id: str
    prompt: npt.NDArray[np.int32]
    observation: npt.NDArray[np.int32]
    """The end of the prompt, after the last trained answer in it."""
    response: npt.NDArray[np.int32]


def visits(samples: Sequence[Sample]) -> Iterator[Visit]:
    """Every trained call once."""
    seen = set()
    for sample in samples:
        before = 0
        for segment in sample.segments:
            ids = sample.token_ids
            if (sample.rollout_id, segment.call_id) not in seen:
                seen.add((sample.rollout_id, segment.call_id))
                yield Visit(
                    sample.rollout_id,
                    segment.call_id,
                    ids[: segment.start],
                    ids[before : segment.start],
                    ids[segment.start : segment.end],
                )
            before = segment.end


def anchors(
    calls: Sequence[Visit], groups: Mapping[str, str], kind: Anchor = "prompt"
) -> npt.NDArray[np.int64]:
    """The number of the state that each call was made in; states of different groups are different."""
    numbers: dict[tuple[str, bytes], int] = {}
    result = np.empty(len(calls), np.int64)
    for i, call in enumerate(calls):
        tokens = call.prompt if kind == "prompt" else call.observation
        key = (groups[call.rollout_id], hashlib.blake2b(tokens.tobytes(), digest_size=16).digest())
        result[i] = numbers.setdefault(key, len(numbers))
    return result


def tree_advantages(
    calls: Sequence[Visit], groups: Mapping[str, str], rewards: Mapping[str, float]
) -> npt.NDArray[np.float64]:
    """V(node) − V(parent) of each call. `groups` and `rewards` name every scored rollout."""
    members: dict[str, list[int]] = {}
    for i, call in enumerate(calls):
        members.setdefault(groups[call.rollout_id], []).append(i)
    everyone: dict[str, set[str]] = {}
    for rollout_id, group_id in groups.items():
        everyone.setdefault(group_id, set()).add(rollout_id)
    result = np.zeros(len(calls))
    for group_id, numbers in members.items():
        _one_tree([calls[i] for i in numbers], numbers, everyone[group_id], rewards, result)
    return result


def _one_tree(
    calls: Sequence[Visit],
    numbers: Sequence[int],
    everyone: set[str],
    rewards: Mapping[str, float],
    result: npt.NDArray[np.float64],
) -> None:
    # Big-endian bytes sort as the numbers do: whatever begins a sequence comes before it.
    keys = [
        (np.concatenate([c.prompt, c.response]).astype(">i4").tobytes(), 4 * len(c.prompt)) for c in calls
    ]
    nodes = sorted(set(keys))
    place = {key: n for n, key in enumerate(nodes)}
    through: list[set[str]] = [set() for _ in nodes]
    for call, key in zip(calls, keys, strict=True):
        through[place[key]].add(call.rollout_id)
    parents: list[int | None] = []
    above: list[int] = []  # nodes that begin the present one, shortest first
    for n, (sequence, prompt) in enumerate(nodes):
        while above and not sequence.startswith(nodes[above[-1]][0]):
            above.pop()
        parents.append(next((a for a in reversed(above) if len(nodes[a][0]) <= prompt), None))
        above.append(n)
    for n in reversed(range(len(nodes))):  # children come after their parents
        parent = parents[n]
        if parent is not None:
            through[parent] |= through[n]
    root = _mean(everyone, rewards)
    values = [_mean(rollouts, rewards) for rollouts in through]
    for number, key in zip(numbers, keys, strict=True):
        n = place[key]
        parent = parents[n]
        result[number] = values[n] - (root if parent is None else values[parent])


def _mean(rollouts: set[str], rewards: Mapping[str, float]) -> float:
    """In an order of its own, and exact where all are equal: a node without variance is exactly 0."""
    values = np.sort([rewards[rollout] for rollout in rollouts])
    return float(values[0] if values[0] == values[-1] else values.mean())
