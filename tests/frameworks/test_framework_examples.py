"""Our example of each framework, under `agl run`: transitions are the gateway's record, with the right agents' names."""

from collections import Counter

from scripted import Reply, answered, last, system

QUESTIONS = ("6 times 7?", "3 times 5?")


def numbers(body):
    """The two numbers in the user's question."""
    question = next(str(m["content"]) for m in body["messages"] if m["role"] == "user")
    a, _, b = question.removesuffix("?").split()
    return {"a": int(a), "b": int(b)}


def solver(body):
    """Calls the tool, then says what it gave."""
    if answered(body):
        return f"The answer is {last(body)}."
    return Reply(tools=[("multiply", numbers(body))])


def test_the_openai_client_with_tools_a_stream_and_two_questions_at_once(stack):
    def script(body):
        return solver(body) if "solver" in system(body) else "Both were solved."

    ran = stack.example(script, "openai_tools", *QUESTIONS)
    assert ran.output == "Both were solved.\n"
    ran.check()
    assert len(ran.calls) == 5
    assert ran.agents() == [()] * 5
    assert Counter(call["finish_reason"] for call in ran.calls) == {"tool_calls": 2, "stop": 3}


def test_langgraph_nodes_and_agents_have_their_names_in_a_batch(stack):
    def script(body):
        if "solver" in system(body):
            return solver(body)
        return f"written {last(body)}" if "writer" in system(body) else f"checked {last(body)}"

    ran = stack.example(script, "langgraph_team", *QUESTIONS)
    assert ran.output.splitlines() == [f"checked written The answer is {product}." for product in (42, 15)]
    ran.check()
    assert Counter(ran.agents()) == {
        ("team", "solver", "calculator"): 4,
        ("team", "writer"): 2,
        ("team", "checker"): 2,
    }
    tools = [span["name"] for span in ran.spans if span["name"].startswith("execute_tool")]
    assert tools == ["execute_tool multiply"] * 2


def test_autogen_agents_have_their_names_through_a_handoff_and_streams(stack):
    def script(body):
        if "triage" in system(body):
            return Reply(tools=[("transfer_to_solver", {})])
        if not answered(body) or "Transferred" in last(body):
            return Reply(tools=[("multiply", numbers(body))])
        return f"It is {last(body)}. DONE"

    ran = stack.example(script, "autogen_swarm", *QUESTIONS)
    assert ran.output.splitlines() == ["It is 42. DONE", "It is 15. DONE"]
    ran.check()
    assert Counter(ran.agents()) == {("triage",): 2, ("solver",): 4}
    assert not [span for span in ran.spans if "Runtime" in span["scope"]]


def test_agents_of_the_openai_sdk_have_their_names_through_handoff_stream_and_as_tool(stack):
    def script(body):
        if "triage" in system(body):
            return Reply(tools=[("transfer_to_solver", {})])
        if "translator" in system(body):
            return "Voilà."
        if not answered(body) or "assistant" in last(body):  # the handoff's own result
            return Reply(tools=[("multiply", numbers(body))])
        if last(body).isdecimal():
            return Reply(tools=[("translate", {"input": f"It is {last(body)}."})])
        return "Done: " + last(body)

    ran = stack.example(script, "agents_handoff", *QUESTIONS)
    assert ran.output.splitlines() == ["Done: Voilà."] * 2
    ran.check()
    assert Counter(path[-1] for path in ran.agents()) == {"triage": 2, "solver": 6, "translator": 2}
    translators = {path[-2:] for path in ran.agents() if path[-1] == "translator"}
    assert translators <= {("solver", "translator"), ("Agent workflow", "translator")}
    assert all("solver" in path for path in ran.agents() if path[-1] == "translator")
    assert "trace" not in ran.errors  # nothing went, or tried to go, to the vendor
