"""Agents and frameworks as they are, each on a trivial task: what they sent and got is what is on record.

The programs from npm, and mini-SWE-agent with its many dependencies, are installed into a cache folder from the locks
in `tests/clients`.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import Reply, ScriptedModel, answered
from tap import Exchange, Tap, answer_of

CLIENTS = Path(__file__).parents[1] / "clients"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentlightning-test-clients"
TASK = "Create a file named hello.txt with the word hi in it."
WRITE = "echo hi > hello.txt"


def installed(lock: str, install: Callable[[Path], None]) -> Path:
    """A folder with what a lock file names, made when it is not there yet."""
    digest = hashlib.sha256((CLIENTS / lock).read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = CACHE / f"{Path(lock).stem}-{digest}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not folder.exists():
            making = CACHE / f"making-{os.getpid()}"
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            install(making)
            making.rename(folder)
    return folder


@pytest.fixture(scope="session")
def npm() -> Path:
    """The programs from npm."""
    if shutil.which("npm") is None:
        pytest.fail("These tests need npm (Debian: `apt-get install npm`), Node 18 or newer.")

    def install(folder: Path) -> None:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(CLIENTS / name, folder)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run(command, cwd=folder, check=True, timeout=280)
        # The one install script that is needed: it puts the program for this machine in its place.
        script = "node_modules/@anthropic-ai/claude-code/install.cjs"
        subprocess.run(["node", script], cwd=folder, check=True, timeout=60)

    return installed("package-lock.json", install) / "node_modules"


@pytest.fixture(scope="session")
def mini() -> Path:
    """mini-SWE-agent's command."""

    def install(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
        command += ["--link-mode", "hardlink", "--python", str(folder / "venv/bin/python")]
        subprocess.run([*command, "-r", str(CLIENTS / "mini-swe-agent.lock")], check=True, timeout=280)

    return installed("mini-swe-agent.lock", install) / "venv/bin/python"


class Stage:
    """One rollout: a tap in front of the gateway, a scripted model behind it."""

    def __init__(self, gateway: Any, sink: Any, name: str, folder: Path) -> None:
        self.model = ScriptedModel(self.play)
        body = {"engine_id": "scripted", "policy": "scripted", "url": self.model.url}
        gateway.ask("POST", "/api/engines", body, role="admin")
        self.gateway, self.sink, self.name, self.folder = gateway, sink, name, folder
        self.token = gateway.begin(name, policy="scripted")["token"]
        self.tap = Tap(gateway.url)

    def play(self, body: dict[str, Any]) -> Reply | str:
        """The model: it calls a tool that writes the file, then says that it is done."""
        if any(message["role"] == "tool" for message in body["messages"]):
            return "Done: the file is written."
        tools = {tool["function"]["name"] for tool in body.get("tools") or ()}
        if "exec_command" in tools:
            return Reply("I write it.", [("exec_command", {"cmd": WRITE})], reasoning="A shell will do.")
        if "Bash" in tools:
            call = ("Bash", {"command": WRITE, "description": "Write the file"})
            return Reply("I write it.", [call], reasoning="A shell will do.")
        return "Hello."

    def run(self, command: list[str], **environment: str) -> str:
        """Run an agent in an empty folder, with nothing of this machine's settings."""
        home = self.folder / "home"
        work = self.folder / "work"
        for folder in (home, work):
            folder.mkdir()
        kept = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1", "TERM": "dumb"}
        ran = subprocess.run(
            command,
            cwd=work,
            env={**kept, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
        return ran.stdout

    def written(self) -> str:
        return (self.folder / "work" / "hello.txt").read_text().strip()

    def check(self, calls: int | None = None) -> list[Exchange]:
        """What the client sent and got is what is recorded, call by call. Returns what it did."""
        exchanges = self.tap.model_calls()
        spans = self.sink.calls(self.name)
        assert len(spans) == len(exchanges) > 0
        if calls is not None:
            assert len(exchanges) == calls
        assert not [span for span in spans if span["status"] == 2]
        recorded = {span["agentlightning.call.id"]: span for span in spans}
        for exchange in exchanges:
            got = answer_of(exchange)
            match = [
                span
                for span in recorded.values()
                if json.loads(span["agentlightning.request"]) == json.loads(exchange.sent)
                and same(json.loads(span["agentlightning.response"]), got)
            ]
            assert match, (exchange.path, got, [span["agentlightning.response"] for span in spans])
            del recorded[match[0]["agentlightning.call.id"]]
        for span in spans:
            assert span["agentlightning.response.token_ids"]
            assert len(span["agentlightning.response.token_ids"]) == len(
                span["agentlightning.response.logprobs"]
            )
            assert self.token not in str(span)
        assert self.gateway.row(self.name)["calls"] == len(exchanges)
        return exchanges


def same(recorded: Any, got: Any) -> bool:
    """Whether a record says what the client got; of a chat, what the message is."""
    if "choices" not in got:
        return bool(recorded == got)
    (one,), (other,) = recorded["choices"], got["choices"]
    shown = {key: value for key, value in other["message"].items() if value not in (None, [], "")}
    kept = {key: value for key, value in one["message"].items() if value not in (None, [], "")}
    return bool(kept == shown and one["finish_reason"] == other["finish_reason"])


@pytest.fixture
def stage(gateway: Any, sink: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    name = request.node.name.replace("[", "-").replace("]", "")
    made = Stage(gateway, sink, name, tmp_path)
    yield made
    gateway.ask("DELETE", "/api/engines/scripted", role="admin")
    made.tap.close()
    made.model.close()


# ----------------------------------------------------------------------- from npm


@pytest.mark.slow
def test_codex(stage, npm):
    home = stage.folder / "codex"
    home.mkdir()
    (home / "config.toml").write_text(
        'model = "scripted"\nmodel_provider = "gateway"\n'
        f'[model_providers.gateway]\nname = "gateway"\nbase_url = "{stage.tap.url}/v1"\n'
        'env_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
    )
    command = [str(npm / ".bin/codex"), "exec", "--skip-git-repo-check"]
    said = stage.run(
        [*command, "--dangerously-bypass-approvals-and-sandbox", TASK],
        CODEX_HOME=str(home),
        OPENAI_API_KEY=stage.token,
    )
    assert "Done: the file is written." in said
    assert stage.written() == "hi"
    exchanges = stage.check(calls=2)
    assert {exchange.path for exchange in exchanges} == {"/v1/responses"}
    # What it gave back of the model's thought reached the model again, so the second prompt continues the first.
    first, second = stage.model.requests
    assert second["messages"][: len(first["messages"])] == first["messages"]
    (answer,) = [message for message in second["messages"] if message["role"] == "assistant"]
    assert (answer["reasoning_content"], answer["content"]) == ("A shell will do.", "I write it.")


@pytest.mark.slow
def test_claude_code(stage, npm):
    program = npm / ".bin/claude"
    said = stage.run(
        [str(program), "--print", "--model", "scripted", "--allowedTools", "Bash", "--", TASK],
        ANTHROPIC_BASE_URL=f"{stage.tap.url}/r/{stage.token}",
        ANTHROPIC_API_KEY="the token is in the path",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert "Done: the file is written." in said
    assert stage.written() == "hi"
    exchanges = stage.check()
    assert {
        exchange.path.partition("?")[0].rpartition("/r/")[2].partition("/")[2] for exchange in exchanges
    } == {"v1/messages"}
    assert not [exchange for exchange in stage.tap.exchanges if exchange.status >= 400]
    first, second = stage.model.requests[-2:]
    assert "x-anthropic-billing-header" not in str(first["messages"])
    assert second["messages"][: len(first["messages"])] == first["messages"]


# --------------------------------------------------------------------- from PyPI


@pytest.mark.slow
def test_mini_swe_agent(stage, mini):
    def play(body: dict[str, Any]) -> Reply:
        finish = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        return Reply("So:", [("bash", {"command": finish if answered(body) else WRITE})])

    stage.model.script = play
    stage.run(
        [
            str(mini),
            "-m",
            "minisweagent.run.mini",
            "-m",
            "openai/scripted",
            "-t",
            TASK,
            "-y",
            "--exit-immediately",
        ],
        OPENAI_API_BASE=f"{stage.tap.url}/v1",
        OPENAI_API_KEY=stage.token,
        MSWEA_CONFIGURED="true",
        MSWEA_COST_TRACKING="ignore_errors",
        MSWEA_SILENT_STARTUP="1",
    )
    assert stage.written() == "hi"
    stage.check(calls=2)


def test_openai_agents(stage):
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    def play(body: dict[str, Any]) -> Reply | str:
        return "It is 3." if answered(body) else Reply(None, [("add", {"a": 1, "b": 2})])

    async def ask(stream: bool) -> Any:
        client = AsyncOpenAI(base_url=f"{stage.tap.url}/v1", api_key=stage.token)
        model = agents.OpenAIResponsesModel("scripted", client)
        agent = agents.Agent("adder", instructions="Add.", model=model, tools=[add])
        if not stream:
            return (await agents.Runner.run(agent, "1 + 2?")).final_output
        running = agents.Runner.run_streamed(agent, "1 + 2?")
        async for _ in running.stream_events():
            pass
        return running.final_output

    stage.model.script = play
    assert [asyncio.run(ask(stream)) for stream in (False, True)] == ["It is 3.", "It is 3."]
    stage.check(calls=4)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_openai(stage, responses):
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    stage.model.script = lambda body: Reply("So:", [("add", {"a": 1, "b": 2})])
    model = ChatOpenAI(
        model="scripted",
        base_url=f"{stage.tap.url}/v1",
        api_key=SecretStr(stage.token),
        use_responses_api=responses,
    ).bind_tools([add])
    for answer in (model.invoke("1 + 2?"), sum_of(model.stream("1 + 2?"))):
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2})
    stage.check(calls=2)


def sum_of(chunks: Any) -> Any:
    total = None
    for chunk in chunks:
        total = chunk if total is None else total + chunk
    return total


def test_autogen_ext(stage):
    from autogen_core.models import UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def ask() -> list[Any]:
        client = OpenAIChatCompletionClient(
            model="scripted",
            base_url=f"{stage.tap.url}/v1",
            api_key=stage.token,
            model_info={
                "vision": False,
                "function_calling": True,
                "json_output": True,
                "family": "unknown",
                "structured_output": True,
            },
        )
        messages = [UserMessage(content="hello", source="user")]
        plain = await client.create(messages)
        chunks = [chunk async for chunk in client.create_stream(messages)]
        await client.close()
        return [plain.content, getattr(chunks[-1], "content", None)]

    assert asyncio.run(ask()) == ["Hello.", "Hello."]
    stage.check(calls=2)
