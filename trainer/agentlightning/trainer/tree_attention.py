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
from torch.nn.functional import scaled_dot_product_attention

from agentlightning.proto.errors import ConfigError

__all__ = ["Block", "blocks_of", "use_tree_attention"]

NAME = "agentlightning_tree"
ROWS = {"cpu": 128, "cuda": 1024}
"""Rows of a block: few enough to skip other branches, enough for the kernel to be busy."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    start: int
    stop: int
    columns: Tensor  # (C,) ancestors of `start`, then the rows themselves
    visible: Tensor  # (1, 1, stop − start, C)


def blocks_of(end: npt.NDArray[np.int64], device: torch.device) -> list[Block]:
    """The blocks of a tree whose node i closes its subtree at `end[i]`."""
    rows = ROWS.get(device.type, ROWS["cpu"])
    blocks = []
    for start in range(0, len(end), rows):
        stop = min(start + rows, len(end))
        columns = np.concatenate([np.nonzero(end[:start] > start)[0], np.arange(start, stop)])
        row = np.arange(start, stop)[:, None]
        visible = (columns <= row) & (row < end[columns])
        blocks.append(
            Block(
                start,
                stop,
                torch.from_numpy(columns).to(device),
                torch.from_numpy(visible).to(device)[None, None],
            )
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
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None, tree: Sequence[Block]
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.tree = scale, tree
        out = torch.empty_like(query)
        for block in tree:
            k, v = key.index_select(2, block.columns), value.index_select(2, block.columns)
            out[:, :, block.start : block.stop] = _attend(
                query[:, :, block.start : block.stop], k, v, block, scale
            )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        (grad,) = grads
        d_query = torch.empty_like(query)
        # An ancestor's gradient comes from many blocks: added up in fp32.
        d_key = torch.zeros(key.shape, dtype=torch.float32, device=key.device)
        d_value = torch.zeros(value.shape, dtype=torch.float32, device=value.device)
        for block in ctx.tree:
            rows = slice(block.start, block.stop)
            q = query[:, :, rows].detach().requires_grad_()
            k = key.index_select(2, block.columns).detach().requires_grad_()
            v = value.index_select(2, block.columns).detach().requires_grad_()
            with torch.enable_grad():
                out = _attend(q, k, v, block, ctx.scale)
            d_query[:, :, rows], d_k, d_v = torch.autograd.grad(out, (q, k, v), grad[:, :, rows])
            d_key.index_add_(2, block.columns, d_k.float())
            d_value.index_add_(2, block.columns, d_v.float())
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _attend(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float | None) -> Tensor:
    shared = query.shape[1] // key.shape[1]
    if shared > 1:  # grouped heads
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=block.visible, scale=scale)
