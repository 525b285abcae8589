"""Examples in front of the embedded engine itself, with a tiny random model: the ids are those that it sampled.

Those with handoffs declare strict tools, which this engine refuses rather than ignores; they run against the script.
"""

from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "agents"),
    [
        ("openai_tools", {None}),
        ("langgraph_team", {"calculator", "writer", "checker"}),
    ],
)
def test_an_untrained_model_is_recorded_token_by_token(
    engine_stack: Any, example: str, agents: set[Any]
) -> None:
    ran = engine_stack.example(lambda body: "", example, "6 times 7?", "3 times 5?")
    ran.check()
    assert {call["agent"] for call in ran.calls} == agents
    assert all(1 <= len(call["response_token_ids"]) <= 6 for call in ran.calls)
