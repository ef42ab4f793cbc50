"""The forward pass of Llama-shaped decoders without autograd: fewer operations, weights packed for the CPU's matmuls.

Shapes: N tokens, E hidden size, H query heads, K key/value heads, D head size.

Owns a second layout of the linear weights (the module's own are freed). Computes what models/attention.py's
hidden_states computes with transformers' modules: the linear layers in the model's dtype, the rest in float32
(models/operations.py, models/kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from rollover.models.adapters import Adapter, Adapters
from rollover.models.attention import Attention
from rollover.models.operations import Norm, Operations
from rollover.models.packed import PackedWeight
from rollover.models.vision import RowImages

# Layers: RMS norm, attention with rotary positions, RMS norm, gated MLP; nothing else is scaled or added.
_SHAPED_LIKE_LLAMA = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")


class PlainWeights:
    """Linear layers of one input, as the modules have them; updates of the parameters apply at once."""

    def __init__(self, linears: Sequence[torch.nn.Linear]) -> None:
        self.linears = linears
        self.adapters: Sequence[Adapter | None] = [None] * len(linears)

    def refresh(self, adapters: Sequence[Adapter | None]) -> None:
        """Use these adapters from now on."""
        self.adapters = adapters

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        out = [F.linear(x_NI, linear.weight, linear.bias) for linear in self.linears]
        out = [y if adapter is None else y + adapter(x_NI) for y, adapter in zip(out, self.adapters, strict=True)]
        return out[0] if len(out) == 1 else torch.cat(out, -1)


class PackedWeights:
    """Linear layers of one input as one packed matmul, with concatenated outputs."""

    def __init__(self, linears: Sequence[torch.nn.Linear], rows: int) -> None:
        self.biases = [linear.bias for linear in linears]
        assert len({bias is None for bias in self.biases}) == 1, "biases in all of them or in none"
        self.sizes = [linear.out_features for linear in linears]
        self.new: dict[int, torch.Tensor] = {}
        self.rows = rows
        self.packed = PackedWeight(torch.cat([linear.weight.detach() for linear in linears]), None, rows)
        self.refresh([None] * len(linears))

    def load(self, index: int, weight_OI: torch.Tensor) -> None:
        """Replace one layer's weight. Packed when all layers have one, else at the next `refresh`."""
        self.new[index] = weight_OI
        if len(self.new) == len(self.sizes):
            self._pack()

    def _pack(self) -> None:
        if len(self.new) < len(self.sizes):  # an update may have only one of several layers
            old = self.packed.plain().split(self.sizes)
            self.new = {i: self.new.get(i, weight) for i, weight in enumerate(old)}
        self.packed.load(torch.cat([self.new[i] for i in range(len(self.sizes))]))
        self.new = {}

    def refresh(self, adapters: Sequence[Adapter | None]) -> None:
        """Pack the loaded weights, and read the modules' biases and these adapters again."""
        if self.new:
            self._pack()
        biases = [bias.detach() for bias in self.biases if bias is not None]
        self.packed.bias_O = torch.cat(biases) if biases else None
        self.adapter = Adapter.concatenated(adapters, self.sizes)
        if self.adapter is not None:
            self.down = PackedWeight(self.adapter.down_RI, None, self.rows)
            self.up = PackedWeight(self.adapter.up_OR, None, self.rows)

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        out_NO = self.packed(x_NI)
        if self.adapter is None:
            return out_NO
        # Each product is rounded by itself, as in the trainer, though one operation could add the last one.
        return out_NO.add_(self.adapter.scaled(self.up(self.down(x_NI))))


class InferenceDecoder:
    """`hidden_states` of one model. `rows`: the usual number of tokens in a decode step.

    `adapters` are those of the model's layers; loaded ones apply after `refresh`.
    """

    def __init__(self, model: Any, rows: int, operations: Operations, adapters: Adapters | None = None) -> None:
        assert self.supported(model)
        backbone = model.get_decoder()
        first = model.get_input_embeddings().weight
        self.dtype, self.operations = first.dtype, operations
        self.embedding, self.rotary = backbone.embed_tokens, backbone.rotary_emb
        self._packed: dict[str, Callable[[torch.Tensor], None]] = {}
        names = {module: name for name, module in model.named_modules()}
        # In float32 the plain layout stays: tests compare engine and trainer bit by bit in it.
        packs = self.dtype == torch.bfloat16 and PackedWeight.supported(first.device, self.dtype)

        def weights(*linears: torch.nn.Linear) -> PlainWeights | PackedWeights:
            out = PackedWeights(linears, rows) if packs else PlainWeights(linears)
            if isinstance(out, PackedWeights):
                for index, linear in enumerate(linears):
                    linear.weight.data = linear.weight.data.new_empty(0)
                    self._packed[f"{names[linear]}.weight"] = partial(out.load, index)
            self._groups.append((out, [names[linear] for linear in linears]))
            return out

        self._adapters = adapters
        self._groups: list[tuple[PlainWeights | PackedWeights, list[str]]] = []
        self.layers = [_Layer(layer, weights) for layer in backbone.layers]
        self.norm = Norm(backbone.norm)

    @staticmethod
    def supported(model: Any) -> bool:
        """Return whether `model` is shaped like Llama, with rotary positions over whole heads."""
        backbone: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
        if type(backbone).__name__ not in _SHAPED_LIKE_LLAMA:
            return False
        config = model.config.get_text_config()
        if config.hidden_act not in ("silu", "swish"):
            return False
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return len(backbone.rotary_emb.inv_freq) * 2 == head_size

    def refresh(self) -> None:
        """Read norms, biases and adapters again, and pack, after the weights were replaced."""
        for weights, layers in self._groups:
            weights.refresh([None if self._adapters is None else self._adapters.get(layer) for layer in layers])
        for norm in (self.norm, *(norm for layer in self.layers for norm in layer.norms)):
            norm.reload()

    def load(self, name: str, tensor: torch.Tensor) -> int | None:
        """Replace the packed weight of parameter `name`; return its bytes, or None if it is not packed.

        Call `refresh` after the last one.
        """
        load = self._packed.get(name)
        if load is None:
            return None
        load(tensor.detach().to(self.embedding.weight.device, self.dtype))
        return tensor.numel() * self.dtype.itemsize

    def hidden_states(
        self,
        input_ids_N: torch.Tensor,
        position_ids_N: torch.Tensor,
        attention: Attention,
        images: RowImages | None = None,
    ) -> torch.Tensor:
        """Return the last hidden states [N, E], float32. Without autograd only."""
        operations, dtype = self.operations, self.dtype
        x_NE = F.embedding(input_ids_N, self.embedding.weight).float()
        if images is not None:
            x_NE = images.embedded(x_NE)
        cos_1ND, sin_1ND = self.rotary(x_NE[None], position_ids_N[None])
        cos_ND, sin_ND = cos_1ND[0], sin_1ND[0]
        # The next norm adds a block's output to the residual stream.
        added: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            normed_NE = operations.add_norm(x_NE, added, layer.norm, dtype)
            rows = layer.query_key_value(normed_NE)
            query_NHD, key_NKD = operations.rotate(
                rows, cos_ND, sin_ND, layer.query_key_norms, layer.heads, layer.kv_heads
            )
            value_NKD = rows.view(len(rows), -1, layer.head_size)[:, layer.heads + layer.kv_heads :]
            out_NHD = attention.attend(
                index, query_NHD, key_NKD, value_NKD, scale=layer.scale, window=layer.window, softcap=None
            )
            attended_NE = layer.out(out_NHD.reshape(len(rows), -1))
            normed_NE = operations.add_norm(x_NE, attended_NE, layer.mlp_norm, dtype)
            added = layer.down(operations.silu_gate(layer.gate_up(normed_NE)))
        return operations.add_norm(x_NE, added, self.norm, torch.float32)


class _Layer:
    def __init__(self, layer: Any, weights: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm, self.mlp_norm = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self.query_key_value = weights(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = weights(attention.o_proj)
        self.head_size, self.scale = attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.head_size
        self.kv_heads = attention.k_proj.out_features // self.head_size
        has_norms = hasattr(attention, "q_norm")
        self.query_key_norms = (Norm(attention.q_norm), Norm(attention.k_norm)) if has_norms else None
        self.norms = (self.norm, self.mlp_norm, *(self.query_key_norms or ()))
        # Mistral's modules read the window from the configuration, Qwen's have an attribute (None in full layers).
        self.window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        self.gate_up, self.down = weights(mlp.gate_proj, mlp.up_proj), weights(mlp.down_proj)
