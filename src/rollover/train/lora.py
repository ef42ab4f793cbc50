"""Adapters on the model's linear layers (peft)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rollover.config import LoraConfig


def add_lora(model: Any, lora: LoraConfig) -> Any:
    """Freeze the model and give the named linear layers adapters (peft). ValueError where a name matches none.

    The embeddings are refused: log-probs are computed from the plain head, which may be tied to the input embedding.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
    except ImportError as error:
        raise ValueError("model.lora.rank > 0 needs the package peft: pip install peft") from error
    # Names as peft matches them: the whole path of a module, or its end.
    for target in lora.target_modules:
        matches = [m for n, m in model.named_modules() if n == target or n.endswith(f".{target}")]
        if not matches:
            raise ValueError(f"model.lora.target_modules: the model has no layer {target!r}; remove it or correct it")
        if any(m is model.get_output_embeddings() or m is model.get_input_embeddings() for m in matches):
            raise ValueError(f"model.lora.target_modules: {target!r} is an embedding, which cannot have an adapter")
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  (peft divides by the rank: a float will do)
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"model.lora.target_modules = {lora.target_modules}: {error}") from error


@torch.no_grad()
def merged_weights(plain: Any, *, adapted_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Named weights of the plain model, adapters merged: W + scale * B A, rounded once from the unchanged W.

    `adapted_only`: those of adapted layers alone.
    """
    from peft.tuners.lora import LoraLayer

    merged = set()
    for name, layer in plain.named_modules():
        if isinstance(layer, LoraLayer):
            base = layer.get_base_layer()
            assert isinstance(base, torch.nn.Module)
            weight = base.weight
            assert isinstance(weight, torch.Tensor)
            merged.add(f"{name}.base_layer.weight")
            delta: Any = layer.get_delta_weight  # pyright: ignore[reportAttributeAccessIssue]
            yield f"{name}.weight", (weight.float() + delta("default").float()).to(weight.dtype)
    if adapted_only:
        return
    for name, parameter in plain.named_parameters():
        if name not in merged and ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter.detach()
