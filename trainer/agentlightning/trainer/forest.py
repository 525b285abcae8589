"""The forest of an attempt's calls: which call continues which.

A call extends an open chain when the chain's whole token sequence (prompt, responses, observations so far) is a prefix of
its prompt; among several, the longest. If none fits, a new chain begins, and the reason is recorded.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentlightning.trainer import history
from agentlightning.trainer.calls import Call, Ints

__all__ = ["Chain", "Counts", "Forest"]

INT32 = np.dtype("<i4")
TAIL = 32
"""Bytes before a chain's end by which ends of one length are told apart before they are compared whole."""


@dataclass(slots=True)
class Counts:
    """What was left out, and why chains began."""

    tokens_left_out: Counter[str] = field(default_factory=Counter)
    calls_left_out: Counter[str] = field(default_factory=Counter)
    breaks: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Chain:
    """Calls whose tokens continue each other exactly."""

    reason: str
    """Why it began: first, retokenised, edited, branch, agent."""
    calls: list[Call]
    end: bytes
    """All its tokens so far, little-endian int32."""


class Forest:
    """The forest of one attempt, grown call by call in order of request time.

    Chain ends are found by their length and their last tokens, and then compared whole, as bytes: a comparison that
    succeeds costs what reading the tokens costs, and one that would fail is not made. So the work is linear in the tokens.
    """

    def __init__(
        self,
        counts: Counts,
        *,
        selected: Callable[[str], bool],
        policy: str | None,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self.counts = counts
        self.selected = selected
        self.policy = policy
        self.decode = decode
        self.chains: list[Chain] = []
        self.chains_of: dict[str | None, list[Chain]] = {}  # by the agent that began them
        self.ends: dict[int, dict[bytes, list[tuple[Chain, bytes]]]] = {}  # by length and tail
        self.lengths: list[int] = []  # of the ends, ascending
        self.whole: list[tuple[int, bytes]] = []  # bytes of the prompt, prompt and response
        self.unmerged: dict[str, str] = {}  # call id → why its tokens are context only

    def admit(self, calls: list[Call], *, reason: str | None) -> list[Call]:
        """The calls that can be merged, in order; the others are counted."""
        newest = max(call.attempt for call in calls)
        chosen: dict[str, Call] = {}
        for call in calls:
            if call.attempt != newest:
                self._leave_out(call, "old_attempt")
            elif reason is not None:
                self._leave_out(call, reason)
            elif (other := chosen.get(call.call_id)) is None:
                chosen[call.call_id] = call
            else:
                # The gateway's record goes before one of the SDK, and one with tokens before one without.
                chosen[call.call_id] = min(other, call, key=_preference)
                self.counts.calls_left_out["duplicate"] += 1  # its tokens are those of the call that is kept
        return sorted(chosen.values(), key=_order)

    def add(self, call: Call) -> None:
        """Extend the longest chain that the call continues, or begin a new one."""
        if (reason := self._unusable(call)) is not None:
            return self._leave_out(call, reason)
        if (reason := self._context_only(call)) is not None:
            self.unmerged[call.call_id] = reason
            self._leave_out(call, reason)
        assert call.prompt_ids is not None
        assert call.response_ids is not None
        prompt = len(call.prompt_ids) * INT32.itemsize
        end = b"".join((_packed(call.prompt_ids), _packed(call.response_ids)))
        chain, joint = self._longest_end(end, prompt)
        if chain is None:
            chain = Chain(self._reason(call, end[:prompt], joint), [], b"")
            self.chains.append(chain)
            self.chains_of.setdefault(call.agent, []).append(chain)
            self.counts.breaks[chain.reason] += 1
        chain.calls.append(call)
        chain.end = end
        length = len(end)
        if length not in self.ends:
            self.ends[length] = {}
            insort(self.lengths, length)
        self.ends[length].setdefault(end[-TAIL:], []).append((chain, end))
        self.whole.append((prompt, end))

    def trained(self, chain: Chain) -> list[Call]:
        """The calls of a chain whose tokens are to be trained; the others are context."""
        if self.unmerged:
            return [c for c in chain.calls if len(c.sampled) and c.call_id not in self.unmerged]
        return [c for c in chain.calls if len(c.sampled)]

    def _unusable(self, call: Call) -> str | None:
        """Why the call's tokens can be neither trained nor context."""
        if call.error is not None:
            return "aborted" if call.error == "aborted" else "call_error"
        if call.prompt_ids is None or call.response_ids is None:
            return "no_token_ids"
        if len(call.prompt_ids) == 0:
            return "empty_prompt"  # nothing predicts the first token
        if self.policy is not None and call.policy != self.policy:
            return "other_policy"  # perhaps of another vocabulary
        return None

    def _context_only(self, call: Call) -> str | None:
        if not self.selected(call.agent or ""):
            return "not_selected"
        if call.logprobs is None or call.response_ids is None:
            return "no_logprobs"
        if len(call.logprobs) != len(call.response_ids):
            return "logprobs_of_other_length"
        if not (call.finite or np.isfinite(call.logprobs).all()):
            return "logprobs_not_finite"
        return None

    def _longest_end(self, whole: bytes, prompt: int) -> tuple[Chain | None, bool]:
        """The open chain with the longest end that begins the prompt; and whether any end, open or not, does.

        `whole` is prompt and response, the first `prompt` bytes of it the prompt.
        """
        joint = False
        for i in range(bisect_right(self.lengths, prompt) - 1, -1, -1):
            length = self.lengths[i]
            for chain, end in self.ends[length].get(whole[max(0, length - TAIL) : length], ()):
                if whole.startswith(end):
                    if chain.end is end:  # nothing has extended it
                        return chain, True
                    joint = True
        return None, joint

    def _reason(self, call: Call, prompt: bytes, joint: bool) -> str:
        if not self.chains:
            return "first"
        if joint or any(n == len(prompt) and end.startswith(prompt) for n, end in self.whole):
            return "branch"
        if call.agent is not None and call.agent not in self.chains_of:
            return "agent"
        alike = self.chains_of.get(call.agent, self.chains)[-history.CHAINS_COMPARED :]
        return history.why_broken(call, [(c.calls[0], c.calls[-1]) for c in alike], decode=self.decode)

    def _leave_out(self, call: Call, reason: str) -> None:
        self.counts.calls_left_out[reason] += 1
        self.counts.tokens_left_out[reason] += 0 if call.response_ids is None else len(call.response_ids)


def _packed(ids: Ints) -> Any:
    """As the bytes of a chain hold them: a buffer (mypy knows arrays as buffers from Python 3.12 on)."""
    return np.ascontiguousarray(ids, INT32) if ids.dtype != INT32 or not ids.flags.c_contiguous else ids


def _order(call: Call) -> tuple[int, str]:
    return (call.seq, call.call_id)


def _preference(call: Call) -> tuple[bool, bool, int, str]:
    return (not call.has_tokens, call.source != "gateway", call.seq, call.call_id)
