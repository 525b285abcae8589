from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentlightning.trainer.calls import Bodies
from agentlightning.trainer.samples import Call, Sample, SampleSet, Segment, build_samples

VOCABULARY = 31


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny_llama() -> Callable[..., Any]:
    """A random Llama that says something other than the uniform distribution."""

    def make(seed: int = 0, *, hidden: int = 32, tied: bool = False) -> Any:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=256,
            initializer_range=0.3,
            tie_word_embeddings=tied,
            attn_implementation="sdpa",
        )
        return LlamaForCausalLM(config).eval()

    return make


@pytest.fixture
def one_call() -> Callable[..., Call]:
    def make(
        prompt: Sequence[int], response: Sequence[int], /, *, seq: int = 0, rollout: str = "r", **fields: Any
    ) -> Call:
        if fields.keys() & {"request", "response"}:
            fields["bodies"] = Bodies([fields.pop("request", None)], [fields.pop("response", None)])
        defaults: dict[str, Any] = {
            "call_id": f"{rollout}-c{seq}",
            "group_id": "g",
            "logprobs": np.full(len(response), -1.0, np.float32),
            "model_version": 0,
        }
        return Call(
            rollout_id=rollout,
            seq=seq,
            prompt_ids=np.array(prompt, np.int32),
            response_ids=np.array(response, np.int32),
            **(defaults | fields),
        )

    return make


@pytest.fixture
def one_sample() -> Callable[..., Sample]:
    """A sample written by hand: tokens, and the spans that were sampled."""

    def make(
        tokens: Sequence[int],
        *spans: tuple[int, int],
        rollout: str = "r",
        group: str = "g",
        index: int = 0,
        first_seq: int = 0,
        logprobs: Sequence[float] | None = None,
        temperature: float = 1.0,
    ) -> Sample:
        mask = np.zeros(len(tokens), np.bool_)
        segments = []
        for k, (start, end) in enumerate(spans):
            mask[start:end] = True
            segments.append(Segment(f"{rollout}-{index}-{k}", first_seq + k, start, end, None, temperature))
        mu = np.full(len(tokens), -2.0) if logprobs is None else np.array(logprobs)
        return Sample(
            rollout_id=rollout,
            attempt=0,
            index=index,
            run_id="run",
            group_id=group,
            task_id="t",
            split="train",
            policy="p",
            token_ids=np.array(tokens, np.int32),
            mask=mask,
            logprobs=np.where(mask, mu, 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            segments=tuple(segments),
            call_ids=tuple(segment.call_id for segment in segments),
            reason="first",
        )

    return make


@pytest.fixture
def random_batch(one_call: Callable[..., Call]) -> Callable[..., SampleSet]:
    """Groups of rollouts that share prompts; rollouts of one to three calls that continue or branch."""

    def make(seed: int = 0, *, groups: int = 3, size: int = 4) -> SampleSet:
        generator = np.random.default_rng(seed)

        def draw(low: int, high: int) -> list[int]:
            return generator.integers(0, VOCABULARY, generator.integers(low, high)).tolist()

        system = draw(6, 7)
        calls = []
        for g in range(groups):
            prompt = system + draw(3, 9)
            for i in range(size):
                rollout, context = f"g{g}r{i}", prompt
                for seq in range(int(generator.integers(1, 4))):
                    response = draw(1, 7)
                    calls.append(
                        one_call(
                            context,
                            response,
                            seq=seq,
                            rollout=rollout,
                            group_id=f"g{g}",
                            logprobs=(-3 * generator.random(len(response))).astype(np.float32),
                        )
                    )
                    context = (
                        prompt + draw(2, 3) if generator.random() < 0.25 else context + response + draw(1, 4)
                    )
        return build_samples(calls)

    return make


@pytest.fixture
def one_per_call() -> Callable[[Sample], list[Sample]]:
    """A sample as if none of its calls had merged: one per call, with the tokens before it as context."""

    def split(sample: Sample) -> list[Sample]:
        parts = []
        for k, segment in enumerate(sample.segments):
            mask = np.zeros_like(sample.mask)
            mask[segment.start : segment.end] = True
            part = replace(
                sample,
                index=100 * sample.index + k,
                token_ids=sample.token_ids[: segment.end],
                mask=mask[: segment.end],
                logprobs=(sample.logprobs * mask)[: segment.end],
                versions=sample.versions[: segment.end],
                segments=(segment,),
            )
            parts.append(part)
        return parts

    return split
