"""`agl train --offline`: what a recorded data set teaches, and what it is refused for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recordings import Spoken, Told, assistant, user, write_recording

from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.trainer import cli
from agentlightning.trainer.advantage import score
from agentlightning.trainer.config import config_from
from agentlightning.trainer.credit import Outcome
from agentlightning.trainer.learner import Learner, LearnerSettings
from agentlightning.trainer.model import load_model, load_tokenizer
from agentlightning.trainer.objective import LossSettings
from agentlightning.trainer.offline import prepare_imitation, prepare_policy_gradient, train_offline
from agentlightning.trainer.recorded import Selection, batches, read_index, recorded_steps
from agentlightning.trainer.samples import Call, build_samples
from agentlightning.trainer.transcript import Transcriber


def configuration(model: Path, root: Path, *overrides: str) -> Any:
    document = {
        "run": {"name": "offline", "root": str(root)},
        "policy": {"name": "tiny", "model": str(model), "dtype": "float32"},
        "train": {"learning_rate": 1e-3, "groups_per_step": 2, "group_size": 2},
    }
    return config_from(document, overrides)


def recorded(seed: int = 0, *, rollouts: int = 8, shift: float = 0.0) -> list[Told]:
    """Groups of two rollouts of two calls that continue each other, with ids and log-probabilities."""
    generator = np.random.default_rng(seed)
    told = []
    for n in range(rollouts):
        prompt = [0, 10, 11, 12 + n // 2]
        first = generator.integers(2, 258, 3).tolist()
        second = generator.integers(2, 258, 3).tolist()
        middle = [*prompt, *first, 1, 0]
        calls = [
            Spoken(prompt=prompt, response=[*first, 1], logprobs=(generator.normal(-5.5 + shift, 0.3, 4)).tolist()),
            Spoken(prompt=middle, response=second, logprobs=(generator.normal(-5.5 + shift, 0.3, 3)).tolist()),
        ]  # fmt: skip
        told.append(Told(f"r{n}", calls, reward=float(n % 2), group=f"g{n // 2}", task=f"t{n // 2}"))
    return told


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def steps_of(root: Path) -> list[dict[str, Any]]:
    events = map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "step"]


def test_parquet_alone_gives_the_step_that_was_made_online(tiny_model: Path, tmp_path: Path) -> None:
    """The same samples and advantages, and bit-equal weights."""
    told = recorded(rollouts=4)
    config = configuration(tiny_model, tmp_path)
    online = build_samples(
        [
            Call(
                r.rollout_id,
                f"{r.rollout_id}-0-{seq}",
                seq=seq,
                group_id=r.group,
                policy="tiny",
                prompt_ids=np.array(c.prompt, np.int32),
                response_ids=np.array(c.response, np.int32),
                logprobs=np.array(c.logprobs, np.float32),
                model_version=0,
            )
            for r in told
            for seq, c in enumerate(r.calls)
        ]
    )
    scored = score(online, [Outcome(r.rollout_id, r.group, r.reward) for r in told])
    learner = Learner(load_model(tiny_model), LearnerSettings(lr=1e-3, dtype="float32"))
    learner.update(scored.samples, scored.advantages)

    data = open_dataset(write_recording(tmp_path / "data", told, files=3))
    (entries,) = batches(read_index(data).groups, groups_per_batch=2, passes=1, seed=0)
    prepared = prepare_policy_gradient(config, data, entries)
    assert len(prepared.samples) == 4
    for ours, theirs in zip(prepared.samples, scored.samples, strict=True):
        assert (ours.token_ids == theirs.token_ids).all()
        assert (ours.logprobs == theirs.logprobs).all()
    for ours, theirs in zip(prepared.advantages, scored.advantages, strict=True):
        assert (ours == theirs).all()
    train_offline(config, tmp_path / "data")
    trained = weights(tmp_path / "offline" / "checkpoint")
    for name, value in learner.merged_state_dict().items():
        assert torch.equal(trained[name], value), name


def test_old_data_are_corrected_by_the_ratio_to_what_sampled_them(tiny_model: Path, tmp_path: Path) -> None:
    """The update is that of Σ min(w, 2)·A·∇log π, w = π/μ: computed here without our loss, packing or samples."""
    told = recorded(rollouts=2, shift=-0.4)  # μ less likely than π: w between 1 and 2, some above
    data = open_dataset(write_recording(tmp_path / "data", told))
    config = configuration(tiny_model, tmp_path)
    (entries,) = batches(read_index(data).groups, groups_per_batch=1, passes=1, seed=0)
    prepared = prepare_policy_gradient(config, data, entries)
    settings = LearnerSettings(
        lr=1.0, eps=1.0, dtype="float32", max_grad_norm=1e9, loss=LossSettings(tis_cap=2.0)
    )
    learner = Learner(load_model(tiny_model), settings)
    result = learner.update(prepared.samples, prepared.advantages)
    assert 0 < result.metrics["tis_truncated_fraction"] < 1

    model = load_model(tiny_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1.0, weight_decay=0.0)
    total = torch.zeros(())
    for rollout, advantage in zip(told, (-0.5, 0.5), strict=True):
        first, second = rollout.calls
        ids = torch.tensor([[*(second.prompt or ()), *(second.response or ())]])
        logp = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        start, again = len(first.prompt or ()), len(second.prompt or ())
        sampled = torch.cat([logp[start - 1 : start + 3], logp[again - 1 : again + 2]])
        mu = torch.tensor([*(first.logprobs or ()), *(second.logprobs or ())])
        w = (sampled.detach() - mu).exp().clamp(max=2.0)
        total = total - (w * advantage * sampled).sum() / len(mu) / 2
    total.backward()
    optimizer.step()
    expected = dict(model.named_parameters())
    for name, parameter in learner.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)


def test_passes_are_many_and_each_rollout_is_in_each_once(tiny_model: Path, tmp_path: Path) -> None:
    write_recording(tmp_path / "data", recorded())
    train_offline(configuration(tiny_model, tmp_path, "offline.passes=3", "train.steps=5"), tmp_path / "data")
    steps = steps_of(tmp_path / "offline")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]  # two steps a pass; train.steps bounds them
    assert steps[4]["update"]["kl_sampler"] > 0  # the policy has moved away from what sampled the data
    index = read_index(open_dataset(tmp_path / "data"))
    plan = list(batches(index.groups, groups_per_batch=2, passes=3, seed=1))
    for number in range(3):
        seen = sorted(entry.rollout_id for batch in plan[2 * number : 2 * number + 2] for entry in batch)
        assert seen == sorted(f"r{n}" for n in range(8))
    assert [e.rollout_id for e in plan[0]] == ["r0", "r1", "r2", "r3"]
    assert plan != list(batches(index.groups, groups_per_batch=2, passes=3, seed=2))


def test_an_interrupted_run_goes_on_to_the_same_weights(tiny_model: Path, tmp_path: Path) -> None:
    write_recording(tmp_path / "data", recorded())
    whole = configuration(tiny_model, tmp_path, "offline.passes=2", "run.name=whole")
    train_offline(whole, tmp_path / "data")
    half = configuration(tiny_model, tmp_path, "offline.passes=2", "train.steps=3")
    train_offline(half, tmp_path / "data")
    rest = configuration(tiny_model, tmp_path, "offline.passes=2")
    train_offline(rest, tmp_path / "data", resume=True)
    assert [step["step"] for step in steps_of(tmp_path / "offline")] == [1, 2, 3, 4]
    ours, theirs = weights(tmp_path / "offline" / "checkpoint"), weights(tmp_path / "whole" / "checkpoint")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_batches_can_be_those_of_the_recorded_steps(tmp_path: Path) -> None:
    from agentlightning.proto.dataset import commit_manifest, write_files
    from agentlightning.trainer.samples import samples_table

    told = recorded()
    data = write_recording(tmp_path / "data", told)
    for step, rollouts in ((1, ("r2", "r3", "r6")), (2, ("r0", "r1", "r4"))):  # r5 and r7 had no tokens
        calls = [Call(r, f"{r}-0-0", prompt_ids=np.array([1], np.int32), response_ids=np.array([2], np.int32),
                      logprobs=np.zeros(1, np.float32)) for r in rollouts]  # fmt: skip
        table = samples_table(build_samples(calls).samples, step=step)
        commit_manifest(data, "trainer", write_files(data, f"step-{step}", {"samples": table}))
    dataset = open_dataset(data)
    groups = read_index(dataset).groups
    plan = batches(groups, groups_per_batch=1, passes=1, seed=0, steps=recorded_steps(dataset, groups))
    assert [[e.rollout_id for e in b] for b in plan] == [["r2", "r3", "r6", "r7"], ["r0", "r1", "r4", "r5"]]


def test_only_the_newest_complete_attempt_of_the_chosen_split_is_taken(tmp_path: Path) -> None:
    call = recorded(rollouts=1)[0].calls
    told = [
        Told("a", call, attempt=0, reward=0.0),
        Told("a", call, attempt=1, reward=1.0),
        Told("b", call, expected=3),
        Told("c", call, split="val"),
        Told("d", call, split=None, group=None, task="u"),
        Told("e", call, split=None, group=None, task="u"),
    ]
    index = read_index(open_dataset(write_recording(tmp_path, told)))
    assert [[(e.rollout_id, e.attempt) for e in group] for group in index.groups] == [
        [("a", 1)],
        [("d", 0), ("e", 0)],  # nobody named a group, but the task is one
    ]
    assert index.left_out == {"incomplete_rollout": 1, "other_split": 1}
    assert [e.rollout_id for e in read_index(open_dataset(tmp_path), Selection(splits=("val",))).entries] == [
        "c"
    ]


# --- imitation --------------------------------------------------------------------------------------------


def talk(*texts: str) -> list[Spoken]:
    """A conversation without ids: user and assistant in turn, a call each."""
    calls = []
    for turn in range(0, len(texts), 2):
        messages = [user(t) if i % 2 == 0 else assistant(t) for i, t in enumerate(texts[: turn + 1])]
        calls.append(Spoken(messages=messages, answer=assistant(texts[turn + 1]), policy=None))
    return calls


def transcriber(model: Path, longest: int = 512) -> Transcriber:
    return Transcriber(load_tokenizer(model), policy="tiny", verbatim_arguments=True, longest=longest)


def test_text_alone_is_learnt_with_what_the_assistant_said_and_its_end(
    tiny_model: Path, tmp_path: Path
) -> None:
    data = open_dataset(
        write_recording(tmp_path, [Told("r", talk("Hi", "Hello", "And?", "Bye"), reward=None)])
    )
    config = configuration(tiny_model, tmp_path, "offline.method=sft")
    prepared = prepare_imitation(config, data, transcriber(tiny_model), read_index(data).entries)
    (sample,) = prepared.samples  # the second call continues the first
    tokenizer = load_tokenizer(tiny_model)
    said = tokenizer.decode(sample.token_ids[sample.mask])
    assert said == "Hello<|im_end|>Bye<|im_end|>"
    assert (prepared.advantages[0] == sample.mask).all()
    whole = tokenizer.decode(sample.token_ids)
    assert whole.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n")
    assert prepared.sources == {"text": 2}
    assert not prepared.counters


def test_tools_are_in_the_prompt_and_their_results_are_not_learnt(tiny_model: Path, tmp_path: Path) -> None:
    """The prompt is the one that the engine renders for the same request."""
    from agentlightning.trainer.engine.chat import Template

    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    calls: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [called]}
    asked = [user("1 + 1?")]
    result = {"role": "tool", "tool_call_id": "1", "content": "the sum is 2"}
    told = [
        Spoken(messages=asked, answer=calls, tools=[tool], policy=None),
        Spoken(messages=[*asked, calls, result], answer=assistant("two"), tools=[tool], policy=None),
    ]
    data = open_dataset(write_recording(tmp_path, [Told("r", told)]))
    config = configuration(tiny_model, tmp_path, "offline.method=sft")
    prepared = prepare_imitation(config, data, transcriber(tiny_model, 2048), read_index(data).entries)
    (sample,) = prepared.samples
    tokenizer = load_tokenizer(tiny_model)
    learnt = tokenizer.decode(sample.token_ids[sample.mask])
    assert '"name": "add"' in learnt
    assert learnt.endswith("<|im_end|>two<|im_end|>")
    assert "the sum is 2" not in learnt
    assert "the sum is 2" in tokenizer.decode(sample.token_ids)
    rendered = Template(tokenizer, verbatim_arguments=True).render(asked, [tool])
    assert sample.token_ids[: len(rendered)].tolist() == rendered


def test_the_loss_of_imitation_is_the_negative_log_likelihood_and_falls(
    tiny_model: Path, tmp_path: Path
) -> None:
    write_recording(
        tmp_path / "data", [Told(f"r{n}", talk(f"Say {n}", f"{n}{n}{n}"), task=f"t{n}") for n in range(4)]
    )
    config = configuration(tiny_model, tmp_path, "offline.method=sft", "offline.passes=20", "train.steps=20",
                           "algorithm.aggregation=token-mean", "train.groups_per_step=4")  # fmt: skip
    train_offline(config, tmp_path / "data")
    losses = [step["update"]["loss"] for step in steps_of(tmp_path / "offline")]
    model, tokenizer = load_model(tiny_model), load_tokenizer(tiny_model)
    nll, count = 0.0, 0
    for n in range(4):
        prompt = tokenizer(
            f"<|im_start|>user\nSay {n}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
        )
        answer = tokenizer(f"{n}{n}{n}<|im_end|>", add_special_tokens=False).input_ids
        ids = torch.tensor([prompt.input_ids + answer])
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        nll, count = nll - float(logp[-len(answer) :].sum()), count + len(answer)
    assert losses[0] == pytest.approx(nll / count, rel=1e-4)
    assert losses[-1] < 0.7 * losses[0]


def test_rejection_sampling_imitates_the_good_rollouts_only(tiny_model: Path, tmp_path: Path) -> None:
    told = [Told(f"r{n}", talk("Go", f"answer {n}"), reward=n / 4, group=f"g{n % 2}") for n in range(4)]
    told.append(Told("failed", talk("Go", "x"), reward=9.0, state="failed", cause="timeout"))
    data = open_dataset(write_recording(tmp_path, told))
    good = read_index(data, Selection(min_reward=0.25))
    assert [e.rollout_id for e in good.entries] == ["r2", "r1", "r3"]
    assert good.left_out == {"below_min_reward": 1, "timeout": 1}
    best = read_index(data, Selection(best_of_group=1))
    assert [e.rollout_id for e in best.entries] == ["r2", "r3"]
    config = configuration(tiny_model, tmp_path, "offline.method=rft", "offline.best_of_group=1")
    prepared = prepare_imitation(config, data, transcriber(tiny_model), best.entries)
    assert {sample.rollout_id for sample in prepared.samples} == {"r2", "r3"}


def test_ids_on_record_are_taken_as_they_are_and_other_calls_by_name(
    tiny_model: Path, tmp_path: Path
) -> None:
    calls = [
        Spoken(
            prompt=[5, 6], response=[7, 1], logprobs=None
        ),  # the policy's own, even without log-probabilities
        Spoken(
            prompt=[5, 6], response=[7, 9999], messages=[user("q")], answer=assistant("a")
        ),  # another vocabulary
        Spoken(prompt=[5, 6], response=[7], policy="gpt", messages=[user("r")], answer=assistant("b")),
        Spoken(policy=None),
        Spoken(policy=None, messages=[user("q")], answer=assistant("x"), error="boom"),
        Spoken(policy=None, messages=[user("long" * 200)], answer=assistant("x")),
    ]
    data = open_dataset(write_recording(tmp_path, [Told("r", calls)]))
    config = configuration(tiny_model, tmp_path, "offline.method=sft")
    prepared = prepare_imitation(config, data, transcriber(tiny_model, 256), read_index(data).entries)
    assert prepared.counters == {
        "no_messages": 1,
        "call_error": 1,
        "too_long": 1,
    }
    assert prepared.sources == {"ids": 1, "text": 2}
    assert prepared.trained == 2 + 2 + 2


# --- refusals ---------------------------------------------------------------------------------------------


def test_policy_gradients_refuse_data_without_ids_with_reason_and_remedy(
    tiny_model: Path, tmp_path: Path
) -> None:
    told = [Told(f"r{n}", talk("Go", "x"), reward=float(n)) for n in range(2)]
    write_recording(tmp_path / "data", told)
    with pytest.raises(DataError, match=r"2 no_token_ids.*offline\.method=sft or rft"):
        train_offline(configuration(tiny_model, tmp_path), tmp_path / "data")
    for rollout in told:
        rollout.calls = [Spoken(prompt=[3], response=[4])]
    write_recording(tmp_path / "other", told)
    with pytest.raises(DataError, match="2 no_logprobs"):
        train_offline(configuration(tiny_model, tmp_path), tmp_path / "other")
    assert not (tmp_path / "offline").exists()  # refused before anything was begun


def test_what_cannot_be_compared_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    told = recorded(rollouts=2)
    told[1].group, told[1].task = "other", "other"
    write_recording(tmp_path / "data", told)
    with pytest.raises(DataError, match="nothing to compare: set algorithm"):
        train_offline(configuration(tiny_model, tmp_path), tmp_path / "data")
    with pytest.raises(DataError, match=r"left out: 2 other_split"):
        train_offline(configuration(tiny_model, tmp_path, "offline.splits=[val]"), tmp_path / "data")
    with pytest.raises(DataError, match="says nothing of 2 of 2 groups"):
        train_offline(
            configuration(tiny_model, tmp_path, "offline.batches=recorded", "algorithm.advantage=reinforce"),
            tmp_path / "data",
        )


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["offline.method=rft"], "which rollouts are good"),
        (["offline.min_reward=1"], "would bias the groups' statistics"),
        (["offline.method=sft", "offline.best_of_group=2"], "imitates everything"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_from({}, overrides)


def test_offline_settings_without_offline_data_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("offline: {passes: 2}\n")
    assert cli.main([str(tmp_path / "c.yaml")]) == 2
    assert "need --offline DATA" in capsys.readouterr().err
