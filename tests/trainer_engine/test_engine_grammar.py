"""Answers keep to the form that was asked for, and their log-probabilities are those of what was really drawn from."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import Collector, Served, make_tokenizer
from openai import OpenAI
from pydantic import BaseModel

from agentlightning.trainer.engine.grammar import Constraint, Form, Grammars, Offer
from agentlightning.trainer.engine.sampling import Draw, Sampling, sample
from agentlightning.trainer.engine.tools import HermesParser, ToolCall
from agentlightning.trainer.model import load_model

ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "sign": {"enum": ["plus", "minus"]},
    },
    "required": ["a", "sign"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "strict": True, "parameters": ADD}},
    {"type": "function", "function": {"name": "transfer_to_solver", "strict": True, "parameters": {"properties": {}, "additionalProperties": False}}},
]  # fmt: skip
OFFERS = (Offer("add", ADD, "tools.0", True),)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 4, "sign": "plus"}}</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def compiled(tokenizer: Any, form: Form) -> Constraint:
    return Grammars(tokenizer, vocabulary=len(tokenizer) + 5, end_tokens=frozenset({1})).compile(form)


@pytest.fixture(scope="module", params=["marks are tokens", "marks are spelt"])
def either(request: pytest.FixtureRequest) -> Any:
    """A tokenizer with tokens for the marks of a call, and one without."""
    return make_tokenizer(marks=request.param == "marks are tokens")


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            Form(OFFERS),
            ["", "Hello <b>", CALL, f"I add. {CALL}\n{CALL} Done."],
            [CALL.replace("4", "4.5"), CALL.replace("plus", "times"), "<tool_call>no", CALL.replace(": {", ":{")],
        ),
        (Form(OFFERS, parallel=False), ["Hello", CALL, f"I add. {CALL}"], [CALL + CALL, CALL + " Done."]),
        (Form(OFFERS, must_call=True), [CALL, f"{CALL}\n{CALL}"], ["", "Hello", f"I add. {CALL}", CALL + CALL]),
        (Form(OFFERS, must_call=True, parallel=False), [CALL], ["", f"{CALL}\n{CALL}"]),
        (Form(schema=SCHEMA), ['{"ok": true}'], ["", "{}", '{"ok": 1}', '{"ok":true}', '{"ok": true} ', CALL]),
        (Form(OFFERS, schema=SCHEMA), ['{"ok": true}', CALL], ["Hello", CALL + '{"ok": true}']),
        (Form((Offer("f", {"type": "object", "not": {}}, "", False),), must_call=True),
         ['<tool_call>{"name": "f", "arguments": {"x": [1, null]}}</tool_call>'], [CALL]),
    ],
)  # fmt: skip
def test_a_form_takes_what_fits_and_nothing_else(
    either: Any, form: Form, good: list[str], bad: list[str]
) -> None:
    def fits(text: str) -> bool:
        constraint = compiled(either, form)
        for token in [*either(text).input_ids, 1]:
            if constraint.forbidden()[token]:
                return False
            constraint.accept(token)
        return not constraint.problem

    assert [text for text in good if not fits(text)] == []
    assert [text for text in bad if fits(text)] == []


def test_any_walk_through_a_grammar_ends_in_calls_that_the_parser_reads(either: Any) -> None:
    draw = random.Random(0)
    walks = 0
    for _ in range(30):
        constraint, tokens = compiled(either, Form(OFFERS, must_call=True)), []
        while len(tokens) < 150 and (not tokens or tokens[-1] != 1):
            tokens.append(draw.choice((~constraint.forbidden()).nonzero()[:, 0].tolist()))
            constraint.accept(tokens[-1])
        if tokens[-1] == 1:
            walks += 1
            parser = HermesParser()
            pieces = [*parser.push(either.decode(tokens[:-1])), *parser.flush()]
            calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
            assert calls
            assert len(calls) == len(pieces)
            for call in calls:
                arguments = json.loads(call.arguments)
                assert call.name == "add"
                assert set(arguments) == {"a", "sign"}
                assert 0 <= arguments["a"] <= 99
    assert walks > 5


def test_penalties_and_biases_move_the_distribution() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    settings = Sampling(presence_penalty=0.5, frequency_penalty=0.25, biases=((3, 1.0), (1, -100.0)), seed=1)
    draw = Draw.of(settings)
    for token in (0, 0, 2):
        draw.accept(token)
    weights = [0.5 * math.exp(-0.5 - 0.5), 0.0, 0.15 * math.exp(-0.5 - 0.25), 0.1 * math.e]
    drawn = [
        sample(logits, [Draw(settings, random.Random(i), None, Counter(draw.counts))])[0] for i in range(2000)
    ]
    for token, weight in enumerate(weights):
        expected = weight / sum(weights)
        assert sum(d.token == token for d in drawn) / len(drawn) == pytest.approx(expected, abs=0.03)
        assert all(
            d.logprob == pytest.approx(math.log(expected), abs=1e-5) for d in drawn if d.token == token
        )


def test_logprobs_are_those_of_the_constrained_distribution(
    start: Callable[..., Collector], tiny_folder: Path
) -> None:
    engine = start()
    sampling = Sampling(
        0.8, seed=4, max_tokens=120, presence_penalty=0.3, frequency_penalty=0.2, biases=((9, 2.0),)
    )
    constraint = compiled_for(engine, Form(OFFERS, must_call=True))
    prompt = list(range(40, 60))
    (told,) = engine.run([prompt], sampling, constraint)
    model, tokens, counts = load_model(tiny_folder), list(prompt), Counter[int]()
    free = 0
    for emitted in told:
        with torch.no_grad():
            z = model(torch.tensor([tokens])).logits[0, -1].float()
        z[9] += 2.0
        for token, count in counts.items():
            z[token] -= 0.3 + 0.2 * count
        forbidden = constraint.forbidden()
        z[forbidden] = -torch.inf
        free += int((~forbidden).sum()) > 1
        expected = (z / 0.8).log_softmax(-1)
        assert emitted.logprob == pytest.approx(float(expected[emitted.token]), abs=1e-4)
        constraint.accept(emitted.token)
        counts[emitted.token] += 1
        tokens.append(emitted.token)
    assert free > 10


def compiled_for(engine: Collector, form: Form) -> Constraint:
    vocabulary = engine.scheduler.runner.vocabulary
    return Grammars(engine.tokenizer, vocabulary=vocabulary, end_tokens=engine.ends).compile(form)


def test_a_seed_gives_the_same_constrained_answer_alone_and_in_a_crowd(
    start: Callable[..., Collector],
) -> None:
    engine = start()
    prompts = [list(range(20 + i, 40 + i)) for i in range(12)]
    settings = [Sampling(seed=i, max_tokens=30, frequency_penalty=0.5 * (i % 2)) for i in range(12)]
    constraint = compiled_for(engine, Form(OFFERS, must_call=True))
    crowd = engine.run(prompts, settings, constraint)
    for prompt, setting, together in zip(prompts, settings, crowd, strict=True):
        (alone,) = engine.run([prompt], [setting], constraint)
        assert [e.token for e in alone] == [e.token for e in together]
    assert len({tuple(e.token for e in told) for told in crowd}) > 3


@pytest.fixture(scope="module")
def client(serve_module: Callable[[Path], Served], tiny_folder: Path) -> OpenAI:
    return OpenAI(base_url=serve_module(tiny_folder).url + "/v1", api_key="none")


ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "4?"}], "max_tokens": 200}


def test_an_untrained_model_calls_as_it_must_in_each_of_n_choices(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        **ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=4, seed=1, logprobs=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert len(answer.choices) == 4
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name in ("add", "transfer_to_solver")
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == ({"a", "sign"} if call.function.name == "add" else set())
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == len(choice.token_ids)  # type: ignore[attr-defined]


def test_a_named_tool_is_the_one_that_is_called_in_a_stream_too(client: OpenAI) -> None:
    chosen: Any = {"type": "function", "function": {"name": "transfer_to_solver"}}
    ask = {**ASK, "tools": TOOLS, "tool_choice": chosen, "parallel_tool_calls": False, "seed": 2}
    plain = client.chat.completions.create(**ask).choices[0].message
    with client.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (plain, streamed):
        (call,) = message.tool_calls or ()
        assert (call.function.name, call.function.arguments) == ("transfer_to_solver", "{}")


def test_a_structured_answer_is_parsed_by_the_client(client: OpenAI) -> None:
    class Verdict(BaseModel):
        right: bool
        points: list[bool]

    seeds = range(6)
    answers = [
        client.chat.completions.parse(**ASK, response_format=Verdict, seed=seed, frequency_penalty=1.0)
        for seed in seeds
    ]
    done = [answer.choices[0] for answer in answers if answer.choices[0].finish_reason == "stop"]
    assert done
    assert all(isinstance(choice.message.parsed, Verdict) for choice in done)
    free = client.chat.completions.create(**ASK, response_format={"type": "json_object"}, seed=1)
    assert (free.choices[0].message.content or "").startswith("{")


def test_a_bias_forbids_and_forces_tokens(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        **{**ASK, "max_tokens": 5}, logit_bias={"50": 100}, seed=1, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].token_ids == [50] * 5  # type: ignore[attr-defined]
