"""Whole runs: every component real and in its own process; the model tiny and random."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import duckdb
import polars
import pyarrow.dataset
import pytest
import torch
from running import Run, assert_exact, wait_for
from safetensors.torch import load_file
from troubled import TROUBLES

from agentlightning.collector.inspect_cli import main as main_inspect
from agentlightning.proto.dataset import open_dataset

Make = Callable[..., Run]
COMPONENTS = ["collector", "gateway", "controller", "engine"]


def test_a_run_leaves_data_a_model_a_report_and_says_what_came_of_it(make_run: Make) -> None:
    run = make_run()
    text = run.finish()
    assert "step   3/3" in text
    assert "Held-out reward, mean and 95 % interval:  before" in text
    assert_exact(run, steps=3)

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(run.root / "checkpoint")
    page = (run.root / "report.html").read_text()
    assert "incomplete_rollout" in page
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")  # self-contained
    assert 'data-t="' in page  # rollouts token by token
    assert "over the same 4 tasks" in text
    (step, *_) = run.events("step")
    assert step["behaviour"]["length"] > 0
    assert len(step["reward_interval"]) == 2
    assert main_inspect([str(run.root), "--rollout", "run.00001.0.000.00", "--tokens"]) == 0
    versions = {row["model_version"] for row in open_dataset(run.root).table("transitions").to_pylist()}
    assert versions == {0, 1, 2, 3}  # each step sampled from the weights that the one before published


def test_a_synchronous_run_repeats_with_its_seed_and_plain_readers_agree_with_ours(
    make_run: Make, tmp_path: Path
) -> None:
    """Every token of the two runs' first step is the same, though the answers met others in the engine's batch."""
    tables = []
    for place in ("first", "second"):
        run = make_run(run={"root": str(tmp_path / place)}, train={"steps": 1}, evaluate={"tasks": 2})
        run.finish()
        rows = open_dataset(run.root).table("transitions").to_pylist()
        tables.append({(row["rollout_id"], row["seq"]): row for row in rows if row["model_version"] == 0})
    assert tables[0].keys() == tables[1].keys()
    for key, row in tables[0].items():
        assert row["response_token_ids"] == tables[1][key]["response_token_ids"]
        # The last bits of a probability do depend on the batch.
        assert row["response_logprobs"] == pytest.approx(tables[1][key]["response_logprobs"], abs=1e-4)
    answers = [str(row["response_token_ids"]) for row in tables[0].values()]
    assert len(set(answers)) > len(answers) / 2  # each call has a seed of its own

    for table in ("transitions", "rollouts", "spans", "samples"):
        expected = open_dataset(run.root).table(table).num_rows
        folder = run.root / "data" / table
        assert expected > 0
        assert pyarrow.dataset.dataset(folder).to_table().num_rows == expected
        assert polars.read_parquet(folder / "*.parquet").height == expected
        counted = duckdb.sql(f"SELECT count(*) FROM '{folder}/*.parquet'").fetchall()
        assert counted == [(expected,)]


@pytest.mark.slow
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_killed_in_the_middle_costs_nothing(make_run: Make, component: str) -> None:
    """`kill -9`, and the run goes on, exactly. What the controller was running is not tried again here: it is lost."""
    lossy = component == "controller"
    run = make_run(
        agent={"max_attempts": 1 if lossy else 3},
        train={"refill_rounds": 2 if lossy else 0},
        evaluate={"tasks": 0},
    )
    run.start()
    wait_for(lambda: len(run.events("step")) >= 1, why=lambda: run.output.read_text() + run.logs())
    agents = run.root / "agents"
    before = len(list(agents.iterdir()))
    wait_for(
        lambda: len(list(agents.iterdir())) > before, why=run.logs
    )  # agents of the next step are at work
    run.kill(component)
    assert run.wait() == 0, run.output.read_text() + run.logs()
    assert_exact(run, steps=3)
    assert [event["rollouts"] for event in run.events("step")] == [8, 8, 8]  # none was given up
    rollouts = open_dataset(run.root).table("rollouts").to_pylist()
    lost = [row for row in rollouts if row["state"] == "failed" and row["cause"] in ("lost", "infra_error")]
    replacements = [row for row in rollouts if int(row["rollout_id"].rsplit(".", 1)[1]) >= 4]
    assert len(replacements) == (len(lost) if lossy else 0)
    assert not lossy or lost


def test_offline_training_needs_the_data_alone_and_makes_the_very_steps_that_were_made_online(
    make_run: Make,
) -> None:
    run = make_run(train={"steps": 2})
    run.finish()
    text = run.finish("--offline", str(run.root / "data"), "run.name=offline", "offline.batches=recorded")
    assert "policy-gradient: 16 rollouts in 4 groups, 2 steps (left out: 8 other_split)" in text
    online, offline = (
        load_file(folder / "checkpoint" / "model.safetensors")
        for folder in (run.root, run.root.parent / "offline")
    )
    # The second step began from weights that the first had published: the data were sampled by two versions.
    assert all(torch.equal(offline[name], online[name]) for name in online)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train.step=3"], "there is no setting `train.step`. Did you mean 'steps'?"),
        (["policy.model=/no/such/model"], "/no/such/model"),
        (["tasks.train=none.jsonl"], "none.jsonl cannot be read"),
        (["--resume"], "There is no run to resume"),
        (["--offline", "/tmp"], "is not a data set"),
        (["agent.target=''"], "The configuration needs `agent.target`."),
    ],
)
def test_a_users_mistake_is_one_sentence_and_no_traceback(
    make_run: Make, arguments: Sequence[str], sentence: str
) -> None:
    run = make_run()
    run.start(*arguments)
    assert run.wait() == 2, run.output.read_text()
    text = run.output.read_text()
    assert sentence in text
    assert "Traceback" not in text


def test_every_kind_of_trouble_gets_a_clear_answer_and_the_run_goes_on(make_run: Make) -> None:
    """Agents that crash, stay silent or send nonsense; rewards that are no numbers."""
    run = make_run(
        agent={"target": "troubled:solve", "evaluator": "troubled:evaluate", "max_attempts": 1},
        tasks={"train": "troubled:tasks", "val": None},
        train={"steps": 1, "groups_per_step": len(TROUBLES), "group_size": 2},
        evaluate={"tasks": 0},
    )
    run.finish()
    results = {
        path.parent.parent.name: json.loads(path.read_text())
        for path in (run.root / "agents").glob("*/*/result.json")
    }
    by_trouble = {r["output"]["trouble"]: r for r in results.values() if isinstance(r["output"], dict)}
    assert by_trouble["malformed"]["output"]["answered"][0] == 400
    assert by_trouble["wrong_key"]["output"]["answered"] == [401, "invalid_api_key"]
    assert by_trouble["unknown_model"]["output"]["answered"] == [404, "model_not_found"]
    assert by_trouble["oversized"]["output"]["answered"][0] == 413
    assert all(by_trouble[name]["state"] == "succeeded" for name in by_trouble if name != "nan")
    crashed = [r for r in results.values() if r["cause"] == "agent_error"]
    assert len(crashed) == 2
    assert all("the agent has a bug" in r["error"] for r in crashed)
    (step,) = run.events("step")
    counted = step["counters"]
    assert counted["rollout_agent_error"] == 2
    assert counted["rollout_infra_error"] == 2  # the evaluator's NaN is nobody's reward of zero
    assert counted["no_calls"] == 2
    assert step["rollouts"] == 2 * (len(TROUBLES) - 2)
    assert_exact(run, steps=1)


@pytest.mark.slow
def test_an_engine_that_dies_in_the_middle_of_answers_fails_no_rollout(make_run: Make) -> None:
    run = make_run(
        policy={"sampling": {"temperature": 1.0, "max_tokens": 300}},
        engine={"max_model_len": 2048},
        evaluate={"tasks": 0},
    )
    run.start()
    wait_for(lambda: len(run.events("step")) >= 1, why=lambda: run.output.read_text() + run.logs())
    before = len(list((run.root / "agents").iterdir()))
    wait_for(lambda: len(list((run.root / "agents").iterdir())) > before + 3, why=run.logs)
    run.kill("engine")
    assert run.wait() == 0, run.output.read_text() + run.logs()
    assert [event["rollouts"] for event in run.events("step")] == [8, 8, 8]
    assert_exact(run, steps=3)
    assert "restarted: engine" in (run.root / "report.html").read_text()
