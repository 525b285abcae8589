import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.proto.schemas import TRANSITIONS
from agentlightning.trainer.samples import Call, Sample, SampleSet, build_samples, read_calls, samples_table

OneCall = Callable[..., Call]


@st.composite
def forests(draw: st.DrawFn) -> list[Call]:
    """Calls of some rollouts whose agents continue, branch, edit, fail and repeat, over few distinct tokens."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    calls: list[Call] = []
    for r in range(rng.randint(1, 3)):
        contexts: list[list[int]] = [[1, 2]]
        for seq in range(rng.randint(1, 10)):
            context = list(rng.choice(contexts))
            match rng.choice(["continue", "continue", "continue", "edit", "truncate", "new"]):
                case "edit":
                    context[rng.randrange(len(context))] = rng.randint(0, 2)
                case "truncate":
                    context = context[: rng.randint(1, len(context))]
                case "new":
                    context = [rng.randint(0, 2)]
            response = [rng.randint(0, 2) for _ in range(rng.randint(0, 3))]
            trouble = rng.choice([None] * 8 + ["error", "aborted", "logprobs", "tokens"])
            calls.append(
                Call(
                    rollout_id=f"r{r}",
                    call_id=f"r{r}c{seq}",
                    attempt=rng.choice([1, 1, 1, 1, 0]),
                    seq=seq,
                    agent=rng.choice(["planner", "planner", "worker", None]),
                    prompt_ids=None if trouble == "tokens" else np.array(context, np.int32),
                    response_ids=None if trouble == "tokens" else np.array(response, np.int32),
                    logprobs=None
                    if trouble == "logprobs"
                    else np.array([-rng.random() for _ in response], np.float32),
                    model_version=rng.choice([None, 3, 4]),
                    error=trouble if trouble in ("error", "aborted") else None,
                )
            )
            contexts.append(context + response)
            contexts.append(context + response + [rng.randint(0, 2) for _ in range(rng.randint(0, 2))])
    return calls


def described(result: SampleSet) -> Any:
    rows = [
        (
            s.rollout_id,
            s.index,
            s.reason,
            s.call_ids,
            s.token_ids.tolist(),
            s.mask.tolist(),
            s.logprobs.tolist(),
        )
        for s in result.samples
    ]
    return rows, result.tokens_left_out, result.calls_left_out, result.breaks


def tokens_of(call: Call) -> list[int]:
    assert call.prompt_ids is not None
    assert call.response_ids is not None
    return call.prompt_ids.tolist() + call.response_ids.tolist()


@settings(max_examples=250, deadline=None)
@given(forests())
def test_every_call_of_a_chain_has_exactly_the_tokens_that_the_engine_saw(calls: list[Call]) -> None:
    by_id = {call.call_id: call for call in calls}
    for sample in build_samples(calls).samples:
        for call_id in sample.call_ids:
            whole = tokens_of(by_id[call_id])
            assert sample.token_ids[: len(whole)].tolist() == whole
        assert len(sample.token_ids) == len(tokens_of(by_id[sample.call_ids[-1]]))
        for segment in sample.segments:
            call = by_id[segment.call_id]
            assert call.logprobs is not None
            assert sample.token_ids[segment.start : segment.end].tolist() == call.sampled.tolist()
            assert sample.logprobs[segment.start : segment.end].tolist() == call.logprobs.tolist()
            version = -1 if call.model_version is None else call.model_version
            assert (sample.versions[segment.start : segment.end] == version).all()


@settings(max_examples=250, deadline=None)
@given(forests())
def test_each_sampled_token_is_trained_once_or_left_out_for_a_named_reason(calls: list[Call]) -> None:
    result = build_samples(calls)
    times = Counter(segment.call_id for sample in result.samples for segment in sample.segments)
    assert all(count == 1 for count in times.values())
    for sample in result.samples:
        assert sample.mask.sum() == sample.trained == sum(s.end - s.start for s in sample.segments)
    sampled = sum(len(call.response_ids) for call in calls if call.response_ids is not None)
    assert result.tokens_trained + result.tokens_left_out.total() == sampled
    empty = sum(c.response_ids is not None and not len(c.sampled) for c in calls if c.call_id not in times)
    assert len(calls) - len(times) <= result.calls_left_out.total() + empty


@settings(max_examples=150, deadline=None)
@given(forests(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_nothing(calls: list[Call], rng: random.Random) -> None:
    shuffled = list(calls)
    rng.shuffle(shuffled)
    assert described(build_samples(calls)) == described(build_samples(shuffled))


@settings(max_examples=250, deadline=None)
@given(forests())
def test_a_call_extends_the_longest_open_chain_as_a_plain_search_finds_it(calls: list[Call]) -> None:
    newest = {call.rollout_id: 0 for call in calls}
    for call in calls:
        newest[call.rollout_id] = max(newest[call.rollout_id], call.attempt)
    usable = [c for c in calls if c.has_tokens and c.error is None and c.attempt == newest[c.rollout_id]]
    chains: list[list[Call]] = []
    for call in sorted(usable, key=lambda c: (c.rollout_id, c.seq)):
        fits = [
            chain
            for chain in chains
            if chain[0].rollout_id == call.rollout_id
            and call.prompt.tolist()[: len(tokens_of(chain[-1]))] == tokens_of(chain[-1])
        ]
        if fits:
            max(fits, key=lambda chain: (len(tokens_of(chain[-1])), -chain[-1].seq)).append(call)
        else:
            chains.append([call])
    trained = [chain for chain in chains if any(c.logprobs is not None and len(c.sampled) for c in chain)]
    assert [s.call_ids for s in build_samples(calls).samples] == [
        tuple(c.call_id for c in chain) for chain in trained
    ]


def test_interleaved_agents_each_find_their_own_chain(one_call: OneCall) -> None:
    a = one_call([1, 2], [10], seq=0, agent="a")
    b = one_call([5, 6], [20, 21], seq=1, agent="b")
    a2 = one_call([1, 2, 10, 3], [11], seq=2, agent="a")
    b2 = one_call([5, 6, 20, 21, 7], [22], seq=3, agent="b")
    first, second = build_samples([a, b, a2, b2]).samples
    assert (first.reason, first.call_ids) == ("first", ("r-c0", "r-c2"))
    assert (second.reason, second.call_ids) == ("agent", ("r-c1", "r-c3"))
    assert first.mask.tolist() == [False, False, True, False, True]
    assert second.mask.tolist() == [False, False, True, True, False, True]


def test_branches_and_parallel_calls_repeat_the_prefix_as_context(one_call: OneCall) -> None:
    root = one_call([1], [2, 3], seq=0)
    left = one_call([1, 2, 3, 4], [5], seq=1)
    right = one_call([1, 2, 3, 4], [6], seq=2)
    back = one_call([1, 2, 3, 8], [9], seq=3)
    main, twin, branch = build_samples([root, left, right, back]).samples
    assert main.call_ids == ("r-c0", "r-c1")
    assert (twin.reason, branch.reason) == ("branch", "branch")
    assert branch.mask.tolist() == [False, False, False, False, True]


def test_ends_of_one_length_and_one_tail_are_told_apart_by_what_came_before(one_call: OneCall) -> None:
    tail = list(range(20, 32))
    calls = [
        one_call([1, 5], tail, seq=0),
        one_call([1, 6], tail, seq=1),
        one_call([1, 6, *tail, 3], [4], seq=2),
        one_call([1, 7, *tail, 3], [4], seq=3),
    ]
    result = build_samples(calls)
    assert [s.call_ids for s in result.samples] == [("r-c0",), ("r-c1", "r-c2"), ("r-c3",)]


def body(*messages: tuple[str, str]) -> str:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in messages]})


def answer(text: str | None, **fields: Any) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text, **fields}}]})


def test_reasons_are_told_by_the_messages(one_call: OneCall) -> None:
    start = one_call([1, 2], [3], seq=0, request=body(("system", "s"), ("user", "q")), response=answer("yes"))
    same = (("system", "s"), ("user", "q"), ("assistant", "yes"), ("user", "more"))
    edited = (("system", "s"), ("user", "q"), ("assistant", "no"), ("user", "more"))
    other = (("system", "s"), ("user", "another question"))
    stranger = (("system", "you are somebody else"), ("user", "q"))
    for messages, reason in [
        (same, "retokenised"),
        (edited, "edited"),
        (other, "branch"),
        (stranger, "agent"),
    ]:
        call = one_call([1, 2, 4, 5], [6], seq=1, request=body(*messages))
        assert [s.reason for s in build_samples([start, call]).samples] == ["first", reason]


def test_a_tool_call_spaced_otherwise_is_retokenised_not_edited(one_call: OneCall) -> None:
    def call(arguments: str) -> list[dict[str, Any]]:
        return [{"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}]

    start = one_call(
        [1], [3], request=body(("user", "q")), response=answer(None, tool_calls=call('{"a":1,"b":2}'))
    )
    told = [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "", "tool_calls": call('{"b": 2, "a": 1}')},
        {"role": "tool", "content": "7"},
    ]
    again = one_call([1, 4, 5], [6], seq=1, request=json.dumps({"messages": told}))
    assert [s.reason for s in build_samples([start, again]).samples] == ["first", "retokenised"]


def test_without_messages_the_decoder_tells_retokenised_from_edited(one_call: OneCall) -> None:
    words = {1: "a", 2: "b", 3: "ab", 4: "c"}
    start, again = one_call([4, 1], [2], seq=0), one_call([4, 3, 4], [1], seq=1)
    decode = lambda ids: "".join(words[i] for i in ids)  # noqa: E731
    assert build_samples([start, again], decode=decode).samples[1].reason == "retokenised"
    assert build_samples([start, again]).samples[1].reason == "edited"


def test_what_is_left_out_is_named_and_counted(one_call: OneCall) -> None:
    calls = [
        one_call([1], [2], seq=0),
        one_call([1], [2], seq=0, source="sdk"),
        one_call([1, 2, 3], [4, 5], seq=1, error="engine is down"),
        one_call([1, 2, 3], [4], seq=2, error="aborted"),
        one_call([1, 2, 3], [4, 4, 4], seq=3, logprobs=None),
        one_call([1, 2, 3, 4, 4, 4, 9], [5], seq=4, agent="helper"),
        one_call([1, 2], [7, 7], seq=5, policy="another"),
        one_call([1, 2], [7], seq=6, policy="p", logprobs=np.array([np.nan], np.float32)),
        one_call([8], [8], rollout="old", attempt=0),
        one_call([8], [9], rollout="old", seq=1, attempt=1),
        one_call([8], [8, 8, 8, 8], rollout="torn"),
    ]
    calls = [
        c if c.policy else Call(**{n: getattr(c, n) for n in Call.__slots__} | {"policy": "p"}) for c in calls
    ]
    result = build_samples(calls, agents=["", "x"], policy="p", exclude={"torn": "incomplete_rollout"})
    assert result.tokens_left_out == {
        "call_error": 2,
        "aborted": 1,
        "no_logprobs": 3,
        "not_selected": 1,
        "other_policy": 2,
        "logprobs_not_finite": 1,
        "old_attempt": 1,
        "incomplete_rollout": 4,
    }
    assert result.calls_left_out["duplicate"] == 1
    assert [s.call_ids for s in result.samples] == [("old-c1",), ("r-c0", "r-c3", "r-c4")]


def test_a_call_without_logprobs_is_context_for_those_that_follow(one_call: OneCall) -> None:
    calls = [one_call([1], [2, 3], seq=0, logprobs=None), one_call([1, 2, 3, 4], [5], seq=1)]
    (sample,) = build_samples(calls).samples
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.mask.tolist() == [False, False, False, False, True]


def test_weights_that_changed_inside_an_answer_are_recorded_per_token(one_call: OneCall) -> None:
    (sample,) = build_samples(
        [one_call([1], [2, 3, 4, 5], model_version=6, model_versions=(0, 6, 3, 7))]
    ).samples
    assert sample.versions.tolist() == [-1, 6, 6, 6, 7]
    assert sample.oldest_version == 6


def test_transitions_are_read_from_arrow_and_samples_written_to_it(one_sample: Callable[..., Sample]) -> None:
    row = dict.fromkeys(TRANSITIONS.names) | {
        "rollout_id": "r",
        "attempt": 0,
        "seq": 0,
        "call_id": "c",
        "span_id": "s",
        "trace_id": "t",
        "token_source": "engine",
        "done": True,
        "start_time": 0,
        "duration_ms": 1.0,
        "source": "gateway",
    }
    full = row | {
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3],
        "response_logprobs": [-0.5],
        "model_versions": [0, 4],
        "sampling": '{"temperature": 0.7}',
        "reward": 1.0,
    }
    greedy = full | {"call_id": "d", "seq": 1, "sampling": '{"temperature": 0}'}
    table = pa.concat_tables([pa.Table.from_pylist([r], schema=TRANSITIONS) for r in (row, full, greedy)])
    bare, call, cold = read_calls(table.slice(0))
    assert bare.prompt_ids is None
    assert (call.prompt.tolist(), call.sampled.tolist(), call.model_versions) == ([1, 2], [3], (0, 4))
    assert (call.temperature, cold.temperature, bare.temperature) == (0.7, 1.0, 1.0)
    assert read_calls(table.slice(1))[0].prompt.tolist() == [1, 2]

    sample = one_sample([1, 2, 3], (2, 3))
    written = samples_table(
        [sample], step=5, advantages=[np.ones(3, np.float32)], logprobs_new=[None], rewards={"r": 2.0}
    )
    assert written.to_pylist()[0]["mask"] == [False, False, True]
    assert written.to_pylist()[0]["logprobs_new"] is None
    assert written.column("reward")[0].as_py() == 2.0


def test_agents_that_are_not_selected_keep_their_reward_for_credit(one_call: OneCall) -> None:
    calls = [one_call([1], [2], agent="a"), one_call([3], [4], seq=1, agent="b", reward=0.5)]
    result = build_samples(calls, agents={"a"})
    assert [reward.reward for reward in result.call_rewards["r"]] == [0.5]


@pytest.mark.parametrize("calls", [[], None])
def test_no_calls_give_no_samples(calls: list[Call] | None) -> None:
    assert build_samples(calls or []).samples == ()
