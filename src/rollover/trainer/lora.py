"""Adapters on the model's linear layers (peft), and their folder in a saved model, in peft's format."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from rollover.config import LoraConfig, ModelConfig
from rollover.files import local_path, read_object
from rollover.logs import terminal
from rollover.models.adapters import base_weights, names
from rollover.models.load import LoadedModel, check_finite, load_model
from rollover.models.vision import takes_images, trains_tower

ADAPTER = "adapter"  # the folder of the adapters, inside that of the merged model
_PREFIX = "base_model.model."  # what peft puts before the names of a model
_ALL_LINEAR = "all-linear"  # peft's word
_IN_EXPERTS = {"gate_proj", "up_proj", "down_proj", "gate", "router", "w1", "w2", "w3"}  # names of their layers
_MAGNITUDE = "lora_magnitude_vector"  # peft's name of DoRA's lengths [O], behind that of the layer


def add_lora(model: Any, lora: LoraConfig) -> Any:
    """Freeze the model and add adapters (peft) to the configured linear layers: new ones, or those of lora.path.

    New adapters change nothing. ValueError if a name matches no layer. Embeddings are refused: log-probs are computed
    from the plain head, which may be tied to the input embedding.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
    except ImportError as error:
        raise ValueError("model.lora.rank > 0 needs the package peft: pip install peft") from error
    stacked = _has_stacked_experts(model)
    everything = lora.target_modules == [_ALL_LINEAR]
    if not everything:
        for target in lora.target_modules:
            matches = _layers_named(model, target, "target_modules", may_lack=stacked)
            if any(m is model.get_output_embeddings() or m is model.get_input_embeddings() for m in matches):
                raise ValueError(f"model.lora.target_modules: {target!r} is an embedding, which cannot have an adapter")
    for name in lora.exclude_modules:
        _layers_named(model, name, "exclude_modules")
    excluded: Any = list(lora.exclude_modules) or None
    if takes_images(model.config) and not trains_tower(model):
        excluded = _outside_of_text(model, lora.exclude_modules)
    targets: Any = _ALL_LINEAR if everything else list(lora.target_modules)
    if stacked:
        targets = _beside_experts(model, None if everything else lora.target_modules)
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  (peft divides by the rank: a float will do)
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=excluded,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"model.lora.target_modules = {lora.target_modules}: {error}") from error
    assert not any(type(module).__name__ == "ParamWrapper" for module in adapted.modules()), "adapters of no layer"
    if lora.path:
        _begin_with(adapted, lora)
    return adapted


def _outside_of_text(model: Any, excluded: Sequence[str]) -> str:
    """Return peft's pattern of all layers outside of the language model, and of those `excluded`."""
    decoder = model.get_decoder()
    path = re.escape(next(name for name, module in model.named_modules() if module is decoder))
    names = "|".join(rf"(?:.*\.)?{re.escape(name)}" for name in excluded)
    return rf"(?!{path}\.).*" + (f"|{names}" if names else "")


def _has_stacked_experts(model: Any) -> bool:
    """Return whether the weights of a layer's experts are one tensor [experts, ...]."""
    return any(parameter.ndim == 3 and ".experts." in name for name, parameter in model.named_parameters())


def _beside_experts(model: Any, targets: Sequence[str] | None) -> list[str]:
    """Return the `targets` (None: all linear layers) that can have adapters in a mixture of experts.

    peft applies a layer's name to the experts' stacked weights, too; neither engine nor merging supports such adapters.
    """
    linear = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    output = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    wanted = linear - {output.rpartition(".")[2]} if targets is None else set(targets)
    found = sorted(name for name in wanted if name in linear and name not in _IN_EXPERTS)
    if not found:
        raise ValueError(
            f"model.lora.target_modules = {json.dumps(sorted(wanted))}: these are layers of experts or routers, which"
            ' cannot have an adapter. Name layers of attention: ["q_proj", "k_proj", "v_proj", "o_proj"]'
        )
    if left_out := sorted(wanted - set(found)):
        terminal.info(f"model.lora: {', '.join(left_out)} get no adapter beside experts")
    return found


def _layers_named(model: Any, name: str, option: str, *, may_lack: bool = False) -> list[Any]:
    """Return the modules that peft matches to the name: by the whole path of a module, or its end.

    `may_lack`: in a mixture of experts all layers of that name may be in its experts.
    """
    matches = [m for n, m in model.named_modules() if n == name or n.endswith(f".{name}")]
    if not matches and not may_lack:
        raise ValueError(f"model.lora.{option}: the model has no layer {name!r}; remove it or correct it")
    return matches


def _begin_with(model: Any, lora: LoraConfig) -> None:
    """Load the adapters in the folder lora.path into the new ones of `model`.

    ValueError if they are of another kind, or of other layers, than [model.lora] configures.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    folder, said = local_path(lora.path), f"model.lora.path = {lora.path!r}"
    found, tensors = _read_folder(folder, said)
    for name, there, ours in (
        ("rank", found["r"], lora.rank),
        ("alpha", found.get("lora_alpha"), lora.alpha),
        ("rslora", bool(found.get("use_rslora")), lora.rslora),
        ("dora", bool(found.get("use_dora")), lora.dora),
    ):
        if there != ours:
            raise ValueError(
                f"{said}: for the adapters there model.lora.{name} is {json.dumps(there)}, and it is {json.dumps(ours)}"
                f" here. Set model.lora.{name} = {json.dumps(there)}"
            )
    expected = {name: t.shape for name, t in get_peft_model_state_dict(model, save_embedding_layers=False).items()}
    shapes = {name: t.shape for name, t in tensors.items()}
    if shapes != expected:
        wrong = min(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        base = found.get("base_model_name_or_path")
        what = "has no" if wrong not in shapes else "has a" if wrong not in expected else "has another shape of"
        raise ValueError(
            f"{said}: it {what} {wrong.removeprefix(_PREFIX)}, and so is of other layers or of another model. Set"
            f" model.lora.target_modules and exclude_modules as there ({found.get('target_modules')},"
            f" {found.get('exclude_modules')}), and model.path to its base model ({base})"
        )
    set_peft_model_state_dict(model, tensors)


def _read_folder(folder: Path, said: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read the configuration and the tensors of an adapter.

    ValueError, which begins with `said`, if it is missing, unreadable or of a kind that `[model.lora]` does not
    support.
    """
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(
                f"{said}: there is no {name}. Give a folder that peft's save_pretrained wrote, or model/adapter of a"
                " run (adapter_model.bin is a pickle, and not read)"
            )
    try:
        config = read_object(folder / "adapter_config.json", r=int)
        tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
        check_finite(tensors.items())
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{said}: it cannot be read: {error}. Copy it again") from error
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{said}: it holds {config.get('peft_type')!r}, and [model.lora] is LoRA. Give another folder")
    for name in ("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters", "layers_to_transform"):
        if config.get(name):
            raise ValueError(f"{said}: its {name} is {config[name]!r}, which [model.lora] cannot have")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{said}: it trained biases, which [model.lora] does not")
    return config, tensors


def _adapted(plain: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and layers of the plain model that have an adapter."""
    from peft.tuners.lora import LoraLayer

    yield from ((name, layer) for name, layer in plain.named_modules() if isinstance(layer, LoraLayer))


def _parts(layer: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return A [R, I], B [O, R] and alpha / rank."""
    down_RI, up_OR = (part["default"].weight.detach() for part in (layer.lora_A, layer.lora_B))
    return down_RI, up_OR, layer.scaling["default"]


def adapter_weights(plain: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield A, B and scale of every adapted layer, by the names of models/adapters.py. A and B are views."""
    for name, layer in _adapted(plain):
        down_RI, up_OR, scale = _parts(layer)
        yield from zip(names(name), (down_RI, up_OR, torch.tensor(scale)), strict=True)


def merged_weights(plain: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named weights of the plain model, adapters merged (`_merged`)."""
    merged = {}
    for name, layer in _adapted(plain):
        weight = layer.get_base_layer().weight.detach()
        lengths = (
            layer.lora_magnitude_vector["default"].weight.detach() if "default" in layer.lora_magnitude_vector else None
        )
        merged[f"{name}.weight"] = _merged(weight, *_parts(layer), lengths, layer.fan_in_fan_out)
    for name, parameter in base_weights(plain):
        yield name, merged.get(name, parameter)


def _merged(
    weight: torch.Tensor,
    down_RI: torch.Tensor,
    up_OR: torch.Tensor,
    scale: float,
    lengths_O: torch.Tensor | None,
    transposed: bool,
) -> torch.Tensor:
    """Return W + scale * B A in float32, rounded once to W's dtype.

    `lengths_O`: with DoRA, the length of each row (Liu et al. 2024, arXiv 2402.09353, eq. 5). `transposed`: for GPT-2's
    layers, which store W [I, O].
    """
    sum_OI = (weight.T if transposed else weight).float()
    sum_OI = sum_OI + (scale * (up_OR.float() @ down_RI.float())).to(weight.device)
    if lengths_O is not None:
        sum_OI = sum_OI * (lengths_O.float().to(weight.device) / sum_OI.norm(dim=1))[:, None]
    return (sum_OI.T if transposed else sum_OI).to(weight.dtype)


def save_adapter(model: Any, weights: Mapping[str, torch.Tensor], folder: Path, base: str) -> None:
    """Write what `PeftModel.from_pretrained(base_model, folder)` loads.

    `weights`: by the names of `model`, which `add_lora` made. `base`: folder or hub id of the model without adapters.
    """
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    tensors = get_peft_model_state_dict(model, state_dict=dict(weights), save_embedding_layers=False)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(model.peft_config["default"])
    config.inference_mode, config.base_model_name_or_path = True, base
    config.save_pretrained(folder)


def merge_adapter(model: Any, adapter: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Add an adapter from `read_adapter` to the weights of the plain model, like `merged_weights`."""
    parts = dict(adapter)
    for name, layer in list(model.named_modules()):
        down, up, scale = names(name)
        if down in parts:
            lengths, transposed = parts.get(f"{name}.{_MAGNITUDE}"), type(layer).__name__ == "Conv1D"
            with torch.no_grad():
                weight = layer.weight.detach()
                layer.weight.copy_(_merged(weight, parts[down], parts[up], float(parts[scale]), lengths, transposed))


def load_with_adapter(
    model: ModelConfig, *, dtype: torch.dtype, device: torch.device, merges: bool = False
) -> tuple[LoadedModel, list[tuple[str, torch.Tensor]]]:
    """Load the model at `model.path`, and the adapter to be applied to it; [] without one.

    A run with LoRA saves its merged weights, in which small updates are rounded away, and the adapter beside them. The
    adapter is used with the model that it was trained over; if that model cannot be loaded, the merged weights are.
    model.lora.path takes precedence. A line on stderr says which is used. `merges`: the engine takes no adapters: merge
    them into the model.
    """
    folder = local_path(model.lora.path or Path(model.path) / ADAPTER)
    if not (model.lora.path or (folder / "adapter_config.json").is_file()):
        return load_model(model, dtype=dtype, device=device), []
    key = "model.lora.path" if model.lora.path else "model.path"
    base, adapter = read_adapter(folder, f"{key} = {model.lora.path or model.path!r}")
    whose, plain = model.path, model.model_copy(update={"path": base, "revision": ""})
    if model.lora.path:
        whose, base, plain = model.lora.path, model.path, model
    try:
        loaded = load_model(plain, dtype=dtype, device=device)
    except ValueError as error:
        if model.lora.path:
            raise
        what = f"the merged weights are used, in which small updates are rounded away: {error}"
        loaded, adapter = load_model(model, dtype=dtype, device=device), []
    else:
        what = f"its adapters are used over {base}: merged, small updates are rounded away"
        if merges or any(name.endswith(_MAGNITUDE) for name, _ in adapter):
            merge_adapter(loaded.model, adapter)
            why = "servers are given whole weights" if merges else "those of DoRA are not applied beside the weights"
            what, adapter = f"its adapters are merged into {base}: {why}", []
    terminal.info(f"{whose}: {what}")
    return loaded, adapter


def read_adapter(folder: Path, said: str) -> tuple[str, list[tuple[str, torch.Tensor]]]:
    """Return the `base` of `save_adapter`, and the adapters (see `adapter_weights`); with DoRA also row lengths.

    ValueError, which begins with `said`, if the folder is damaged.
    """
    config, tensors = _read_folder(folder, said)
    rank = config["r"]
    layers = sorted({name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors})
    parts: list[tuple[str, torch.Tensor]] = []
    try:
        scale = torch.tensor(config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank))
        for layer in layers:
            down, up, of_scale = names(layer)
            parts += [(name, tensors[_PREFIX + name]) for name in (down, up)] + [(of_scale, scale)]
            lengths = f"{layer}.{_MAGNITUDE}"
            parts += [(lengths, tensors[_PREFIX + lengths])] if _PREFIX + lengths in tensors else []
        return config["base_model_name_or_path"], parts
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{said}: {folder} is damaged ({type(error).__name__}: {error}). Copy it again") from error
