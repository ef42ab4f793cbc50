"""Attention of packed rows, behind transformers' attention interface.

Shapes: N tokens of all sequences of a row, B sequences, T padded length, H query heads, K key/value heads, D head size.

Engine and trainer run transformers' own modules on one flattened row [1, N]; the object passed as `rollover_attention`
computes the attention (this file's PackedAttention, or the engine's cached ones). Owns no cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rollover.models.vision import RowImages

IMPLEMENTATION = "rollover"
_POSITIONS = ("position_ids", "cache_position")
# The supported entries of a configuration's layer_types.
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention"}


# Pairs [start, end) of indices.
Spans = Sequence[tuple[int, int]]


class Unsupported(ValueError):
    """The reason why a model cannot be run, as the end of a sentence that names it."""


class Attention(Protocol):
    """Attention of one forward pass, called once a layer with the row's queries, keys and values."""

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


def _interface(  # noqa: PLR0913 - the signature of transformers' attention interface
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
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if rollover_attention is None:
        raise Unsupported(
            "its layers do not hand on what Rollover's attention is given (rollover.models.attention.hidden_states)"
        )
    unknown = [k for k, v in others.items() if isinstance(v, torch.Tensor) and k not in _POSITIONS]
    if unknown:
        raise Unsupported(
            f"its attention needs {', '.join(unknown)} (attention sinks, a bias or the like), which Rollover's has not:"
            " without it, it would be another model"
        )
    scale = module.head_dim**-0.5 if scaling is None else scaling
    # Rotary embeddings of a float32 residual stream come out in float32: back to what the cache holds.
    # Autocast would round what attention computes in float32.
    with torch.autocast(value.device.type, enabled=False):
        out_NHD = rollover_attention.attend(
            module.layer_idx,
            query[0].transpose(0, 1).to(value.dtype),
            key[0].transpose(0, 1).to(value.dtype),
            value[0].transpose(0, 1),
            scale=scale,
            window=sliding_window,
            softcap=softcap,
        )
    return out_NHD.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _interface)


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a bool mask [queries, keys]; the queries are the last `num_queries` positions."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def grouped_attention(
    query_BHTD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
) -> torch.Tensor:
    """Compute `masked_attention` without a softcap, of H query heads over fewer K key heads, by fused GPU kernels.

    None of torch's kernels shares key heads under a mask: torch would write the scores of all heads, [B, H, T, S] in
    float32. Here the heads that share keys are stacked as more queries of one head.
    """
    num, heads, num_queries, size = query_BHTD.shape
    kv_heads = key_BKSD.shape[1]
    groups = heads // kv_heads
    if mask is None:
        key_BKSD, value_BKSD = (x.repeat_interleave(groups, dim=1) for x in (key_BKSD, value_BKSD))
        return F.scaled_dot_product_attention(query_BHTD, key_BKSD, value_BKSD, is_causal=True, scale=scale)
    query = query_BHTD.reshape(num, kv_heads, groups * num_queries, size)
    mask = mask.repeat(*(1,) * (mask.ndim - 2), groups, 1)
    out = F.scaled_dot_product_attention(query, key_BKSD, value_BKSD, attn_mask=mask, scale=scale)
    return out.reshape(num, heads, num_queries, size)


def masked_attention(
    query_BHTD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Compute attention -> [B, H, T, D], in float32 on a CPU.

    `mask`: bool, broadcast to [B, H, T, S] and alike for all heads; None: causal, T = S, and only without a softcap. On
    a CPU a linear layer gives a row the same bits whatever its batch: engine and trainer differ by their attention
    alone, and float32 inside it keeps their log-probs together, and is faster there (docs/log.md).
    """
    dtype = query_BHTD.dtype
    on_cpu = query_BHTD.device.type == "cpu"
    if on_cpu:
        query_BHTD, key_BKSD, value_BKSD = query_BHTD.float(), key_BKSD.float(), value_BKSD.float()
    groups = query_BHTD.shape[1] // key_BKSD.shape[1]
    if softcap is None:
        # The one fused GPU kernel that shares key heads knows neither a mask nor float32.
        if groups > 1 and not on_cpu and (mask is not None or dtype == torch.float32):
            return grouped_attention(query_BHTD, key_BKSD, value_BKSD, mask, scale=scale)
        return F.scaled_dot_product_attention(
            query_BHTD,
            key_BKSD,
            value_BKSD,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=groups > 1,
        ).to(dtype)
    assert mask is not None
    key_BHSD, value_BHSD = (x.repeat_interleave(groups, dim=1) for x in (key_BKSD, value_BKSD))
    scores = torch.matmul(query_BHTD, key_BHSD.transpose(2, 3)).float() * scale
    scores = softcap * torch.tanh(scores / softcap)
    probs = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
    return torch.matmul(probs.to(value_BHSD.dtype), value_BHSD).to(dtype)


# Sequences of a padded batch are at least this share of its longest one.
_MIN_FILL = 0.75
# Largest number of query-key pairs in one mask: 64 MB.
_MASK_PAIRS = 2**26


def similar_lengths(lengths: Mapping[int, int]) -> list[list[int]]:
    """Group the keys of `lengths` into batches, longest first, so that padding wastes little."""
    batches: list[list[int]] = []
    for key in sorted(lengths, key=lambda k: -lengths[k]):
        if not batches or lengths[key] < _MIN_FILL * lengths[batches[-1][0]]:
            batches.append([])
        batches[-1].append(key)
    return batches


class PackedAttention:
    """Block-diagonal causal attention of a row of blocks. `prefixes[i]` is the block that block i continues.

    A prompt's block is shared: the row holds it once, and each answer's block attends to it as if they stood together.
    Padding exists only inside attention, in batches of similar length; right padding needs no mask of its own, since a
    real query never looks at later positions. `lengths` are those of the blocks, each at least 1. `bidirectional`: for
    a block, the spans of its tokens that attend to each other, later ones included (images in Gemma 3). `mask_pairs`:
    above this number of query-key pairs the queries are computed in parts, each with its own mask.
    """

    def __init__(
        self,
        lengths: list[int],
        prefixes: list[int | None] | None = None,
        *,
        bidirectional: Mapping[int, Spans] = MappingProxyType({}),
        mask_pairs: int = _MASK_PAIRS,
    ) -> None:
        assert lengths and min(lengths) >= 1
        self.lengths = lengths
        self.prefixes: list[int | None] = prefixes if prefixes is not None else [None] * len(lengths)
        assert len(self.prefixes) == len(lengths)
        self.batches: list[tuple[int | None, list[int]]] = [(self.prefixes[i], [i]) for i in bidirectional]
        for prefix in dict.fromkeys(self.prefixes):
            members = {i: n for i, n in enumerate(lengths) if self.prefixes[i] == prefix and i not in bidirectional}
            self.batches += [(prefix, batch) for batch in similar_lengths(members)]
        self._bidirectional = bidirectional
        self._mask_pairs = mask_pairs
        self._masks: dict[tuple[int, int, int | None], torch.Tensor] = {}

    def _mask(self, num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Return a mask, built once for all layers."""
        key = (num_queries, num_keys, window)
        if key not in self._masks:
            self._masks[key] = causal_mask(num_queries, num_keys, window, device)
        return self._masks[key]

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
        queries, keys, values = (x.split(self.lengths) for x in (query_NHD, key_NKD, value_NKD))
        out: list[torch.Tensor] = [query_NHD] * len(self.lengths)
        for prefix, batch in self.batches:
            query, key, value = (pad_sequence([x[i] for i in batch], batch_first=True) for x in (queries, keys, values))
            if prefix is not None:
                key = torch.cat((keys[prefix].expand(len(batch), -1, -1, -1), key), 1)
                value = torch.cat((values[prefix].expand(len(batch), -1, -1, -1), value), 1)
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            spans = self._bidirectional.get(batch[0])
            if spans is None:
                out_BHTD = self._batch(query, key, value, window=window, scale=scale, softcap=softcap)
            else:
                mask = causal_mask(query.shape[2], key.shape[2], window, query.device)
                before = key.shape[2] - query.shape[2]
                for start, end in spans:
                    mask[start:end, before + start : before + end] = True
                out_BHTD = masked_attention(query, key, value, mask, scale=scale, softcap=softcap)
            out_BTHD = out_BHTD.transpose(1, 2)
            for i, row in zip(batch, out_BTHD, strict=True):
                out[i] = row[: self.lengths[i]]
        return torch.cat(out)

    def _batch(
        self,
        query_BHTD: torch.Tensor,
        key_BKSD: torch.Tensor,
        value_BKSD: torch.Tensor,
        *,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Return [B, H, T, D] for queries that are the last T of S positions."""
        num_queries, num_keys = query_BHTD.shape[2], key_BKSD.shape[2]
        if window is not None and window >= num_keys:
            window = None
        if window is None and num_queries == num_keys and softcap is None:
            return masked_attention(query_BHTD, key_BKSD, value_BKSD, None, scale=scale, softcap=None)
        # A soft cap writes the scores of all heads; else a mask may be repeated for those that share keys.
        num, heads = query_BHTD.shape[:2]
        pairs = num_keys * (num * heads if softcap is not None else heads // key_BKSD.shape[1])
        most = max(1, self._mask_pairs // pairs)
        if num_queries <= most:
            mask = self._mask(num_queries, num_keys, window, query_BHTD.device)
            return masked_attention(query_BHTD, key_BKSD, value_BKSD, mask, scale=scale, softcap=softcap)
        parts = []
        for start in range(0, num_queries, most):
            end = min(start + most, num_queries)
            seen = num_keys - num_queries + end
            part = (query_BHTD[:, :, start:end], key_BKSD[:, :, :seen], value_BKSD[:, :, :seen])
            mask = causal_mask(end - start, seen, window, query_BHTD.device)
            parts.append(masked_attention(*part, mask, scale=scale, softcap=softcap))
        return torch.cat(parts, 2)


def hidden_states(
    model: Any,
    input_ids_N: torch.Tensor,
    position_ids: torch.Tensor,
    attention: Attention,
    images: RowImages | None = None,
) -> torch.Tensor:
    """Return the last hidden states [N, hidden] of a flattened row, in float32; models/load.py loaded `model`.

    `position_ids`: [N], or [3, N] in time, height and width. `images`: features in place of some embeddings.

    With bfloat16 parameters only the matrix products are in bfloat16: the residual stream stays in float32. SmolLM2's
    grows to 540, where bfloat16 steps by 4, and log-probs of engine and trainer came apart (docs/log.md).
    """
    backbone = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    dtype = model.get_input_embeddings().weight.dtype
    of_tokens: dict[str, Any] = {}
    if getattr(backbone, "hidden_size_per_layer_input", 0):  # gemma3n, gemma4: embeddings per layer
        of_tokens["per_layer_inputs"] = backbone.get_per_layer_inputs(input_ids_N.unsqueeze(0))
    embeddings_NE = model.get_input_embeddings()(input_ids_N.unsqueeze(0))[0].float()
    if images is not None:
        embeddings_NE = images.embedded(embeddings_NE)
        of_tokens |= images.arguments(len(input_ids_N))
    with torch.autocast(input_ids_N.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = backbone(
            inputs_embeds=embeddings_NE.unsqueeze(0),
            position_ids=position_ids.unsqueeze(-2),
            use_cache=False,
            rollover_attention=attention,
            **of_tokens,
        )
    return out.last_hidden_state[0]


class _Probe(PackedAttention):
    """Records the heads of every layer, and refuses layers that the KV cache cannot hold."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.shape: tuple[int, int] | None = None
        self.layers: set[int] = set()
        self.widths: dict[int | None, int] = {}

    def attend(
        self, layer: int, query_NHD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, **options: Any
    ):
        heads, size = key_NKD.shape[1:]
        if value_NKD.shape[2] != size:
            raise Unsupported(
                f"a head of its keys has {size} numbers and one of its values {value_NKD.shape[2]} (as in multi-head"
                " latent attention), and the KV cache holds both alike"
            )
        self.shape = self.shape or (heads, size)
        if self.shape != (heads, size):
            raise Unsupported(
                f"its layers differ: {self.shape[0]} key/value heads of {self.shape[1]} numbers in one, {heads} of"
                f" {size} in another, and the KV cache holds all layers alike"
            )
        self.layers.add(layer)
        window = options["window"]
        self.widths[window] = self.widths.get(window, 0) + query_NHD.shape[1] * query_NHD.shape[2]
        return super().attend(layer, query_NHD, key_NKD, value_NKD, **options)


@torch.no_grad()
def _probe_one_token(model: Any) -> _Probe:
    """Run one token's forward pass."""
    probe = _Probe([1])
    zero = torch.zeros(1, dtype=torch.long, device=model.device)
    hidden_states(model, zero, zero, probe)
    return probe


def cache_shape(model: Any) -> tuple[int, int]:
    """Return (key/value heads, numbers a head) of every layer, from one token's forward pass."""
    shape = _probe_one_token(model).shape
    assert shape is not None, "a model that check_model passes has attention"
    return shape


def attention_widths(model: Any) -> dict[int | None, int]:
    """Return window (None: without one) -> query heads x head size, summed over its layers."""
    return _probe_one_token(model).widths


_INSTEAD = (
    "Use a decoder with plain attention in every layer, as Llama, Qwen, Mistral, Gemma, Phi or OLMo (docs/models.md)"
)


def refusal(model: str, reason: object) -> str:
    """Return the message for a model (its class or family) that cannot be run."""
    return f"{model} is not supported: {reason}. {_INSTEAD}"


def refusal_of_lookup(family: str, error: KeyError) -> str:
    """Return that message for a model whose classes have a list of attentions."""
    if error.args != (IMPLEMENTATION,):
        raise error
    return refusal(family, "it has attention classes of its own, beside transformers' attention interface")


def check_model(model: Any) -> None:
    """Raise ValueError unless tokens interact only in attention, in every layer, and the cache can hold it.

    State-space, convolution and linear-attention layers, and models with other attention classes, would silently mix
    the sequences of a packed row, and the engine would lose their state.
    """
    try:
        _probe(model)
    except Unsupported as error:
        raise ValueError(refusal(type(model).__name__, error)) from error
    except (TypeError, RuntimeError, AttributeError, IndexError, KeyError, ValueError) as error:
        reason = f"its modules do not run on a row of packed sequences ({type(error).__name__}: {error})"
        raise ValueError(refusal(type(model).__name__, reason)) from error


@torch.no_grad()
def _probe(model: Any) -> None:
    config = model.config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS)
    if kinds:
        raise Unsupported(
            f"it has layers of the kind {', '.join(kinds)}, and Rollover runs full and sliding attention alone"
        )
    first = torch.arange(3, 10, device=model.device) % config.vocab_size
    second = torch.cat(((first[:3] + 1) % config.vocab_size, first[3:]))
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3], device=model.device)
    outputs = []
    for ids in (first, second):
        attention = _Probe([3, 4])
        outputs.append(hidden_states(model, ids, positions, attention)[3:])
    layers = config.num_hidden_layers
    if attention.layers != set(range(layers)):
        raise Unsupported(
            f"{layers - len(attention.layers)} of its {layers} layers do not use transformers' attention interface, so"
            " they would see the other sequences of a batch, or keep a state that is not cached"
        )
    if not torch.allclose(*outputs, atol=1e-3, rtol=1e-3):
        raise Unsupported("sequences in one batch see each other outside of attention")
