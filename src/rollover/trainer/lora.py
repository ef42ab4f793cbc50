"""Adapters on the model's linear layers (peft), and their folder in a saved model, in peft's format."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from rollover.config import LoraConfig, ModelConfig
from rollover.models.adapters import base_weights, names
from rollover.models.load import LoadedModel, load_model

ADAPTER = "adapter"  # the folder of the adapters, inside that of the merged model
_PREFIX = "base_model.model."  # what peft puts before the names of a model


def add_lora(model: Any, lora: LoraConfig) -> Any:
    """Freeze the model and give the named linear layers adapters (peft). ValueError where a name matches none.

    The embeddings are refused: log-probs are computed from the plain head, which may be tied to the input embedding.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
    except ImportError as error:
        raise ValueError("model.lora.rank > 0 needs the package peft: pip install peft") from error
    # peft matches a name with the whole path of a module, or with its end.
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


def _adapted(plain: Any) -> Iterator[tuple[str, Any]]:
    """Names and layers of the plain model that have an adapter."""
    from peft.tuners.lora import LoraLayer

    yield from ((name, layer) for name, layer in plain.named_modules() if isinstance(layer, LoraLayer))


def _parts(layer: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A [R, I], B [O, R] and alpha / rank."""
    down_RI, up_OR = (part["default"].weight.detach() for part in (layer.lora_A, layer.lora_B))
    return down_RI, up_OR, layer.scaling["default"]


def adapter_weights(plain: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A, B and scale of every adapted layer, by the names of models/adapters.py. A and B are views."""
    for name, layer in _adapted(plain):
        down_RI, up_OR, scale = _parts(layer)
        yield from zip(names(name), (down_RI, up_OR, torch.tensor(scale)), strict=True)


def merged_weights(plain: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Named weights of the plain model, adapters merged: W + scale * B A in float32, rounded once to W's dtype."""
    merged = {}
    for name, layer in _adapted(plain):
        down_RI, up_OR, scale = _parts(layer)
        delta_OI = scale * (up_OR.float() @ down_RI.float())
        # GPT-2's layers store their weight transposed.
        weight, delta = layer.get_base_layer().weight.detach(), delta_OI.T if layer.fan_in_fan_out else delta_OI
        merged[f"{name}.weight"] = (weight.float() + delta).to(weight.dtype)
    for name, parameter in base_weights(plain):
        yield name, merged.get(name, parameter)


def save_adapter(model: Any, weights: Mapping[str, torch.Tensor], folder: Path, base: str) -> None:
    """Write what `PeftModel.from_pretrained(base_model, folder)` loads. `weights`: by the names of `model`, which is of
    `add_lora`. `base`: folder or hub id of the model without adapters."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    tensors = get_peft_model_state_dict(model, state_dict=dict(weights), save_embedding_layers=False)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(model.peft_config["default"])
    config.inference_mode, config.base_model_name_or_path = True, base
    config.save_pretrained(folder)


def merge_adapter(model: Any, adapter: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Add an adapter, as `read_adapter` gives it, to the weights of the plain model: as `merged_weights` does it."""
    parts = dict(adapter)
    for name, layer in list(model.named_modules()):
        down, up, scale = names(name)
        if down in parts:
            delta_OI = float(parts[scale]) * (parts[up].float() @ parts[down].float())
            delta = delta_OI.T if type(layer).__name__ == "Conv1D" else delta_OI  # GPT-2's
            with torch.no_grad():
                layer.weight.copy_(layer.weight.float() + delta.to(layer.weight.device))


def load_with_adapter(
    model: ModelConfig, *, dtype: torch.dtype, device: torch.device, merges: bool = False
) -> tuple[LoadedModel, list[tuple[str, torch.Tensor]]]:
    """The model at `model.path`, and the adapter that is to be applied to it; [] where there is none.

    A run with LoRA saves its merged weights, in which small updates are rounded away, and the adapter beside them. The
    adapter is used, with the model that it was trained over; where that model cannot be loaded, the merged weights are.
    A line on stderr says which. `merges`: whatever answers takes no adapters: they are merged into the model.
    """
    folder = Path(model.path).expanduser() / ADAPTER
    if not (folder / "adapter_config.json").is_file():
        return load_model(model, dtype=dtype, device=device), []
    base, adapter = read_adapter(folder)
    plain = model.model_copy(update={"path": base, "revision": ""})
    try:
        loaded = load_model(plain, dtype=dtype, device=device)
    except ValueError as error:
        what = f"the merged weights are used, in which small updates are rounded away: {error}"
        loaded, adapter = load_model(model, dtype=dtype, device=device), []
    else:
        what = f"its adapters are used over {base}: merged, small updates are rounded away"
        if merges:
            merge_adapter(loaded.model, adapter)
            what, adapter = f"its adapters are merged into {base}: servers are given whole weights", []
    print(f"rollover: notice: {model.path}: {what}", file=sys.stderr)
    return loaded, adapter


def read_adapter(folder: Path) -> tuple[str, list[tuple[str, torch.Tensor]]]:
    """What `save_adapter` was given as `base`, and the adapters as `adapter_weights` yields them."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    scale = torch.tensor(config["lora_alpha"] / config["r"])
    layers = sorted({name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors})
    parts: list[tuple[str, torch.Tensor]] = []
    for layer in layers:
        down, up, of_scale = names(layer)
        parts += [(name, tensors[_PREFIX + name]) for name in (down, up)] + [(of_scale, scale)]
    return config["base_model_name_or_path"], parts
