"""Attention over a token tree, without computing what the tree hides.

In depth-first order the rows [a, b) see nothing but themselves and the ancestors of a. So a block of rows needs the keys
of that one path and its own, however many other branches the tree has: the work grows with the depth of the tree, not
with its size. The backward pass computes the blocks again, so nothing of a block is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentlightning.proto.errors import ConfigError

__all__ = ["Block", "blocks_of", "use_tree_attention"]

NAME = "agentlightning_packed"
ROWS = {"cpu": 128, "cuda": 1024}
"""Rows of a block: few enough to skip other branches, enough for the kernel to be busy."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    start: int
    stop: int
    columns: Tensor  # (C,) ancestors of `start`, then the rows themselves
    hidden: Tensor  # (stop − start, C)


def blocks_of(end: npt.NDArray[np.int64], device: torch.device) -> list[Block]:
    """The blocks of a tree whose node i closes its subtree at `end[i]`."""
    rows = ROWS.get(device.type, ROWS["cpu"])
    blocks = []
    for start in range(0, len(end), rows):
        stop = min(start + rows, len(end))
        columns = np.concatenate([np.nonzero(end[:start] > start)[0], np.arange(start, stop)])
        row = np.arange(start, stop)[:, None]
        hidden = (columns > row) | (row >= end[columns])
        blocks.append(
            Block(start, stop, torch.from_numpy(columns).to(device), torch.from_numpy(hidden).to(device))
        )
    return blocks


def use_tree_attention(model: Any) -> None:
    """Let a model of transformers attend along `tree=blocks` if its decoder is given that, and as ever if not."""
    current = getattr(model.config, "_attn_implementation", None)
    if current == NAME:
        return
    if current != "sdpa":
        raise ConfigError(
            f"{type(model).__name__} must be loaded with attn_implementation='sdpa', not {current!r}."
        )
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.config._attn_implementation = NAME


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: Sequence[Block] | None = None,
    **kwargs: Any,  # transformers passes whatever a model's attention may want
) -> tuple[Tensor, None]:
    if tree is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ConfigError("Models that cap their attention or give it sinks cannot be trained.")
    # Under autocast rotary embeddings leave query and key in fp32, beside a value in bf16.
    query, key = query.to(value.dtype), key.to(value.dtype)
    out: Tensor = _TreeAttention.apply(query, key, value, scaling, tree)
    return out.transpose(1, 2).contiguous(), None


class _TreeAttention(torch.autograd.Function):
    """softmax(QKᵀ·scale)V, block by block. Plain products: torch's fused backward takes twice as long on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None, tree: Sequence[Block]
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.tree = query.shape[-1] ** -0.5 if scale is None else scale, tree
        out = torch.empty_like(query)
        for block in tree:
            q, k, v = _rows(query, key, block), key[0, :, block.columns], value[0, :, block.columns]
            p = _probabilities(q, k, block, ctx.scale).to(v.dtype)
            out[0, :, block.start : block.stop] = _heads(p @ v, query)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        d_query = torch.empty_like(query)
        # An ancestor's gradient comes from many blocks: added up in fp32.
        d_key = torch.zeros(key.shape[1:], dtype=torch.float32, device=key.device)
        d_value = torch.zeros(value.shape[1:], dtype=torch.float32, device=value.device)
        for block in ctx.tree:
            q, k, v = _rows(query, key, block), key[0, :, block.columns], value[0, :, block.columns]
            d_out = _rows(grads[0], key, block)
            p = _probabilities(q, k, block, ctx.scale)
            d_p = (d_out @ v.transpose(1, 2)).float()
            d_scores = (p * (d_p - (p * d_p).sum(-1, keepdim=True)) * ctx.scale).to(q.dtype)
            d_query[0, :, block.start : block.stop] = _heads(d_scores @ k, query)
            d_key.index_add_(1, block.columns, (d_scores.transpose(1, 2) @ q).float())
            d_value.index_add_(1, block.columns, (p.to(v.dtype).transpose(1, 2) @ d_out).float())
        return d_query, d_key.to(key.dtype)[None], d_value.to(value.dtype)[None], None, None


def _rows(x: Tensor, key: Tensor, block: Block) -> Tensor:
    """The rows of a block, (KV, H/KV · B, D): heads that share a key lie one after the other."""
    return x[0, :, block.start : block.stop].reshape(key.shape[1], -1, x.shape[-1])


def _heads(x: Tensor, query: Tensor) -> Tensor:
    """Back to (H, B, D)."""
    return x.reshape(query.shape[1], -1, x.shape[-1])


def _probabilities(q: Tensor, k: Tensor, block: Block, scale: float) -> Tensor:
    """(KV, H/KV · B, C) in fp32: scores of 16 bits would be too coarse."""
    scores = (q.float() * scale) @ k.float().transpose(1, 2)
    per_head = scores.view(-1, block.stop - block.start, len(block.columns))
    return per_head.masked_fill_(block.hidden, float("-inf")).softmax(-1).view_as(scores)
