"""A tiny model with a real tokenizer, and what tests need to run an engine on it."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentlightning.trainer.engine.errors import RequestError
from agentlightning.trainer.engine.grammar import Constraint
from agentlightning.trainer.engine.sampling import Sampling
from agentlightning.trainer.engine.scheduler import Event, Scheduler
from agentlightning.trainer.engine.sequence import Emitted, Sequence
from agentlightning.trainer.engine.server import Engine
from agentlightning.trainer.model import TOOLS_TEMPLATE

CONTEXT = 512
SCRIPT = ["<tool_call>", '{"name": "add", "arguments": ', '{"a":  1, "b": 2}', "}", "</tool_call>"]
"""What the scripted model says after `assistant\\n`: a call, its arguments with a letter (a space) of its own."""

TEXT = (
    "The calculator adds two numbers and tells their sum. The user asks a question, the assistant thinks, "
    "calls a tool and answers it. Äpfel, naïve, 中文 and 🙂 are characters of more than one byte. "
)


def make_tokenizer(*, marks: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE with some merges: some characters are several tokens, some tokens several characters.

    `marks`: with the tokens of SCRIPT, those of a call's marks among them.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    if marks:
        tokenizer.add_tokens(SCRIPT)
    else:  # as many have it: what is no token is this one
        tokenizer.unk_token = "<|im_end|>"
    tokenizer.chat_template = TOOLS_TEMPLATE.read_text()
    return tokenizer


def save_tiny(folder: Path, seed: int = 0) -> Path:
    """A random Llama: two layers, two heads of 32 on one KV head."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            initializer_range=0.15,  # so that the answers vary
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_scripted(folder: Path) -> Path:
    """A Llama that knows only which token follows which: after a newline it says SCRIPT, then ends."""
    tokenizer = make_tokenizer()
    size = len(tokenizer)
    hidden = size + (-size) % 64
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=hidden,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=hidden // 32,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    says = tokenizer.convert_tokens_to_ids(SCRIPT)
    follows = dict(zip([tokenizer("\n").input_ids[-1], *says], [*says, tokenizer.eos_token_id], strict=True))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, hidden))
        model.lm_head.weight.zero_()
        for token, then in follows.items():
            model.lm_head.weight[then, token] = 5.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Collector:
    """Runs sequences on a scheduler and waits for their ends."""

    scheduler: Scheduler
    tokenizer: Any
    ends: frozenset[int]
    events: dict[int, list[Emitted | RequestError]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def deliver(self, events: list[Event]) -> None:
        with self.changed:
            for sequence, event in events:
                self.events[id(sequence)].append(event)
            self.changed.notify_all()

    def begin(
        self, prompts: list[list[int]], samplings: list[Sampling], constraint: Constraint | None = None
    ) -> list[Sequence]:
        sequences = [
            Sequence.start(
                p, s, tokenizer=self.tokenizer, end_tokens=self.ends, client=None, constraint=constraint
            )
            for p, s in zip(prompts, samplings, strict=True)
        ]
        for sequence in sequences:
            self.events[id(sequence)] = []
        self.scheduler.submit(sequences)
        return sequences

    def told(self, sequence: Sequence) -> list[Emitted]:
        return [event for event in self.events[id(sequence)] if isinstance(event, Emitted)]

    def wait(self, until: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(until, timeout=60), "the engine did not get there in a minute"

    def run(
        self,
        prompts: list[list[int]],
        samplings: list[Sampling] | Sampling,
        constraint: Constraint | None = None,
    ) -> list[list[Emitted]]:
        if isinstance(samplings, Sampling):
            samplings = [samplings] * len(prompts)
        sequences = self.begin(prompts, samplings, constraint)
        self.wait(lambda: all(told and told[-1].finish for told in map(self.told, sequences)))
        return [self.told(sequence) for sequence in sequences]


@dataclass
class Served:
    url: str
    engine: Engine
