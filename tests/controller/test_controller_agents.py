"""Agents of both kinds: what they are given, what is kept of them, how their ends are told."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.controller.environment import allowed_environment
from agentlightning.controller.spec import CommandAgent, FunctionAgent, parse_agent
from agentlightning.proto.errors import ConfigError

PYTHON = sys.executable


def test_a_function_is_called_with_the_task_and_its_value_is_the_output(
    gateway: Any, start: Any, module: Any
) -> None:
    module(
        "agent",
        """
        import asyncio, os
        loaded_by = os.getpid()
        async def solve(question, n=1):
            await asyncio.sleep(0)
            print("thinking about", question)
            return {"answer": question.upper(), "n": n, "forked": os.getpid() != loaded_by}
        """,
    )
    controller = start("--agent", "agent:solve")
    first, second = gateway.add(question="why"), gateway.add(question="how", n=3)
    assert gateway.outcome(first)["output"] == {"answer": "WHY", "n": 1, "forked": True}
    assert gateway.outcome(second)["output"]["n"] == 3
    assert (gateway.outcome(first)["state"], gateway.outcome(first)["cause"]) == ("succeeded", None)
    assert controller.log_of(first, "stdout.log") == "thinking about why\n"
    result = json.loads(controller.log_of(first, "result.json"))
    assert (result["state"], result["exit_code"]) == ("succeeded", 0)


def test_values_that_are_not_json_become_text(gateway: Any, start: Any, module: Any) -> None:
    module(
        "agent",
        """
        import pathlib, sys
        def solve(case):
            if case == "leave":
                sys.exit(0)
            return {"path": pathlib.PurePath("/x"), "nan": float("nan"), "none": None}[case]
        """,
    )
    start("--agent", "agent:solve")
    cases = {case: gateway.add(case=case) for case in ("path", "nan", "none", "leave")}
    outputs = {case: gateway.outcome(rollout)["output"] for case, rollout in cases.items()}
    assert outputs == {"path": "/x", "nan": "nan", "none": None, "leave": None}


def test_an_agent_that_forks_or_writes_into_its_result_harms_nobody(
    gateway: Any, start: Any, module: Any
) -> None:
    module(
        "agent",
        """
        import os
        def solve(how):
            if how == "fork":
                return "parent" if os.fork() else "child"
            for fd in range(3, 32):
                try:
                    os.write(fd, bytes([255, 0, 10]))
                except OSError:
                    pass
        """,
    )
    start("--agent", "agent:solve")
    assert gateway.outcome(gateway.add(how="fork"))["output"] == "parent"
    assert gateway.outcome(gateway.add(how="spoil"))["cause"] == "agent_error"
    assert gateway.outcome(gateway.add(how="fork"))["output"] == "parent"


def test_a_command_gets_its_fields_as_arguments_and_never_a_shell(gateway: Any, start: Any) -> None:
    script = "import sys, json; print(json.dumps(sys.argv[1:]))"
    start("--agent", f"{PYTHON} -c '{script}' --q={{question}} '{{n}} {{{{x}}}}'")
    rollout = gateway.add(question="$(touch pwned); `id` 'a  b'", n={"deep": [1]})
    assert json.loads(gateway.outcome(rollout)["output"]) == [
        "--q=$(touch pwned); `id` 'a  b'",
        '{"deep": [1]} {x}',
    ]


def test_a_task_without_the_named_field_fails_with_a_sentence(gateway: Any, start: Any) -> None:
    start("--agent", "echo {question}")
    outcome = gateway.outcome(gateway.add(qestion="typo"))
    assert (outcome["state"], outcome["cause"]) == ("failed", "agent_error")
    assert "{question}" in outcome["error"]
    assert "Did you mean 'qestion'?" in outcome["error"]


def test_the_environment_holds_the_contract_and_no_secret(gateway: Any, start: Any, module: Any) -> None:
    module(
        "agent",
        """
        import os
        def solve(question):
            with open("/proc/self/environ") as file:
                return {"environ": dict(os.environ), "at_exec": file.read()}
        """,
    )
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "secret-1",
        "OPENAI_API_KEY": "secret-2",
        "HTTP_PROXY": "http://secret-3",
        "WANTED": "yes",
    }
    start("--agent", "agent:solve", "--env", "WANTED", "--collector", "http://127.0.0.1:9/", environ=secrets)
    rollout = gateway.add(question="é ☃")
    output = gateway.outcome(rollout)["output"]
    environ = output["environ"]
    assert environ["OPENAI_BASE_URL"] == environ["OPENAI_API_BASE"] == f"{gateway.url}/v1"
    assert environ["ANTHROPIC_BASE_URL"] == environ["AGENTLIGHTNING_GATEWAY"] == gateway.url
    assert environ["OPENAI_API_KEY"] == environ["ANTHROPIC_API_KEY"] == f"alr_secret-{rollout}-0"
    assert environ["OPENAI_MODEL"] == "policy-1"
    assert environ["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://127.0.0.1:9"
    assert environ["OTEL_RESOURCE_ATTRIBUTES"] == (
        "agentlightning.run.id=run-1,agentlightning.group.id=group-1,agentlightning.task.id=task-1,"
        f"agentlightning.rollout.id={rollout},agentlightning.attempt=0,agentlightning.split=train"
    )
    assert json.loads(environ["AGENTLIGHTNING_TASK"]) == {"question": "é ☃"}
    assert (environ["AGENTLIGHTNING_ROLLOUT_ID"], environ["AGENTLIGHTNING_ATTEMPT"]) == (rollout, "0")
    assert environ["WANTED"] == "yes"
    assert "PATH" in environ
    assert not set(environ) & {"AWS_SECRET_ACCESS_KEY", "HTTP_PROXY", "PWD"}
    assert "secret" not in output["at_exec"]


def test_a_command_gets_the_same_environment(gateway: Any, start: Any) -> None:
    start("--agent", "env", environ={"SECRET": "secret-1"})
    rollout = gateway.add(question="x")
    environ = dict(line.split("=", 1) for line in gateway.outcome(rollout)["output"].splitlines())
    assert environ["OPENAI_API_KEY"] == f"alr_secret-{rollout}-0"
    assert "SECRET" not in environ


def test_a_crash_is_told_with_its_last_lines_and_without_the_token(
    gateway: Any, start: Any, module: Any
) -> None:
    module(
        "agent",
        """
        import os, signal
        def solve(how):
            if how == "raise":
                raise ValueError("bad key " + os.environ["OPENAI_API_KEY"])
            if how == "signal":
                os.kill(os.getpid(), signal.SIGSEGV)
            raise SystemExit("gave up")
        """,
    )
    start("--agent", "agent:solve")
    raised, killed, left = (gateway.outcome(gateway.add(how=how)) for how in ("raise", "signal", "exit"))
    assert {outcome["cause"] for outcome in (raised, killed, left)} == {"agent_error"}
    assert raised["error"].startswith("The agent exited with code 1: ValueError: bad key [rollout token]\n")
    assert 'agent.py", line 5, in solve' in raised["error"]
    assert "controller/child.py" not in raised["error"]
    assert "secret" not in raised["error"]
    assert killed["error"].startswith("The agent was killed by signal 11.")
    assert left["error"].startswith("The agent exited with code 1: gave up")


def test_a_flood_of_output_is_cut_and_counted_and_the_agent_goes_on(
    gateway: Any, start: Any, module: Any
) -> None:
    module(
        "agent",
        """
        import sys
        def solve(megabytes):
            for _ in range(megabytes):
                sys.stdout.write("x" * (1 << 20))
            print("the end", file=sys.stderr)
            return "done"
        """,
    )
    controller = start("--agent", "agent:solve")
    rollout = gateway.add(megabytes=40)
    assert gateway.outcome(rollout)["output"] == "done"
    log = controller.log_of(rollout, "stdout.log")
    assert (16 << 20) < len(log) < (16 << 20) + 100
    assert log.endswith(f"\n[{24 << 20:,} more bytes were not kept]\n")
    assert controller.log_of(rollout, "stderr.log") == "the end\n"
    assert controller.stop() == 0
    assert (
        json.loads((controller.folder / "state" / "counters.json").read_text())["output_bytes_dropped"]
        == 24 << 20
    )


def test_an_output_too_large_to_report_is_an_error(gateway: Any, start: Any, module: Any) -> None:
    module("agent", "def solve(n):\n    return 'x' * n\n")
    start("--agent", "agent:solve")
    assert len(gateway.outcome(gateway.add(n=1 << 20))["output"]) == 1 << 20
    outcome = gateway.outcome(gateway.add(n=5 << 20))
    assert (outcome["cause"], outcome["error"]) == (
        "agent_error",
        "The agent's output is larger than 4 MiB as JSON.",
    )


def test_setup_runs_first_and_exit_handlers_last(gateway: Any, start: Any, module: Any) -> None:
    module(
        "agent",
        """
        import threading, time
        def solve(question):
            threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
            print("agent")
        """,
    )
    module(
        "tracing",
        """
        import atexit, os
        def setup():
            print("setup", "AGENTLIGHTNING_ROLLOUT_ID" in os.environ)
            atexit.register(print, "flushed")
        """,
    )
    controller = start("--agent", "agent:solve", "--setup", "tracing:setup")
    rollout = gateway.add(question="x")
    gateway.outcome(rollout)
    assert controller.log_of(rollout, "stdout.log") == "setup True\nagent\nthread\nflushed\n"


def test_each_attempt_has_its_own_random_state_that_repeats(gateway: Any, start: Any, module: Any) -> None:
    module(
        "agent",
        """
        import random
        import numpy
        def solve(question):
            return [random.random(), float(numpy.random.rand())]
        """,
    )
    start("--agent", "agent:solve")
    one, two = (gateway.outcome(gateway.add(name, question="x"))["output"] for name in ("ro-1", "ro-2"))
    assert not set(one) & set(two)
    again = gateway.outcome(gateway.add("ro-1", question="x"), 1)["output"]
    assert again == one


def test_forked_agents_share_no_descriptors(gateway: Any, start: Any, module: Any) -> None:
    module(
        "agent",
        """
        import os, time
        def solve(wait):
            time.sleep(wait)
            return sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd")
                          if os.path.exists(f"/proc/self/fd/{fd}"))
        """,
    )
    start("--agent", "agent:solve")
    others = [gateway.add(wait=2) for _ in range(3)]
    output = gateway.outcome(gateway.add(wait=0))["output"]
    # stdin; stdout, stderr and the result; and nothing of the launcher or of the three that run beside it.
    assert [name for name in output if not name.startswith("/proc/")] == ["/dev/null", "pipe", "pipe", "pipe"]
    for rollout in others:
        gateway.outcome(rollout)


def test_many_forked_agents_take_seconds_not_minutes(gateway: Any, start: Any, module: Any) -> None:
    module("agent", "import asyncio, decimal, email, http.client\ndef solve(n):\n    return n * n\n")
    start("--agent", "agent:solve", "--concurrency", "16")
    began = time.monotonic()
    rollouts = [gateway.add(n=n) for n in range(64)]
    assert [gateway.outcome(rollout)["output"] for rollout in rollouts] == [n * n for n in range(64)]
    assert time.monotonic() - began < 15


def test_what_agents_import_late_is_imported_once_and_only_if_it_is_installed(
    gateway: Any, start: Any, module: Any
) -> None:
    module("late", "loaded = True\n")
    module(
        "agent",
        """
        import sys
        def solve(question):
            before = ["colorsys" in sys.modules, "late" in sys.modules]
            import colorsys, late
            return before
        """,
    )
    controller = start("--agent", "agent:solve")
    outputs = [gateway.outcome(gateway.add(question="x"))["output"] for _ in range(3)]
    assert outputs == [[False, False], [True, False], [True, False]]
    assert controller.process.poll() is None


def test_mistakes_in_the_command_line_are_one_sentence(refuse: Callable[..., str], module: Any) -> None:
    module("agent", "value = 3\ndef solve(): pass\n")
    module("broken", "raise RuntimeError('no database')\n")
    cases = {
        ("--agent", "agent:sovle"): "there is no 'sovle' in agent. Did you mean 'solve'?",
        ("--agent", "nowhere:solve"): "No module named 'nowhere'",
        ("--agent", "broken:solve"): "RuntimeError: no database",
        ("--agent", "agent:solve", "--evaluator", "agent:value"): "agent:value is not a function.",
        ("--agent", "no-such-program {x}"): "'no-such-program' was not found",
        ("--agent", "echo", "--setup", "agent:solve"): "--setup is for agents that are Python functions",
        ("--agent", "echo", "--gateway", "127.0.0.1:80"): "is not an address",
        ("--agent", "echo", "--cwd", "/no/such"): "there is no such folder",
        ("--agent", "echo", "--timeout", "-1"): "must be more than zero",
    }
    for options, sentence in cases.items():
        said = refuse(*options)
        assert sentence in said, (options, said)
        if "broken:solve" not in options:  # where the user's own module raised, its stack says where
            assert "Traceback" not in said, (options, said)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("echo {x", "write {field} for a field of the task"),
        ("echo {0}", "{0} is not the name of a field"),
        ("echo {x!r}", "{x} is not the name of a field"),
        ("echo 'x", "is not a command line: No closing quotation."),
        ("  ", "--agent is empty"),
    ],
)
def test_an_unreadable_command_line_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_agent(text)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("A=b", "--env takes a name alone"),
        ("MISSING", "no such variable"),
        ("OPENAI_API_KEY", "sets OPENAI_API_KEY itself"),
        ("AGENTLIGHTNING_TASK", "sets AGENTLIGHTNING_TASK itself"),
    ],
)
def test_a_variable_that_cannot_be_passed_on_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        allowed_environment({"A": "b", "OPENAI_API_KEY": "x"}, [name])
    assert sentence in str(refused.value)


def test_a_function_is_told_from_a_command() -> None:
    assert parse_agent("pkg.mod:Class.solve") == FunctionAgent("pkg.mod:Class.solve")
    for text in ("python agent.py", "./agent:1", "agent.sh", "mod:"):
        assert isinstance(parse_agent(text), CommandAgent)
