"""Examples in front of the embedded engine itself, with a tiny random model: the ids are those that it sampled.

It follows no instruction, but it must keep to grammars: where a tool is required, the handoff takes place.
"""

from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "agents", "limit"),
    [
        ("openai_tools", {None}, 6),
        ("langgraph_team", {"calculator", "writer", "checker"}, 6),
        ("autogen_swarm", {"triage"}, 6),
        ("agents_handoff", {"triage", "solver"}, 100),
    ],
)
def test_an_untrained_model_is_recorded_token_by_token(
    engine_stack: Any, example: str, agents: set[Any], limit: int
) -> None:
    engine_stack.sampling = {"max_tokens": limit}
    ran = engine_stack.example(lambda body: "", example, "6 times 7?", "3 times 5?")
    ran.check()
    assert {call["agent"] for call in ran.calls} == agents
    assert all(1 <= len(call["response_token_ids"]) <= limit for call in ran.calls)
    handoffs = [call for call in ran.calls if call["finish_reason"] == "tool_calls"]
    assert len(handoffs) >= (2 if example == "agents_handoff" else 0)
    for call in handoffs:
        assert call["agent"] == "triage"
        assert "transfer_to_solver" in call["response"]
