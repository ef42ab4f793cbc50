"""Finds and loads the policy: alias, local folder, hub id or fsspec URL -> a module whose attention is ours.

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

# Of transformers' own loading, which sets variables of the process meanwhile: two at once lose tied weights.
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
        """Every token id that the model knows is below it. Of the largest ones the tokenizer may have no text."""
        return self.model.config.get_text_config().vocab_size


def _quiet() -> None:
    """Turn off transformers' lines and progress bars; those of downloads from the hub stay as they are."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    logging.getLogger("transformers").setLevel(logging.ERROR)
    are_off = are_progress_bars_disabled()
    disable_progress_bar()  # those of the hub, too
    if not are_off:
        enable_progress_bars()


def load_model(
    cfg: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> LoadedModel:
    """Load model and tokenizer. Errors that a user can mend are ValueErrors naming model.path."""
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
    """Tokenizer, configuration and shapes of a model whose weights are elsewhere: no weight is read. Errors as
    `load_model`. `filled_later`: its weights come from another process, and then it is what `load_model` gives."""
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
        with contextlib.suppress(OSError):  # it has none, and what the configuration says holds
            model.generation_config = GenerationConfig.from_pretrained(path, **source)
    except (OSError, ValueError, ImportError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model.path = {cfg.path!r} cannot be read: {_damage(path, error)}") from error
    _freeze_tower(model, cfg)
    _keep_float32(model)
    processor = build_processor(path, source, cfg.processor_kwargs, tokenizer, config)
    return LoadedModel(model.eval(), tokenizer, path, processor)


def make_outline(loaded: LoadedModel, cfg: ModelConfig, dtype: torch.dtype) -> Any:
    """The modules of `loaded`, which `cfg` describes, without weights, which would be in `dtype`."""
    config = loaded.model.config
    with _loading, torch.device("meta"):
        outline = _model_class(config).from_config(config, trust_remote_code=cfg.trust_remote_code, dtype=dtype)
    outline.generation_config = loaded.model.generation_config
    return outline


def _model_class(config: Any) -> Any:
    """transformers' auto class for a causal LM, or for one that takes images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


def _attention_of(config: Any) -> str | dict[str, str]:
    """Ours; of a model that takes images, ours for its language model alone: a tower refuses it, rightly."""
    if not takes_images(config):
        return attention.IMPLEMENTATION
    return {"": "eager", "text_config": attention.IMPLEMENTATION, "vision_config": "sdpa"}


def _freeze_tower(model: Any, cfg: ModelConfig) -> None:
    if cfg.vision == "frozen" and takes_images(model.config):
        for _, parameter in tower_parameters(model):
            parameter.requires_grad_(False)


def _source_of(cfg: ModelConfig, *, needs_weights: bool = True) -> tuple[str, dict[str, Any]]:
    """The folder or hub id of the model, and how from_pretrained shall get it."""
    path = resolve_path(cfg, needs_weights=needs_weights)
    source: dict[str, Any] = {"trust_remote_code": cfg.trust_remote_code}
    if cfg.revision:
        source["revision"] = cfg.revision
    if not Path(path).is_dir():
        source |= _hub_source(cfg, path)
    return path, source


def _hub_source(cfg: ModelConfig, hub_id: str) -> dict[str, Any]:
    """How from_pretrained shall get a hub id: from the cache alone where the hub cannot be asked.

    Raises ValueError where it is not in the cache either. A model that stands in for another one is said.
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
    """The tokenizer, before the weights, which take longer. Its chat template has the arguments of the configuration
    wherever it is applied."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **source)
        if cfg.chat_template_kwargs:
            tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **cfg.chat_template_kwargs)
        return tokenizer
    except Exception as error:  # boundary: a damaged file raises errors of any kind
        said, folder = f"model.path = {cfg.path!r} cannot be loaded", Path(path)
        if not folder.is_dir() or (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"{said}: its tokenizer (tokenizer.json) cannot be read: {_damage(path, error)}"
            ) from error
        # What transformers says of it is a list of packages that could convert files which are not there.
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
    """The first file of a model's folder that is damaged; what the library says where there is none."""
    for file in sorted([*Path(path).glob("*.json"), *Path(path).glob("*.jinja")]):
        try:
            text = file.read_bytes().decode("utf-8")
            if file.suffix == ".json" and not isinstance(found := json.loads(text), dict):
                raise ValueError(f"it holds {found!r:.50}")
        except (OSError, ValueError, RecursionError) as why:
            return f"{file.name} is damaged ({why}). Copy it again"
    return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """ValueError that names the first tensor with a NaN or an infinity. Reads each once, and makes no copy."""
    for name, tensor in tensors:
        if tensor.numel() and tensor.dtype.is_floating_point and tensor.element_size() > 1:
            low, high = tensor.detach().aminmax()
            if not (low.isfinite() and high.isfinite()):
                raise ValueError(f"its weight {name} has a number that is not finite. Copy the folder again")


def max_positions(config: Any) -> int | None:
    """The longest sequence that the model's text config allows, None if it does not say.

    Where rotary frequencies change with the length of the longest sequence in a batch (dynamic NTK, longrope), the
    length up to which they do not: a rollout's log-probs must not depend on who shares its batch.
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
    """Let modules compute in float32 that would not under autocast.

    Layer norms (GPT-2's, Phi's, StarCoder's) take our float32 residual stream where their weights are bfloat16, as
    autocast lets them on a GPU; on a CPU torch refuses it. Routers of experts that ask for float32 (DeepSeek's, GLM's)
    get it, as they do in a server: logits that autocast rounds may choose other experts.
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
    """Whether it is a router whose product is of tensors that it has made float32."""
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
    """Weights of `model` under the names, and in the pieces, of its files, which loaders of other programs know.

    transformers keeps those of a layer's experts in one tensor, for instance, and its files hold one for each.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors)).items()


def stored_buffers(model: Any) -> dict[str, torch.Tensor]:
    """What the model's files hold beside its weights: biases of routers (glm4_moe), scales of layers (gemma4_text). No
    step changes them, and without them the files are not loaded."""
    stored = model.state_dict().keys()
    return {name: buffer.detach() for name, buffer in model.named_buffers() if name in stored}


def stop_token_ids(loaded: LoadedModel, extra: list[int]) -> frozenset[int]:
    """Token ids that end a rollout: those of the generation config, the tokenizer's EOS, and `extra`."""
    ids = set(extra)
    for eos in (loaded.model.generation_config.eos_token_id, loaded.tokenizer.eos_token_id):
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(ids)


@dataclass(frozen=True)
class ModelLimits:
    """`vocabulary`: ids are below it. `positions`: tokens of the longest sequence, None if the model does not say.

    An id outside of the vocabulary is another row's memory to a kernel; a position outside is one never trained.
    """

    vocabulary: int
    positions: int | None

    @classmethod
    def from_model(cls, model: Any) -> ModelLimits:
        """Those of a Hugging Face causal LM."""
        rows = (len(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()))
        return cls(min(rows), max_positions(model.config.get_text_config()))

    def check(self, rollout_id: str, prompt_ids: npt.ArrayLike, token_ids: npt.ArrayLike) -> None:
        """ValueError naming the rollout where a token of its prompt or its answer is none, or where it is too long."""
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
