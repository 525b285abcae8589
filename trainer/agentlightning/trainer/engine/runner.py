"""The model, its KV memory, and the three things that can be asked of them: a step, a score, new weights."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.trainer.engine.arena import Arenas
from agentlightning.trainer.engine.attention import ATTENTION, Segment, Step
from agentlightning.trainer.engine.prefix import Node, PrefixTree

__all__ = ["Runner", "read_weights"]

log = logging.getLogger(__name__)

SCORE_CHUNK = 256
"""Tokens per forward of a score, so that their logits over the whole vocabulary fit into memory."""


class Runner:
    """Runs steps of `model`. Used by one thread."""

    def __init__(self, model: PreTrainedModel, *, prefix_tokens: int) -> None:
        config = model.config.get_text_config()
        _refuse_other_attention(config)
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.version = 0
        self.vocabulary = int(config.vocab_size)
        self.device = model.device
        # See attention_forward: on a CPU attention computes in fp32.
        self.kv_dtype = torch.float32 if self.device.type == "cpu" else model.dtype
        heads = int(config.num_attention_heads)
        self.shape = (
            int(config.num_hidden_layers),
            int(getattr(config, "num_key_value_heads", None) or heads),
            int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        )
        self.tree = PrefixTree(self.shape, budget=prefix_tokens, dtype=self.kv_dtype, device=self.device)
        self.arenas = Arenas(self.shape, dtype=self.kv_dtype, device=self.device)

    def forward(self, segments: list[Segment]) -> Tensor:
        """Fill the segments' nodes and decode every row of the arenas: logits (rows, vocabulary), in their order."""
        arenas = list(self.arenas)
        step = Step.plan(segments, arenas, dtype=self.kv_dtype, device=self.device)
        first = sum(len(segment.tokens) for segment in segments)
        rows = sum(len(arena.rows) for arena in arenas)
        logits = self._run(step, torch.arange(first, first + rows, device=self.device))
        for arena in arenas:
            for tail in arena.rows:
                tail.tail_length += 1
        return logits

    def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """log p(token | those before it) for every token but the first, under the present weights."""
        logprobs: list[float] = []
        parent = Node(None, 0, [], torch.empty(0))
        for start in range(0, len(token_ids) - 1, SCORE_CHUNK):
            tokens = list(token_ids[start : min(start + SCORE_CHUNK, len(token_ids) - 1)])
            layers, heads, width = self.shape
            kv = torch.empty(layers, 2, heads, len(tokens), width, dtype=self.kv_dtype, device=self.device)
            node = Node(parent, start, tokens, kv)
            step = Step.plan(
                [Segment(node, kv, parent, tokens, start)], [], dtype=self.kv_dtype, device=self.device
            )
            logits = self._run(step, torch.arange(len(tokens), device=self.device)).float() / temperature
            following = torch.tensor(token_ids[start + 1 : start + 1 + len(tokens)], device=self.device)
            logprobs += (logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
            parent = node
        return logprobs

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        """Replace the weights by some that `read_weights` found good, and forget what the old ones computed."""
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        self.version = version
        self.tree.clear()

    def _run(self, step: Step, wanted: Tensor) -> Tensor:
        # A model must compute the logits of some token; which one does not matter where none is wanted.
        keep = wanted if len(wanted) else torch.zeros(1, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            out = self.model(
                input_ids=step.input_ids,
                position_ids=step.position_ids,
                use_cache=False,
                logits_to_keep=keep,
                step=step,
            )
        logits: Tensor = out.logits[0]
        return logits[: len(wanted)]


def read_weights(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights in a folder's safetensors, checked against the model: names, shapes, finite.

    Raises DataError with a sentence; the model is untouched.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"There is no .safetensors file in {folder}.")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file} cannot be read: {error}.") from error
    own = model.state_dict()
    tied = _tied(model, own)
    missing = [name for name in own if name not in found and tied.get(name) not in found]
    unknown = [name for name in found if name not in own]
    if missing or unknown:
        told = [
            f"{len(names)} {word}, such as {names[0]}"
            for names, word in ((missing, "missing"), (unknown, "unknown"))
            if names
        ]
        raise DataError(f"The weights in {folder} are not this model's: {'; '.join(told)}.")
    for name, tensor in found.items():
        if tensor.shape != own[name].shape:
            raise DataError(
                f"The weights in {folder} are not this model's: {name} has shape {list(tensor.shape)}, "
                f"the model's has {list(own[name].shape)}."
            )
        if not bool(tensor.isfinite().all()):
            raise DataError(f"The weights in {folder} hold NaN or infinity, in {name}.")
        if tied.get(name) in found and not torch.equal(tensor, found[tied[name]]):
            raise DataError(
                f"In {folder}, {name} differs from {tied[name]}, and this model shares one tensor for both."
            )
    return found


def _tied(model: PreTrainedModel, own: dict[str, Tensor]) -> dict[str, str]:
    """Name → the name of the other tensor that shares its memory, both ways."""
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in own.items():
        other = names.setdefault(tensor.data_ptr(), name)
        if other != name:
            tied[name], tied[other] = other, name
    return tied


def _refuse_other_attention(config: object) -> None:
    """What our attention does not compute must not be served wrongly."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    problem = None
    if kinds != {"full_attention"}:
        problem = f"layers of kind {', '.join(sorted(kinds - {'full_attention'}))}"
    elif getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        problem = "a sliding window"
    elif getattr(config, "attn_logit_softcapping", None):
        problem = "soft-capped attention"
    elif getattr(config, "is_encoder_decoder", False):
        problem = "an encoder"
    if problem:
        raise ConfigError(
            f"The embedded engine serves plain full attention; this model has {problem}. Use vLLM for it."
        )
