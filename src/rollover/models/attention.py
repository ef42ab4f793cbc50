"""Attention of packed rows, behind transformers' attention interface.

Shapes: N tokens of all sequences of a row, B sequences, T padded length, H query heads, K key/value heads, D head size.

Engine and trainer run transformers' own modules on one flattened row [1, N]; what attention means there is decided by
the object passed as `rollover_attention` (this file's PackedAttention, or the engine's cached ones). Owns no cache.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IMPLEMENTATION = "rollover"


class Attention(Protocol):
    """One forward pass's attention: called once a layer with the row's queries, keys and values."""

    def attend(
        self,
        layer: int,
        query_NHD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor: ...


def _interface(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    rollover_attention: Attention | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if rollover_attention is None:
        raise ValueError("this model was loaded by Rollover: call it through rollover.models.attention.hidden_states")
    scale = module.head_dim**-0.5 if scaling is None else scaling
    out_NHD = rollover_attention.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scale,
        window=sliding_window,
        softcap=softcap,
    )
    return out_NHD.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _interface)


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Bool [queries, keys], True where a query may look; the queries are the last `num_queries` positions."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def causal_attention(
    query_BHTD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of the last T of S positions -> [B, H, T, D]. Grouped-query heads are expanded as views."""
    batch, heads, num_queries, size = query_BHTD.shape
    kv_heads, num_keys = key_BKSD.shape[1], key_BKSD.shape[2]
    if heads != kv_heads:
        expand = (batch, kv_heads, heads // kv_heads, num_keys, size)
        key_BKSD = key_BKSD[:, :, None].expand(expand).reshape(batch, heads, num_keys, size)
        value_BKSD = value_BKSD[:, :, None].expand(expand).reshape(batch, heads, num_keys, size)
    if window is not None and window >= num_keys:
        window = None
    if softcap is None:
        square = window is None and num_queries == num_keys
        mask = None if square else causal_mask(num_queries, num_keys, window, query_BHTD.device)
        return F.scaled_dot_product_attention(
            query_BHTD, key_BKSD, value_BKSD, attn_mask=mask, is_causal=square, scale=scale
        )
    scores = torch.matmul(query_BHTD, key_BKSD.transpose(2, 3)) * scale
    scores = softcap * torch.tanh(scores / softcap)
    mask = causal_mask(num_queries, num_keys, window, query_BHTD.device)
    scores = scores.float().masked_fill(~mask, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1).to(query_BHTD.dtype), value_BKSD)


class PackedAttention:
    """Block-diagonal causal attention: each of the row's sequences sees itself only.

    The linear layers run on the packed row; padding to the longest sequence exists only inside attention. Right padding
    is safe without a mask: a real query never looks at later positions.
    """

    def __init__(self, lengths: list[int]) -> None:
        assert lengths and min(lengths) >= 1
        self.lengths = lengths
        self.uniform = len(set(lengths)) == 1

    def _pad(self, x_NHD: torch.Tensor) -> torch.Tensor:
        if self.uniform:
            return x_NHD.unflatten(0, (len(self.lengths), self.lengths[0])).transpose(1, 2)
        return pad_sequence(list(x_NHD.split(self.lengths)), batch_first=True).transpose(1, 2)

    def attend(
        self,
        layer: int,
        query_NHD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        out_BTHD = causal_attention(
            self._pad(query_NHD),
            self._pad(key_NKD),
            self._pad(value_NKD),
            scale=scale,
            window=window,
            softcap=softcap,
        ).transpose(1, 2)
        if self.uniform:
            return out_BTHD.flatten(0, 1)
        return torch.cat([row[:n] for row, n in zip(out_BTHD, self.lengths, strict=True)])


def hidden_states(
    model: Any, input_ids_N: torch.Tensor, position_ids_N: torch.Tensor, attention: Attention
) -> torch.Tensor:
    """Last hidden states [N, hidden] of a flattened row; `model` is a causal LM loaded by models/load.py."""
    backbone = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    out = backbone(
        input_ids=input_ids_N.unsqueeze(0),
        position_ids=position_ids_N.unsqueeze(0),
        use_cache=False,
        rollover_attention=attention,
    )
    return out.last_hidden_state[0]
