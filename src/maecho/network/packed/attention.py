"""nn.MultiheadAttention with its four projections as layers of their own.

Torch keeps the projections of queries, keys and values in one packed parameter. No module's forward multiplies it, so
hooks cannot see its inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from maecho.network.packed.linears import ALL, Linears, Split

PARTS = ("q", "k", "v")


class SplitAttention(Split):
    """Computes softmax(Q Kᵀ / √d + mask) V for each head, like nn.MultiheadAttention in evaluation mode."""

    # What torch's transformer layers ask of an attention. None as the bias keeps them from their fused function.
    in_proj_bias = None
    in_proj_weight = None
    _qkv_same_embed_dim = False

    def __init__(self, module: nn.MultiheadAttention, linears: Linears | None = None):
        linears = linears or Linears()
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = module.embed_dim, module.num_heads, module.head_dim
        self.kdim, self.vdim, self.dropout = module.kdim, module.vdim, 0.0
        self.batch_first = module.batch_first
        sizes = (module.embed_dim,) * 3
        packed, bias = module.in_proj_weight, module.in_proj_bias
        for k, part in enumerate(PARTS):
            rows = slice(sum(sizes[:k]), sum(sizes[: k + 1]))
            stored_bias = None if bias is None else ("in_proj_bias", bias, rows)
            if packed is not None:
                weight = ("in_proj_weight", packed, rows)
            else:
                weight = (f"{part}_proj_weight", module.get_parameter(f"{part}_proj_weight"), ALL)
            self.add(part, linears, weight, stored_bias)
        out = module.out_proj
        stored_bias = None if out.bias is None else ("out_proj.bias", out.bias, ALL)
        self.add("out", linears, ("out_proj.weight", out.weight, ALL), stored_bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Takes the arguments of nn.MultiheadAttention. `is_causal` is a hint there too; the mask alone decides."""
        batched = query.dim() == 3
        first = self.batch_first or not batched
        # Examples come first at every layer, so that their rows can be told apart.
        q, k, v = (
            self.part(name)(x if first else x.transpose(0, 1))
            for name, x in zip(PARTS, (query, key, value), strict=True)
        )
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        mask: Tensor | None = None
        if attn_mask is not None:
            mask = _additive(attn_mask, q)
            mask = mask.unflatten(0, (-1, self.num_heads)) if mask.dim() == 3 else mask
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q)[:, None, None, :]
            mask = padding if mask is None else mask + padding
        weights = None
        if need_weights or torch.is_grad_enabled():  # torch.func has no rule for the function below
            scores = q @ k.mT / q.shape[-1] ** 0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            mixed = weights @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask)
        mixed = mixed.transpose(1, 2).flatten(2)
        out = self.part("out")(mixed if batched else mixed.squeeze(0))
        if batched and not first:
            out = out.transpose(0, 1)
        if weights is not None and need_weights:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return out, weights if need_weights else None


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers that are added to the scores. In a boolean mask, True means that a place is not looked at."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, float("-inf"))
    return mask.to(like)


def can_split(module: nn.MultiheadAttention) -> bool:
    """Whether it does no more than its four projections: no learned extra keys, no zero attention."""
    return module.bias_k is None and not module.add_zero_attn
