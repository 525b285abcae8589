"""Merge the calls of an attempt into samples: the rows that the optimiser sees.

The calls of one attempt form a forest. A call extends an open chain when the chain's whole token sequence (prompt,
responses, observations so far) is a prefix of its prompt; among several, the longest. A chain is one sample: its last
prompt and response, with mask 1 on every token that was sampled in it.

Invariants: along a chain, prompt and response ids of every call are exactly those the engine saw; each sampled token
has mask 1 in exactly one sample or is left out for a named, counted reason; the result depends on the calls alone, not
on the order in which they arrive.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from agentlightning.proto.schemas import SAMPLES
from agentlightning.trainer.calls import Call, Ints, read_calls
from agentlightning.trainer.forest import INT32, Chain, Counts, Forest

__all__ = [
    "Call",
    "CallReward",
    "Decode",
    "Sample",
    "SampleSet",
    "Segment",
    "build_samples",
    "read_calls",
    "samples_table",
]

Decode = Callable[[Sequence[int]], str]

UNKNOWN_VERSION = -1


@dataclass(slots=True)  # not frozen, like Call: a tenth of merging would go into making it so
class Segment:
    """The tokens `[start, end)` of a sample: sampled in one call, trained."""

    call_id: str
    seq: int
    start: int
    end: int
    agent: str | None = None
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class CallReward:
    """The evaluation of one call, whether its tokens are trained or not."""

    seq: int
    call_id: str
    reward: float


@dataclass(slots=True, eq=False)
class Sample:
    """Consecutive calls whose tokens continue each other exactly."""

    rollout_id: str
    attempt: int
    index: int
    """Position among the samples of the attempt, in the order in which the chains began."""
    run_id: str | None
    group_id: str | None
    task_id: str | None
    split: str | None
    policy: str | None
    token_ids: Ints
    mask: npt.NDArray[np.bool_]
    """True where the token was sampled, and is trained in this sample."""
    logprobs: npt.NDArray[np.float32]
    """Log-probabilities of the sampler (μ), 0 where mask is false."""
    versions: Ints
    """Weight version that sampled each token, -1 where mask is false or the engine did not say."""
    segments: tuple[Segment, ...]
    call_ids: tuple[str, ...]
    """All calls of the chain, those among them too that only serve as context."""
    reason: str
    """Why the chain began: first, retokenised, edited, branch, agent."""

    @property
    def trained(self) -> int:
        """Tokens with mask 1."""
        return sum(segment.end - segment.start for segment in self.segments)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that sampled any of its tokens."""
        known = self.versions[self.versions != UNKNOWN_VERSION]
        return int(known.min()) if known.size else None


@dataclass(frozen=True, slots=True, eq=False)
class SampleSet:
    """All samples of some transitions, and what was left out of them."""

    samples: tuple[Sample, ...] = ()
    tokens_left_out: Counter[str] = field(default_factory=Counter)
    calls_left_out: Counter[str] = field(default_factory=Counter)
    breaks: Counter[str] = field(default_factory=Counter)
    call_rewards: Mapping[str, tuple[CallReward, ...]] = field(default_factory=dict)
    """By rollout, in order of the calls."""

    @property
    def tokens_trained(self) -> int:
        return sum(sample.trained for sample in self.samples)


def build_samples(
    calls: Iterable[Call],
    *,
    agents: Collection[str] | None = None,
    policy: str | None = None,
    exclude: Mapping[str, str] | None = None,
    decode: Decode | None = None,
) -> SampleSet:
    """Merge calls into samples.

    Args:
        calls: of any number of rollouts, in any order.
        agents: the agents to train, by name or pattern (`plan*`; an empty name stands for calls of no agent); by default all. Calls of the others only serve as context.
        policy: the policy to train; None trains all.
        exclude: rollouts to leave out, with the reason, such as `incomplete_rollout`.
        decode: token ids to text. Only used to tell `retokenised` from `edited` where the calls carry no messages.
    """
    by_rollout: dict[str, list[Call]] = {}
    for call in calls:
        by_rollout.setdefault(call.rollout_id, []).append(call)
    counts = Counts()
    rewards: dict[str, tuple[CallReward, ...]] = {}
    chains: list[tuple[int, Chain, list[Call]]] = []  # index in the attempt, chain, its trained calls
    selected = _selection(agents)
    for rollout_id in sorted(by_rollout):
        forest = Forest(counts, selected=selected, policy=policy, decode=decode)
        newest = forest.admit(by_rollout[rollout_id], reason=(exclude or {}).get(rollout_id))
        judged = [CallReward(c.seq, c.call_id, c.reward) for c in newest if c.reward is not None]
        if judged:
            rewards[rollout_id] = tuple(judged)
        for call in newest:
            forest.add(call)
        index = 0
        for chain in forest.chains:
            if trained := forest.trained(chain):
                chains.append((index, chain, trained))
                index += 1
    return SampleSet(
        tuple(_samples(chains)), counts.tokens_left_out, counts.calls_left_out, counts.breaks, rewards
    )


def samples_table(
    samples: Sequence[Sample],
    *,
    step: int,
    advantages: Sequence[npt.NDArray[np.float32]] | None = None,
    logprobs_new: Sequence[npt.NDArray[np.float32] | None] | None = None,
    rewards: Mapping[str, float] | None = None,
) -> pa.Table:
    """Rows of the data set's `samples` table: what the optimiser saw at `step`."""
    rows = []
    for i, sample in enumerate(samples):
        rows.append(
            {
                **{
                    n: getattr(sample, n)
                    for n in ("run_id", "group_id", "task_id", "rollout_id", "split", "attempt")
                },
                "step": step,
                "sample": sample.index,
                "policy": sample.policy,
                "call_ids": list(sample.call_ids),
                "reason": sample.reason,
                "token_ids": sample.token_ids,
                "mask": sample.mask,
                "logprobs": sample.logprobs,
                "logprobs_new": None if logprobs_new is None else logprobs_new[i],
                "advantages": None if advantages is None else advantages[i],
                "versions": sample.versions,
                "reward": (rewards or {}).get(sample.rollout_id),
            }
        )
    return pa.Table.from_pylist(rows, schema=SAMPLES)


def _selection(agents: Collection[str] | None) -> Callable[[str], bool]:
    """Whether the calls of an agent are trained, by its name."""
    if agents is None:
        return lambda name: True
    return cache(lambda name: any(fnmatchcase(name, pattern) for pattern in agents))


def _samples(chains: Sequence[tuple[int, Chain, list[Call]]]) -> Iterator[Sample]:
    """One sample of each chain and its trained calls. Their arrays are parts of larger ones: few allocations."""
    lengths = [len(chain.end) // INT32.itemsize for _, chain, _ in chains]
    mask = np.zeros(sum(lengths), np.bool_)
    logprobs = np.zeros(len(mask), np.float32)
    versions = np.full(len(mask), UNKNOWN_VERSION, np.int32)
    start = 0
    for length, (index, chain, trained) in zip(lengths, chains, strict=True):
        segments = []
        for call in trained:
            before = len(call.prompt)
            end = before + len(call.sampled)
            sampled = slice(start + before, start + end)
            mask[sampled] = True
            logprobs[sampled] = call.logprobs
            if call.model_version is not None:
                versions[sampled] = call.model_version
            if call.model_versions:
                for offset, version in zip(call.model_versions[::2], call.model_versions[1::2], strict=False):
                    versions[start + before + offset : start + end] = version
            segments.append(Segment(call.call_id, call.seq, before, end, call.agent, call.temperature))
        stop = start + length
        tail = chain.calls[-1]
        yield Sample(
            tail.rollout_id,
            tail.attempt,
            index,
            tail.run_id,
            tail.group_id,
            tail.task_id,
            tail.split,
            trained[0].policy,
            np.frombuffer(chain.end, INT32),
            mask[start:stop],
            logprobs[start:stop],
            versions[start:stop],
            tuple(segments),
            tuple([call.call_id for call in chain.calls]),
            chain.reason,
        )
        start = stop
