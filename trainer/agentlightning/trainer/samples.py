"""Merge the calls of an attempt into samples: the rows that the optimiser sees.

The calls of one attempt form a forest. A call extends an open chain when the chain's whole token sequence (prompt,
responses, observations so far) is a prefix of its prompt; among several, the longest. A chain is one sample: its last
prompt and response, with mask 1 on every token that was sampled in it.

Invariants: along a chain, prompt and response ids of every call are exactly those the engine saw; each sampled token
has mask 1 in exactly one sample or is left out for a named, counted reason; the result depends on the calls alone, not
on the order in which they arrive.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from agentlightning.proto.schemas import SAMPLES
from agentlightning.trainer import history
from agentlightning.trainer.calls import Call, Ints, read_calls

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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True, eq=False)
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
    versions: npt.NDArray[np.int64]
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
    result = SampleSet(call_rewards=(rewards := {}))
    samples: list[Sample] = []
    for rollout_id in sorted(by_rollout):
        merger = _Merger(result, agents=agents, policy=policy, decode=decode)
        newest = merger.admit(by_rollout[rollout_id], reason=(exclude or {}).get(rollout_id))
        judged = [CallReward(c.seq, c.call_id, c.reward) for c in newest if c.reward is not None]
        if judged:
            rewards[rollout_id] = tuple(judged)
        for call in newest:
            merger.add(call)
        samples += merger.samples()
    return replace(result, samples=tuple(samples))


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


@dataclass(slots=True, eq=False)
class _Chain:
    reason: str
    first: Call
    tail: Call
    calls: list[Call] = field(default_factory=list)


class _Merger:
    """The forest of one attempt, grown call by call in order of request time.

    A chain's end is found by a rolling hash of the prompt at the lengths where chains end, all chains at once, and then
    compared token by token: so the work is linear in the tokens.
    """

    def __init__(
        self,
        result: SampleSet,
        *,
        agents: Collection[str] | None,
        policy: str | None,
        decode: Decode | None,
    ) -> None:
        self.result = result
        self.agents = agents
        self.policy = policy
        self.decode = decode
        self.chains: list[_Chain] = []
        self.chains_of: dict[str | None, list[_Chain]] = {}  # by the agent that began them
        self.chain_of: list[int] = []  # by call
        self.added: list[Call] = []
        self.unmerged: dict[str, str] = {}  # call id → why its tokens are context only

    def admit(self, calls: list[Call], *, reason: str | None) -> list[Call]:
        """The calls that can be merged, in order; the others are counted."""
        newest = max(call.attempt for call in calls)
        chosen: dict[str, Call] = {}
        # The gateway's record goes before one of the SDK, and one with tokens before one without.
        for call in sorted(calls, key=_preference):
            if call.attempt != newest:
                self._leave_out(call, "old_attempt")
            elif reason is not None:
                self._leave_out(call, reason)
            elif call.call_id in chosen:
                self.result.calls_left_out["duplicate"] += 1  # its tokens are those of the call that is kept
            else:
                chosen[call.call_id] = call
        ordered = sorted(chosen.values(), key=lambda call: (call.seq, call.call_id))
        longest = max(map(_length, ordered), default=0)
        self.powers = _powers(longest)
        self.end_length = np.zeros(len(ordered), np.int64)
        self.end_hash = np.zeros(len(ordered), np.uint64)
        self.prompt_length = np.zeros(len(ordered), np.int64)
        self.prompt_hash = np.zeros(len(ordered), np.uint64)
        self.open = np.zeros(len(ordered), np.bool_)
        return ordered

    def add(self, call: Call) -> None:
        """Extend the longest chain that the call continues, or begin a new one."""
        if (reason := self._unusable(call)) is not None:
            return self._leave_out(call, reason)
        if (reason := self._context_only(call)) is not None:
            self.unmerged[call.call_id] = reason
            self._leave_out(call, reason)
        prompt, response = call.prompt, call.sampled
        prefix = np.cumsum((prompt.astype(np.uint64) + np.uint64(1)) * self.powers[: len(prompt)])
        row = len(self.added)
        parent = self._longest_end(prompt, prefix)
        if parent is not None and self.open[parent]:
            number = self.chain_of[parent]
            chain = self.chains[number]
            self.open[parent] = False
        else:
            number = len(self.chains)
            chain = _Chain(self._reason(call, prefix, joint=parent is not None), call, call)
            self.chains.append(chain)
            self.chains_of.setdefault(call.agent, []).append(chain)
            self.result.breaks[chain.reason] += 1
        chain.calls.append(call)
        chain.tail = call
        added = (response.astype(np.uint64) + np.uint64(1)) * self.powers[len(prompt) :][: len(response)]
        self.prompt_length[row], self.prompt_hash[row] = len(prompt), prefix[-1]
        self.end_length[row] = len(prompt) + len(response)
        # A slice, not a number: arrays wrap around in silence.
        self.end_hash[row : row + 1] = prefix[-1:] + added.sum(dtype=np.uint64, keepdims=True)
        self.open[row] = True
        self.chain_of.append(number)
        self.added.append(call)

    def samples(self) -> list[Sample]:
        """One sample per chain that has a token to train."""
        samples: list[Sample] = []
        for chain in self.chains:
            trained = [
                call for call in chain.calls if call.call_id not in self.unmerged and len(call.sampled)
            ]
            if trained:
                samples.append(_sample(chain, trained, index=len(samples)))
        return samples

    def _unusable(self, call: Call) -> str | None:
        """Why the call's tokens can be neither trained nor context."""
        if call.error is not None:
            return "aborted" if call.error == "aborted" else "call_error"
        if not call.has_tokens:
            return "no_token_ids"
        if len(call.prompt) == 0:
            return "empty_prompt"  # nothing predicts the first token
        if self.policy is not None and call.policy != self.policy:
            return "other_policy"  # perhaps of another vocabulary
        return None

    def _selected(self, agent: str) -> bool:
        return self.agents is None or any(fnmatchcase(agent, pattern) for pattern in self.agents)

    def _context_only(self, call: Call) -> str | None:
        if not self._selected(call.agent or ""):
            return "not_selected"
        if call.logprobs is None:
            return "no_logprobs"
        if len(call.logprobs) != len(call.sampled):
            return "logprobs_of_other_length"
        if not np.isfinite(call.logprobs).all():
            return "logprobs_not_finite"
        return None

    def _longest_end(self, prompt: Ints, prefix: npt.NDArray[np.uint64]) -> int | None:
        """The row of the longest chain end that begins the prompt: an open one if there is any, else a closed one."""
        n = len(self.added)
        lengths = self.end_length[:n]
        fits = np.minimum(lengths, len(prompt))
        found = np.nonzero((lengths <= len(prompt)) & (prefix[fits - 1] == self.end_hash[:n]))[0]
        # Open ends first, then the longest, then the one that was there first.
        for row in sorted(found.tolist(), key=lambda r: (not self.open[r], -lengths[r], r)):
            earlier = self.added[row]
            p, r = earlier.prompt, earlier.sampled
            if np.array_equal(prompt[: len(p)], p) and np.array_equal(prompt[len(p) : len(p) + len(r)], r):
                return int(row)
        return None

    def _reason(self, call: Call, prefix: npt.NDArray[np.uint64], *, joint: bool) -> str:
        if not self.added:
            return "first"
        n = len(self.added)
        if joint or ((self.prompt_length[:n] == len(prefix)) & (self.prompt_hash[:n] == prefix[-1])).any():
            return "branch"
        if call.agent is not None and call.agent not in self.chains_of:
            return "agent"
        alike = self.chains_of.get(call.agent, self.chains)[-history.CHAINS_COMPARED :]
        return history.why_broken(call, [(chain.first, chain.tail) for chain in alike], decode=self.decode)

    def _leave_out(self, call: Call, reason: str) -> None:
        self.result.calls_left_out[reason] += 1
        self.result.tokens_left_out[reason] += 0 if call.response_ids is None else len(call.response_ids)


def _sample(chain: _Chain, trained: list[Call], *, index: int) -> Sample:
    tail = chain.tail
    token_ids = np.concatenate([tail.prompt, tail.sampled]).astype(np.int32, copy=False)
    mask = np.zeros(len(token_ids), np.bool_)
    logprobs = np.zeros(len(token_ids), np.float32)
    versions = np.full(len(token_ids), UNKNOWN_VERSION, np.int64)
    segments = []
    for call in trained:
        start = len(call.prompt)
        end = start + len(call.sampled)
        mask[start:end] = True
        logprobs[start:end] = call.logprobs
        versions[start:end] = _versions(call)
        segments.append(Segment(call.call_id, call.seq, start, end, call.agent, call.temperature))
    return Sample(
        rollout_id=tail.rollout_id,
        attempt=tail.attempt,
        index=index,
        run_id=tail.run_id,
        group_id=tail.group_id,
        task_id=tail.task_id,
        split=tail.split,
        policy=trained[0].policy,
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        segments=tuple(segments),
        call_ids=tuple(call.call_id for call in chain.calls),
        reason=chain.reason,
    )


def _versions(call: Call) -> npt.NDArray[np.int64]:
    """The weight version that sampled each response token."""
    first = UNKNOWN_VERSION if call.model_version is None else call.model_version
    versions = np.full(len(call.sampled), first, np.int64)
    for start, version in zip(call.model_versions[::2], call.model_versions[1::2], strict=False):
        versions[start:] = version
    return versions


def _length(call: Call) -> int:
    return len(call.prompt) + len(call.sampled) if call.has_tokens else 0


def _preference(call: Call) -> tuple[bool, bool, int, str]:
    return (not call.has_tokens, call.source != "gateway", call.seq, call.call_id)


def _powers(count: int) -> npt.NDArray[np.uint64]:
    base = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers keep all 64 bits; overflow wraps
    return np.cumprod(np.full(count, base, np.uint64), dtype=np.uint64)
