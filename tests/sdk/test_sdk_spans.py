"""Rollouts, agents and rewards: identity on every span, the right parents, no reward that is no number."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from opentelemetry import baggage, trace
from opentelemetry.context import attach, detach

import agentlightning.sdk as agl
from agentlightning.sdk._identity import Identity, baggage_header, from_context, into_context

ASK = {"model": "m", "messages": [{"role": "user", "content": "What is 6*7?"}]}


def test_every_span_of_a_rollout_says_which_one_it_is(traced):
    tracer = trace.get_tracer("a.framework")
    with (
        agl.rollout(
            rollout_id="ro-1",
            task={"question": "6*7?"},
            task_id="t-1",
            group_id="g-1",
            run_id="r-1",
            attempt=3,
            split="val",
        ) as rollout,
        agl.agent("outer"),
        tracer.start_as_current_span("framework"),
        agl.agent("inner"),
    ):
        agl.reward(0.5)
    assert agl.flush()
    names = [span.name for span in traced.spans()]
    assert sorted(names) == [
        "agentlightning.rollout",
        "framework",
        "gen_ai.evaluation.result",
        "invoke_agent inner",
        "invoke_agent outer",
    ]
    for span in traced.spans():
        assert span.attributes["agentlightning.rollout.id"] == rollout.rollout_id == "ro-1"
        assert span.attributes["agentlightning.attempt"] == rollout.attempt == 3
        assert span.attributes["agentlightning.group.id"] == "g-1"
        assert span.attributes["agentlightning.task.id"] == "t-1"
        assert span.attributes["agentlightning.run.id"] == "r-1"
        assert span.attributes["agentlightning.split"] == "val"
    assert len({span.trace_id for span in traced.spans()}) == 1
    root = traced.one("agentlightning.rollout")
    assert root.parent == ""
    assert root.attributes["agentlightning.task.input"] == '{"question": "6*7?"}'
    assert root.attributes["agentlightning.rollout.state"] == "succeeded"
    inner = traced.one("invoke_agent inner")
    assert inner.attributes["gen_ai.operation.name"] == "invoke_agent"
    assert inner.attributes["gen_ai.agent.name"] == "inner"
    reward = traced.one("gen_ai.evaluation.result")
    assert reward.parent == inner.span_id
    assert reward.attributes["gen_ai.evaluation.name"] == "reward"
    assert reward.attributes["gen_ai.evaluation.score.value"] == 0.5


def test_many_rollouts_in_one_process_do_not_mix(traced, llm):
    async def one(client: Any, number: int) -> None:
        async with agl.rollout(rollout_id=f"ro-{number}", group_id=f"g-{number % 2}"):
            async with agl.agent("solver"):
                answer = await client.post(llm.url + "/chat/completions", json=ASK)
            agl.reward(number, of=answer.json()["id"])

    async def all_of_them() -> None:
        async with httpx2.AsyncClient() as client:
            await asyncio.gather(*(one(client, number) for number in range(12)))

    with trace.get_tracer("app").start_as_current_span("application") as outer:
        asyncio.run(all_of_them())
    assert agl.flush()
    by_rollout: dict[str, list[SimpleNamespace]] = {}
    for span in traced.spans():
        if span.name != "application":
            by_rollout.setdefault(span.attributes["agentlightning.rollout.id"], []).append(span)
    assert len(by_rollout) == 12
    for rollout_id, spans in by_rollout.items():
        assert sorted(span.name for span in spans) == [
            "agentlightning.rollout",
            "chat m",
            "gen_ai.evaluation.result",
            "invoke_agent solver",
        ]
        assert len({span.trace_id for span in spans}) == 1
        named = {span.name: span for span in spans}
        assert named["chat m"].parent == named["invoke_agent solver"].span_id
        reward = named["gen_ai.evaluation.result"].attributes
        assert reward["gen_ai.response.id"] == named["chat m"].attributes["gen_ai.response.id"]
        assert reward["gen_ai.evaluation.score.value"] == float(rollout_id.removeprefix("ro-"))
        # A trace of its own, linked to the application's.
        assert named["agentlightning.rollout"].links == [f"{outer.get_span_context().span_id:016x}"]
    assert len({spans[0].trace_id for spans in by_rollout.values()}) == 12


def test_a_rollouts_end_says_how_it_ended(traced):
    for number, error in enumerate(
        [ValueError("no idea"), TimeoutError(), asyncio.CancelledError(), KeyboardInterrupt()]
    ):
        with pytest.raises(type(error)), agl.rollout(rollout_id=f"ro-{number}"):
            raise error
    assert agl.flush()
    ends = {
        span.attributes["agentlightning.rollout.id"]: (
            span.attributes["agentlightning.rollout.state"],
            span.attributes["agentlightning.rollout.cause"],
        )
        for span in traced.named("agentlightning.rollout")
    }
    assert ends == {
        "ro-0": ("failed", "agent_error"),
        "ro-1": ("failed", "timeout"),
        "ro-2": ("cancelled", "cancelled"),
        "ro-3": ("cancelled", "cancelled"),
    }
    root = next(span for span in traced.spans() if span.attributes["agentlightning.rollout.id"] == "ro-0")
    assert root.status == 2
    assert root.attributes["agentlightning.rollout.error"] == "ValueError: no idea"
    ((event, details),) = root.events
    assert (event, details["exception.message"]) == ("exception", "no idea")
    assert "raise error" in details["exception.stacktrace"]


def test_the_process_identity_is_used_and_its_state_is_left_to_the_gateway(traced, monkeypatch):
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES",
        "service.name=x,agentlightning.run.id=r%2D9,agentlightning.group.id=g9,agentlightning.task.id=t9,"
        "agentlightning.rollout.id=ro-9,agentlightning.attempt=1,agentlightning.split=train",
    )
    agl.reward(1.0)
    with agl.rollout() as ours:
        pass
    with agl.rollout(rollout_id="another") as another:
        pass
    assert agl.flush()
    reward = traced.one("gen_ai.evaluation.result").attributes
    assert reward["agentlightning.rollout.id"] == "ro-9"
    assert reward["agentlightning.run.id"] == "r-9"
    assert reward["agentlightning.attempt"] == 1
    assert ours.identity == Identity("ro-9", "r-9", "g9", "t9", 1, "train")
    assert "agentlightning.rollout.state" not in traced.one("rollout").attributes
    # Another rollout shares the run, but neither group, task nor attempt.
    assert another.identity == Identity("another", "r-9", None, None, 0, "train")
    assert traced.one("agentlightning.rollout").attributes["agentlightning.rollout.state"] == "succeeded"


def test_identity_crosses_processes_as_baggage():
    identity = Identity("ro-1", "r 1", "g,1", "t=1", 4, "val")
    entries = dict(part.split("=", 1) for part in baggage_header(identity).split(","))
    assert entries["agentlightning.group.id"] == "g%2C1"
    token = attach(baggage.set_baggage("agentlightning.rollout.id", "ro-old"))
    try:
        inside = into_context(identity)
        assert from_context(inside) == identity
        from opentelemetry.baggage.propagation import W3CBaggagePropagator

        received = W3CBaggagePropagator().extract({"baggage": baggage_header(identity)})
        assert from_context(received) == identity
    finally:
        detach(token)


def test_decorated_agents_of_every_kind(traced):
    seen: list[str] = []

    def inside() -> None:
        seen.append(trace.get_current_span().name)  # type: ignore[attr-defined]

    @agl.agent("plain")
    def plain(number: int) -> int:
        inside()
        return number + 1

    @agl.agent("coroutine")
    async def coroutine(number: int) -> int:
        await asyncio.sleep(0)
        inside()
        return number + 1

    @agl.agent("generator")
    def generator() -> Any:
        inside()
        yield 1
        inside()
        yield 2
        return 3

    @agl.agent("stream")
    async def stream() -> Any:
        inside()
        yield 1
        inside()
        yield 2

    async def use() -> None:
        assert await coroutine(1) == 2
        async for _ in stream():
            assert not trace.get_current_span().get_span_context().is_valid
        early = stream()
        assert await anext(early) == 1
        await early.aclose()

    assert plain(1) == plain(1) == 2
    for _ in generator():
        assert not trace.get_current_span().get_span_context().is_valid
    asyncio.run(use())
    assert plain.__name__ == "plain"
    assert agl.flush()
    assert seen == [
        f"invoke_agent {name}"
        for name in ["plain", "plain", "generator", "generator", "coroutine", "stream", "stream", "stream"]
    ]
    counts = [
        len(traced.named(f"invoke_agent {name}")) for name in ["plain", "coroutine", "generator", "stream"]
    ]
    assert counts == [2, 1, 1, 2]
    assert all(span.status == 0 for span in traced.spans())


def test_an_exception_passes_through_and_marks_the_agent(traced):
    @agl.agent("fails")
    async def fails() -> None:
        raise RuntimeError("no")

    @agl.agent("fails")
    async def fails_in_stream() -> Any:
        yield 1
        raise RuntimeError("no")

    async def use() -> None:
        with pytest.raises(RuntimeError, match="no"):
            await fails()
        with pytest.raises(RuntimeError, match="no"):
            async for _ in fails_in_stream():
                pass

    asyncio.run(use())
    assert agl.flush()
    assert [span.attributes["error.type"] for span in traced.named("invoke_agent fails")] == [
        "RuntimeError"
    ] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1.0"])
def test_a_reward_that_is_no_finite_number_is_refused(traced, value):
    with pytest.raises(ValueError, match="must be a"):
        agl.reward(value)
    assert agl.flush()
    assert traced.spans() == []


def test_what_a_reward_is_of(traced):
    with agl.rollout(rollout_id="ro-1") as rollout, agl.agent("solver") as solver:
        agl.reward(1, "whole", of=rollout)
        agl.reward(True, "current")
        agl.reward(0.5, "call", of=SimpleNamespace(id="resp-1"))
        span = trace.get_current_span()
    agl.reward(0.25, "later", of=span, label="good", explanation="because")
    agl.reward(0.125, "latest", of=rollout)
    agl.reward(0.0625, "agent", of=solver)
    with pytest.raises(ValueError, match="not of 3"):
        agl.reward(1, of=3)
    with pytest.raises(ValueError, match="has not begun"):
        agl.reward(1, of=agl.rollout())
    assert agl.flush()
    rewards = {
        span.attributes["gen_ai.evaluation.name"]: span for span in traced.named("gen_ai.evaluation.result")
    }
    root, agent = traced.one("agentlightning.rollout").span_id, traced.one("invoke_agent solver").span_id
    parents = {name: span.parent for name, span in rewards.items()}
    assert parents == {
        "whole": root,
        "current": agent,
        "call": agent,
        "later": agent,
        "latest": root,
        "agent": agent,
    }
    assert all(span.attributes["agentlightning.rollout.id"] == "ro-1" for span in rewards.values())
    assert rewards["call"].attributes["gen_ai.response.id"] == "resp-1"
    assert rewards["later"].attributes["gen_ai.evaluation.score.label"] == "good"
    assert rewards["later"].attributes["gen_ai.evaluation.explanation"] == "because"


def test_bad_names_are_refused_with_a_sentence():
    for arguments in ({"rollout_id": "a/b"}, {"group_id": ""}, {"split": "test"}, {"attempt": -1}):
        with pytest.raises(ValueError):
            agl.rollout(**arguments)
    with pytest.raises(ValueError, match="not empty"):
        agl.agent("")
    with agl.agent("once") as scope, pytest.raises(RuntimeError, match="make a new one"):
        scope.__enter__()


def test_a_pool_thread_belongs_to_the_rollout_that_gave_it_the_work(traced):
    def work() -> None:
        with agl.agent("helper"):
            pass

    with agl.rollout(rollout_id="ro-1"), ThreadPoolExecutor() as pool:
        pool.submit(work).result()
    assert agl.flush()
    assert traced.one("invoke_agent helper").attributes["agentlightning.rollout.id"] == "ro-1"
