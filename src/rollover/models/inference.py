"""The forward pass of Llama-shaped decoders without autograd: fewer operations, weights packed for the CPU's matmuls.

Shapes: N tokens, E hidden size, H query heads, K key/value heads, D head size.

Owns a second layout of the linear weights (the module's own are freed). Computes what models/attention.py's
hidden_states computes with transformers' modules: the linear layers in the model's dtype, the rest in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from rollover.models.attention import Attention
from rollover.models.packed import PackedWeight

# Their layers are: RMS norm, attention with rotary positions, RMS norm, gated MLP; nothing else is scaled or added.
_SHAPED_LIKE_LLAMA = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class PlainWeights:
    """Linear layers of one input, as the modules have them: updates of their parameters are seen at once."""

    def __init__(self, linears: Sequence[torch.nn.Linear]) -> None:
        self.linears = linears

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        out = [F.linear(x_NI, linear.weight, linear.bias) for linear in self.linears]
        return out[0] if len(out) == 1 else torch.cat(out, -1)


class PackedWeights:
    """Linear layers of one input as one packed matmul, whose outputs stand side by side."""

    def __init__(self, linears: Sequence[torch.nn.Linear], rows: int) -> None:
        self.biases = [linear.bias for linear in linears]
        assert len({bias is None for bias in self.biases}) == 1, "biases in all of them or in none"
        # Weights are packed together, but an update may bring one of several alone (LoRA): a plain copy of each stays.
        self.plain = [linear.weight.detach().clone() for linear in linears] if len(linears) > 1 else None
        whole = linears[0].weight.detach() if self.plain is None else torch.cat(self.plain)
        self.packed = PackedWeight(whole, None, rows)
        self.stale = False
        self.refresh()

    def load(self, index: int, weight_OI: torch.Tensor) -> None:
        """Replace one layer's weight, at the next `refresh` if there are several."""
        if self.plain is None:
            self.packed.load(weight_OI)
        else:
            self.plain[index].copy_(weight_OI)
            self.stale = True

    def refresh(self) -> None:
        """Pack what was loaded, and take the modules' biases as they are now."""
        if self.plain is not None and self.stale:
            self.packed.load(torch.cat(self.plain))
            self.stale = False
        biases = [bias.detach() for bias in self.biases if bias is not None]
        self.packed.bias_O = torch.cat(biases) if biases else None

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return self.packed(x_NI)


class InferenceDecoder:
    """`hidden_states` of one model. `rows`: the usual number of tokens in a decode step."""

    def __init__(self, model: Any, rows: int) -> None:
        assert self.supported(model)
        backbone = model.model
        first = next(model.parameters())
        self.dtype = first.dtype
        self.embedding, self.rotary = backbone.embed_tokens, backbone.rotary_emb
        self._packed: dict[str, Callable[[torch.Tensor], None]] = {}
        names = {module: name for name, module in model.named_modules()}
        # In float32 the plain layout stays: it is the one in which engine and trainer are compared bit by bit.
        packs = self.dtype == torch.bfloat16 and PackedWeight.supported(first.device, self.dtype)

        def weights(*linears: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
            if not packs:
                return PlainWeights(linears)
            packed = PackedWeights(linears, rows)
            for index, linear in enumerate(linears):
                linear.weight.data = linear.weight.data.new_empty(0)
                self._packed[f"{names[linear]}.weight"] = partial(packed.load, index)
            self._loaded.append(packed)
            return packed

        self._loaded: list[PackedWeights] = []
        self.layers = [_Layer(layer, weights) for layer in backbone.layers]
        self.norm = _Norm(backbone.norm)

    @staticmethod
    def supported(model: Any) -> bool:
        """Whether `model` is shaped like Llama, with rotary positions over whole heads."""
        if type(model).__name__ not in _SHAPED_LIKE_LLAMA:
            return False
        config = model.config
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return len(model.model.rotary_emb.inv_freq) * 2 == head_size

    def refresh(self) -> None:
        """The weights were replaced: take norms and biases again, and pack."""
        for packed in self._loaded:
            packed.refresh()
        for layer in self.layers:
            for norm in (layer.norm, layer.mlp_norm, layer.query_norm, layer.key_norm):
                if norm is not None:
                    norm.reload()
        self.norm.reload()

    def load(self, name: str, tensor: torch.Tensor) -> int | None:
        """Replace the packed weight of parameter `name`; its bytes, or None if that parameter is not packed.

        `refresh` after the last one.
        """
        load = self._packed.get(name)
        if load is None:
            return None
        load(tensor.detach().to(self.dtype))
        return tensor.numel() * self.dtype.itemsize

    def hidden_states(
        self, input_ids_N: torch.Tensor, position_ids_N: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Last hidden states [N, E], float32. Without autograd only."""
        x_NE = F.embedding(input_ids_N, self.embedding.weight).float()
        cos_1ND, sin_1ND = self.rotary(x_NE[None], position_ids_N[None])
        cos_N1D, sin_N1D = cos_1ND[0, :, None], sin_1ND[0, :, None]
        for index, layer in enumerate(self.layers):
            layer.add_attention(index, x_NE, cos_N1D, sin_N1D, attention, self.dtype)
            layer.add_mlp(x_NE, self.dtype)
        return self.norm(x_NE)


class _Layer:
    def __init__(self, layer: Any, weights: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm, self.mlp_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.query_key_value = weights(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = weights(attention.o_proj)
        self.heads = attention.q_proj.out_features // attention.head_dim
        self.kv_heads = attention.k_proj.out_features // attention.head_dim
        has_norms = hasattr(attention, "q_norm")
        self.query_norm = _Norm(attention.q_norm) if has_norms else None
        self.key_norm = _Norm(attention.k_norm) if has_norms else None
        self.head_size, self.scale = attention.head_dim, attention.scaling
        # Mistral's modules read the window from the configuration, Qwen's have one of their own (None in full layers).
        self.window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        self.gate, self.up, self.down = weights(mlp.gate_proj), weights(mlp.up_proj), weights(mlp.down_proj)
        self.activation = mlp.act_fn

    def add_attention(
        self,
        index: int,
        x_NE: torch.Tensor,
        cos_N1D: torch.Tensor,
        sin_N1D: torch.Tensor,
        attention: Attention,
        dtype: torch.dtype,
    ) -> None:
        """x += attention(norm(x)), in place."""
        num = x_NE.shape[0]
        normed_NE = self.norm(x_NE).to(dtype)
        everything = self.query_key_value(normed_NE).view(num, -1, self.head_size)
        both, value_NKD = everything.split((self.heads + self.kv_heads, self.kv_heads), 1)
        if self.query_norm is not None and self.key_norm is not None:
            query_NHD, key_NKD = both.split((self.heads, self.kv_heads), 1)
            both = torch.cat((self.query_norm(query_NHD), self.key_norm(key_NKD)), 1)
        # A copy in any case: it is turned in place.
        both = both.to(torch.float32, copy=True)
        first, second = both.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        both = both.mul_(cos_N1D).addcmul_(turned, sin_N1D).to(dtype)
        out_NHD = attention.attend(
            index,
            both[:, : self.heads],
            both[:, self.heads :],
            value_NKD,
            scale=self.scale,
            window=self.window,
            softcap=None,
        )
        x_NE += self.out(out_NHD.reshape(num, -1))

    def add_mlp(self, x_NE: torch.Tensor, dtype: torch.dtype) -> None:
        """x += mlp(norm(x)), in place."""
        normed_NE = self.mlp_norm(x_NE).to(dtype)
        x_NE += self.down(self.activation(self.gate(normed_NE)).mul_(self.up(normed_NE)))


class _Norm:
    """RMS norm over the last dimension, in float32 as transformers' modules compute it."""

    def __init__(self, norm: Any) -> None:
        self.norm = norm
        self.reload()

    def reload(self) -> None:
        self.weight = self.norm.weight.detach().float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.norm.variance_epsilon)
