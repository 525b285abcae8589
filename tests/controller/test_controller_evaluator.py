"""Rewards come from an evaluator that the agent cannot reach, and are on record before the attempt ends."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

AGENT = "def solve(answer):\n    return answer\n"


def test_rewards_are_posted_before_the_attempt_ends(gateway: Any, start: Any, module: Any) -> None:
    module("agent", AGENT)
    module(
        "judge",
        """
        import json
        async def evaluate(task, output):
            print("judging", json.dumps(task, sort_keys=True))
            kinds = {"all": {"reward": 1, "style": 0.5}, "none": None, "right": output == task["reference"]["answer"]}
            return kinds.get(output, kinds["right"])
        """,
    )
    controller = start("--agent", "agent:solve", "--evaluator", "judge:evaluate")
    right = gateway.add(answer="42", reference={"answer": "42"})
    assert gateway.outcome(right)["state"] == "succeeded"
    assert gateway.rewards == [{"rollout_id": right, "attempt": 0, "name": "reward", "value": 1.0}]
    assert gateway.events.index(f"reward {right}/0") < gateway.events.index(f"finish {right}/0")
    task = json.loads(controller.log_of(right, "evaluator.log").removeprefix("judging "))
    assert task == {
        "task_id": "task-1", "input": {"answer": "42"}, "reference": {"answer": "42"},
        "rollout_id": right, "attempt": 0, "split": "train",
    }  # fmt: skip
    both, none = (
        gateway.add(answer="all", reference={"answer": "42"}),
        gateway.add(answer="none", reference={"answer": ""}),
    )
    assert gateway.outcome(both)["state"] == gateway.outcome(none)["state"] == "succeeded"
    assert {r["name"]: r["value"] for r in gateway.rewards if r["rollout_id"] == both} == {
        "reward": 1.0,
        "style": 0.5,
    }
    assert not [r for r in gateway.rewards if r["rollout_id"] == none]


def test_an_evaluator_that_fails_is_no_fault_of_the_agent(
    gateway: Any, start: Any, module: Any, tmp_path: Path
) -> None:
    module("agent", AGENT)
    module(
        "judge",
        """
        import os
        def evaluate(task, output):
            if output == "raise":
                raise KeyError("no such answer")
            if output == "die":
                os.abort()
            return {"text": "good", "names": {1: 1.0}, "nan": {"reward": 1.0, "style": float("nan")}}[output]
        """,
    )
    controller = start("--agent", "agent:solve", "--evaluator", "judge:evaluate")
    errors = {}
    for case in ("raise", "die", "text", "names", "nan"):
        outcome = gateway.outcome(gateway.add(answer=case))
        assert (outcome["state"], outcome["cause"]) == ("failed", "infra_error")
        errors[case] = outcome["error"]
    assert "judge:evaluate failed (exit code 1): KeyError: 'no such answer'" in errors["raise"]
    assert "judge:evaluate failed (signal 6)" in errors["die"]
    assert "the evaluator returned 'good': it must return a number" in errors["text"]
    assert "it must return a number" in errors["names"]
    assert errors["nan"].startswith("The reward 'style' = nan was refused: ")
    controller.stop()
    counters = json.loads((tmp_path / "state" / "counters.json").read_text())
    assert (counters["evaluator_error"], counters["reward_not_finite"], counters["failed_infra_error"]) == (
        4,
        1,
        5,
    )


def test_an_evaluator_that_hangs_is_given_up(gateway: Any, start: Any, module: Any) -> None:
    module("agent", AGENT)
    module(
        "judge",
        """
        import signal, time
        def evaluate(task, output):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(output)
            return 1.0
        """,
    )
    impatient = "from agentlightning.controller import cli, evaluator; evaluator.EVALUATION_TIME = 0.5; exit(cli.main())"
    start("--agent", "agent:solve", "--evaluator", "judge:evaluate", program=("-c", impatient))
    outcome = gateway.outcome(gateway.add(answer=1000))
    assert outcome["cause"] == "infra_error"
    assert "The evaluator judge:evaluate ran longer than 0.5 s" in outcome["error"]
    assert gateway.outcome(gateway.add(answer=0))["state"] == "succeeded"


def test_a_killed_evaluator_is_started_again(gateway: Any, start: Any, module: Any) -> None:
    module("agent", AGENT)
    module(
        "judge",
        "import time\ndef evaluate(task, output):\n    print('judging')\n    time.sleep(output)\n    return 1.0\n",
    )
    controller = start("--agent", "agent:solve", "--evaluator", "judge:evaluate")
    first = gateway.add(answer=1000)
    log = controller.agents / first / "0" / "evaluator.log"
    deadline = time.monotonic() + 30
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(controller.launchers()[1], signal.SIGKILL)
    outcome = gateway.outcome(first)
    assert outcome["cause"] == "infra_error"
    assert "could not run: the evaluator launcher ended (signal 9)" in outcome["error"]
    assert gateway.outcome(gateway.add(answer=0))["state"] == "succeeded"


def test_only_attempts_that_succeeded_are_judged(gateway: Any, start: Any, module: Any) -> None:
    module("agent", "def solve(answer):\n    raise ValueError(answer)\n")
    module("judge", "def evaluate(task, output):\n    return 1.0\n")
    start("--agent", "agent:solve", "--evaluator", "judge:evaluate")
    assert gateway.outcome(gateway.add(answer="x"))["cause"] == "agent_error"
    assert gateway.rewards == []


def test_the_evaluator_has_the_keys_that_agents_have_not(gateway: Any, start: Any, module: Any) -> None:
    module("agent", "import os\ndef solve(answer):\n    return os.environ.get('JUDGE_KEY')\n")
    module(
        "judge",
        "import os\ndef evaluate(task, output):\n    return output is None and os.environ['JUDGE_KEY'] == 'k'\n",
    )
    start("--agent", "agent:solve", "--evaluator", "judge:evaluate", environ={"JUDGE_KEY": "k"})
    gateway.outcome(gateway.add(answer="x"))
    assert [reward["value"] for reward in gateway.rewards] == [1.0]


def test_no_reference_comes_near_the_agent(gateway: Any, start: Any, module: Any) -> None:
    module(
        "agent",
        """
        import gc, os
        def solve(answer):
            seen = repr(dict(os.environ)) + repr([thing for thing in gc.get_objects() if isinstance(thing, dict)])
            with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
                for line in maps:
                    if "[heap]" in line:
                        low, high = (int(part, 16) for part in line.split()[0].split("-"))
                        memory.seek(low)
                        seen += memory.read(high - low).decode("latin1")
            return "secret-" + "answer" in seen
        """,
    )
    module(
        "judge",
        "def evaluate(task, output):\n    return task['reference']['answer'] == 'secret-answer' and not output\n",
    )
    start("--agent", "agent:solve", "--evaluator", "judge:evaluate")
    for _ in range(3):
        gateway.outcome(gateway.add(answer="x", reference={"answer": "secret-answer"}))
    assert [reward["value"] for reward in gateway.rewards] == [1.0, 1.0, 1.0]
