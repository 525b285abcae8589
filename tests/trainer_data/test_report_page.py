"""`report.html` and `agl inspect --tokens`: rollouts token by token."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from recordings import Spoken, Told, assistant, user, write_recording

from agentlightning.collector import inspect_cli
from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.token_view import Stretch, pieces, stretches
from agentlightning.trainer.config import config_from
from agentlightning.trainer.model import load_tokenizer
from agentlightning.trainer.offline import train_offline
from agentlightning.trainer.report import write_report
from agentlightning.trainer.showcase import choose, showcase

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An offline run over rollouts of a writer and a critic, one of whose histories was edited; one rollout failed."""
    root = tmp_path_factory.mktemp("reported")
    tokenizer = load_tokenizer(tiny_model)

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return encoded

    def call(prompt: str, answer: str, agent: str, version: int) -> Spoken:
        response = [*ids(answer), 1]
        return Spoken(
            messages=[user(prompt)],
            answer=assistant(answer),
            prompt=ids(prompt),
            response=response,
            logprobs=[-5.0] * len(response),
            agent=agent,
            version=version,
        )

    told = []
    for n in range(8):
        calls = [
            call(f"Write {n}. {EVIL} " + "x" * 400, f"héllo ✓ {n}", "writer", n // 4),
            call("Is it good?", "yes", "critic", n // 4),
            call("Summary: it was written.", "so", "writer", n // 4),
        ]
        told.append(Told(f"r{n}", calls, reward=(n % 4) / 4, group=f"g{n // 4}", task=f"t{n // 4}"))
    told.append(Told("broke", calls[:1], reward=None, group="g0", state="failed", cause="timeout"))
    write_recording(root / "data", told)
    config = config_from(
        {
            "run": {"name": "run", "root": str(root)},
            "policy": {"name": "tiny", "model": str(tiny_model), "dtype": "float32"},
            "train": {"groups_per_step": 1, "learning_rate": 1e-3},
        }
    )
    train_offline(config, root / "data")
    return root / "run"


class Page(HTMLParser):
    """What a browser would load, and whether every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.scripts = 0
        self.tokens: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self.tokens += [value or "" for name, value in attrs if name == "data-t"]
        if tag not in ("meta", "line", "circle", "polyline", "polygon", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "polyline", "polygon"):
            assert self.open.pop() == tag


def test_the_page_is_one_file_that_loads_nothing_and_runs_nothing_that_an_agent_wrote(run: Path) -> None:
    text = (run / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.loads == []
    assert "url(" not in text
    assert "@import" not in text
    assert page.scripts == 1  # ours; the agents' are text
    assert EVIL not in text


def test_a_rollout_is_shown_token_by_token(run: Path) -> None:
    text = (run / "report.html").read_text()
    page = Page()
    page.feed(text)
    samples = open_dataset(run).table("samples").to_pylist()
    newest = [row for row in samples if row["step"] == 2]
    expected = {
        f"{mu:.3f}|{new:.3f}|{a:.3f}|{v}"
        for row in newest
        for mu, new, a, v, m in zip(
            row["logprobs"], row["logprobs_new"], row["advantages"], row["versions"], row["mask"], strict=True
        )
        if m
    }
    assert expected <= set(page.tokens)
    for part in (
        "another agent&#39;s first call",
        "writer",
        "critic",
        "weight version 1",
        "timeout",
        "broken chain",
    ):
        assert part in text, part
    assert "é</i>" in text  # a character of two tokens stands at its last one
    assert "prefers-color-scheme: dark" in text


def test_what_is_shown_is_bounded_and_said_to_be(run: Path, tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    dataset = open_dataset(run.parent / "data")
    shown = showcase(dataset, open_dataset(run), lambda ids: tokenizer.decode(list(ids)), 3)
    assert len(shown) == 3
    context = shown[0].samples[0].stretches[0]
    assert context.left_out == 0
    import agentlightning.trainer.showcase as module

    before = module.CONTEXT, module.TOKENS
    module.CONTEXT, module.TOKENS = 100, 20
    try:
        shown = showcase(dataset, open_dataset(run), lambda ids: tokenizer.decode(list(ids)), 3)
    finally:
        module.CONTEXT, module.TOKENS = before
    parts = [part for rollout in shown for sample in rollout.samples for part in sample.stretches]
    assert sum(len(part.tokens) for part in parts) == 20
    assert parts[0].left_out > 300
    assert len(parts[0].text) < 110


def test_best_worst_failed_and_broken_are_chosen_before_random_ones() -> None:
    rollouts = [
        {"rollout_id": f"r{n}", "attempt": 0, "reward": n / 10, "state": "succeeded"} for n in range(10)
    ]
    rollouts.append({"rollout_id": "bad", "attempt": 0, "reward": None, "state": "failed"})
    samples = [
        {"rollout_id": f"r{n}", "step": n // 5, "reason": "edited" if n == 3 else "first"} for n in range(10)
    ]
    chosen = choose(rollouts, samples, 6)
    assert [kind for kind, _ in chosen] == ["best", "worst", "failed", "broken chain", "random", "random"]
    assert [row["rollout_id"] for _, row in chosen[:4]] == ["r9", "r5", "bad", "r3"]  # of the newest step
    assert chosen == choose(rollouts, samples, 6)
    assert len(choose(rollouts, samples, 0)) == 0


def test_a_long_run_stays_a_small_page(run: Path) -> None:
    from agentlightning.trainer.config import load_config
    from agentlightning.trainer.launch import Layout
    from agentlightning.trainer.metrics import Metrics

    metrics = Metrics(run / "metrics.jsonl")
    last = metrics.of("step")[-1]
    metrics.events += [{**last, "step": n} for n in range(3, 3000)]
    path = write_report(load_config(run / "config.yaml"), Layout(run), metrics, data=run.parent / "data")
    text = path.read_text()
    assert "of 2999 steps, evenly spaced" in text
    assert len(text) < 400_000
    assert ">2999</td>" in text


# --- for the terminal -------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert inspect_cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_the_inspector_shows_the_samples_of_an_offline_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, run, "--rollout", "r7", "--tokens")
    heads = [line for line in text.splitlines() if line.startswith("sample")]
    assert [re.sub(r"\d+ context", "context", head) for head in heads] == [
        "sample 0 of step 2: first (the first call of the attempt); 1 calls, 13 tokens trained, context",
        "sample 1 of step 2: agent (another agent's first call); 1 calls, 4 tokens trained, context",
        "sample 2 of step 2: edited (the history was changed or summarised); 1 calls, 3 tokens trained, context",
    ]
    line = next(line for line in text.splitlines() if line.endswith('"h"'))
    _, token, sampler, trainer, advantage, version, shown = line.split()
    assert (sampler, version, shown) == ("-5.000", "1", '"h"')
    assert float(advantage) == pytest.approx(0.375)
    assert float(trainer) != float(sampler)
    (row, *_) = json.loads(printed(capsys, run, "--rollout", "r7", "--tokens", "--json"))
    assert int(token) in row["token_ids"]
    assert "".join(row["text"]).endswith("héllo ✓ 7<|im_end|>")
    assert len(row["text"]) == len(row["mask"]) == len(row["advantages"])


def test_a_rollout_that_was_not_trained_is_shown_as_it_is_on_record(
    run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run.parent / "data"
    text = printed(capsys, data, "--rollout", "broke", "--tokens", "--tokenizer", tiny_model)
    assert text.startswith("call 0, not trained: 13 tokens sampled")
    assert "-5.000        –         –" in text
    without = printed(capsys, data, "--rollout", "broke", "--tokens")  # no tokenizer there: ids
    assert "context, " in without
    assert '"h"' not in without


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens"], "--tokens needs --rollout"),
        (["--rollout", "r7", "--tokenizer", "x"], "--tokenizer needs --tokens"),
        (["--rollout", "r7", "--tokens", "--tokenizer", "x"], "There is no tokenizer at x"),
        (["--rollout", "nobody", "--tokens"], "has no rollout 'nobody'"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(
    run: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_cli.main([str(run), *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_pieces_join_to_the_text_and_characters_stay_whole(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    text = "naïve ✓ 漢字 𝄞 <|im_end|>\n end"
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    parts = pieces(lambda part: tokenizer.decode(list(part), clean_up_tokenization_spaces=False), ids)
    assert len(parts) == len(ids)
    assert "".join(parts) == text
    assert "�" not in "".join(parts)
    broken = pieces(lambda part: tokenizer.decode(list(part)), ids[:9])  # ends inside a character
    assert broken[-1].endswith("�")


def test_stretches_are_runs_of_the_mask() -> None:
    mask: list[Any] = [False, False, True, False]
    assert list(stretches(mask)) == [Stretch(False, 0, 2), Stretch(True, 2, 3), Stretch(False, 3, 4)]
    assert list(stretches([])) == []
