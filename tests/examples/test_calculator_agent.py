"""The quickstart's AutoGen program, against an OpenAI server whose answers are scripted."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentlightning.examples.calculator.agent import calculator, solve

QUESTION = "Ann has 30 pens and buys 12 more. How many pens does Ann have now?"


class ScriptedServer(ThreadingHTTPServer):
    """Answers the requests it gets with `answers`, one after the other, and keeps them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[str | tuple[str, str]] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.keys.append(self.headers["authorization"])
        answer = self.server.answers.pop(0)
        message: dict[str, Any] = {"role": "assistant", "content": answer}
        if isinstance(answer, tuple):
            function = {"name": answer[0], "arguments": answer[1]}
            message |= {
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
            }
        reason = "tool_calls" if isinstance(answer, tuple) else "stop"
        body = json.dumps(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": "policy",
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        ).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "the-rollouts-key")
        monkeypatch.setenv("OPENAI_MODEL", "policy")
        yield server
        server.shutdown()
        thread.join()


def test_the_agent_calls_its_tool_and_answers_in_two_calls_to_the_address_of_the_environment(server):
    server.answers = [("calculator", '{"expression": "30 + 12"}'), "42"]
    assert asyncio.run(solve(QUESTION)) == "42"

    first, second = server.requests
    assert server.keys == ["Bearer the-rollouts-key"] * 2
    assert first["model"] == "policy"
    assert [tool["function"]["name"] for tool in first["tools"]] == ["calculator"]
    assert first["messages"][-1]["content"].endswith(QUESTION)
    # The second call continues the first: the same tools, the same history, then the tool call as it was written.
    assert second["tools"] == first["tools"]
    history, (call, result) = second["messages"][:-2], second["messages"][-2:]
    assert history == first["messages"]
    assert call["tool_calls"][0]["function"]["arguments"] == '{"expression": "30 + 12"}'
    assert (result["role"], result["content"]) == ("tool", "42")


@pytest.mark.parametrize(
    ("answers", "output"),
    [
        (["I do not know."], "I do not know."),
        ([("calculator", '{"expression": "30 + "}'), "42"], "42"),
        ([("calculator", '{"sum": 1}'), "42"], "42"),
        ([("abacus", "{}"), "42"], "42"),
        ([("calculator", '{"expression": "1 / 0"}'), "42"], "42"),
        ([("calculator", '{"expression": "30 + 12"}'), ("calculator", '{"expression": "1 + 1"}')], "2"),
        ([""], ""),
    ],
)
def test_whatever_the_model_writes_the_agent_ends_with_an_answer(server, answers, output):
    server.answers = list(answers)
    assert asyncio.run(solve(QUESTION)) == output
    assert server.answers == []


def test_the_program_runs_from_the_command_line(server):
    server.answers = [("calculator", '{"expression": "30 + 12"}'), "42"]
    command = [sys.executable, "-m", "agentlightning.examples.calculator.agent", QUESTION]
    done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7 * 6", "42"),
        ("12 + 31", "43"),
        ("96 / 8", "12"),
        ("-(2 - 5) * 3", "9"),
        ("1 / 3", "0.3333333333"),
    ],
)
def test_the_calculator_evaluates_arithmetic(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "9 ** 9 ** 9", "'a' * 9", "True + 1", "1 +", "1 / 0", "1" * 101, "1_0\0", "(" * 100],
)
def test_the_calculator_refuses_everything_else(expression):
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        calculator(expression)
