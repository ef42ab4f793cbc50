"""Finds and loads the policy: alias, local folder, hub id or fsspec URL -> a module whose attention is ours.

Owns no weights after loading. Never runs code that comes with a model unless model.trust_remote_code is set.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError

from rollover.config import Config, ModelConfig
from rollover.files import did_you_mean_path
from rollover.models import attention
from rollover.models.smollm2 import ALIAS, cache_root, smollm2_folder


@dataclass
class LoadedModel:
    """A causal LM (attention implementation: ours), its tokenizer, and the local folder or hub id they came from."""

    model: Any
    tokenizer: Any
    path: str


def pick_device(device: str, key: str = "model.device") -> torch.device:
    """The torch device that `key` names: "auto" is CUDA if there is one. ValueError where there is none such."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'{key} = "{device}" is not a device: use "auto", "cpu", "cuda" or "cuda:1"') from error
    if found.type == "cuda":
        num = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= num:
            what = f"only {num} CUDA devices" if num else "no CUDA device"
            raise ValueError(f'{key} = "{device}", but torch sees {what}: set {key} = "cpu" or "auto"')
    return found


def engine_device(config: Config) -> torch.device:
    """Where it generates: engine.device, else model.device."""
    if config.engine.device:
        return pick_device(config.engine.device, "engine.device")
    return pick_device(config.model.device)


def _download(url: str) -> Path:
    """Copy a remote model folder (fsspec URL) into the cache, once per URL."""
    import fsspec

    target = cache_root() / "remote" / hashlib.blake2b(url.encode(), digest_size=12).hexdigest()
    if not (target / "config.json").is_file():
        filesystem, remote = fsspec.core.url_to_fs(url)
        if not filesystem.exists(f"{remote.rstrip('/')}/config.json"):
            raise ValueError(f"model.path = {url!r} is not a model folder: it has no config.json")
        target.mkdir(parents=True, exist_ok=True)
        names = [n for n in filesystem.ls(remote, detail=False) if not filesystem.isdir(n)]
        # config.json marks a complete copy, so it comes last.
        for name in sorted(names, key=lambda n: n.endswith("/config.json")):
            part = target / (Path(name).name + ".part")
            filesystem.get_file(name, str(part))
            part.replace(target / Path(name).name)
    return target


def resolve_path(cfg: ModelConfig) -> str:
    """Local folder or hub id of cfg.path. ValueError where a local path is not a model folder."""
    if cfg.path == ALIAS:
        return str(smollm2_folder())
    if "://" in cfg.path:
        return str(_download(cfg.path))
    folder = Path(cfg.path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model.path = {cfg.path!r} is not a model folder: it has no config.json")
        if not any(folder.glob("*.safetensors")):
            raise ValueError(f"model.path = {cfg.path!r} has no *.safetensors: write it again with save_pretrained")
        return str(folder)
    local = folder.is_file() or cfg.path.startswith((".", "/", "~")) or cfg.path.count("/") > 1
    if local or ("/" in cfg.path and folder.parent.is_dir()):
        raise ValueError(f"model.path = {cfg.path!r}: there is no such folder{did_you_mean_path(folder)}")
    if "/" not in cfg.path and difflib.get_close_matches(cfg.path.lower(), [ALIAS], cutoff=0.7):
        # The hub would be asked for it, and without a network for half a minute.
        raise ValueError(f"model.path = {cfg.path!r}: there is no such folder. Did you mean {ALIAS!r}?")
    return cfg.path


def load_model(
    cfg: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> LoadedModel:
    """Load model and tokenizer. Errors that a user can mend are ValueErrors naming model.path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = resolve_path(cfg)
    source: dict[str, Any] = {"trust_remote_code": cfg.trust_remote_code}
    if cfg.revision:
        source["revision"] = cfg.revision
    if not Path(path).is_dir():
        source |= _hub_source(cfg)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        config = AutoConfig.from_pretrained(path, **source)
        tokenizer = _tokenizer(path, source)
        loading: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation=attention.IMPLEMENTATION,
            output_loading_info=True,
            **source,
        )
        model, report = loading
    except KeyError as error:
        reason = attention.refusal_of_lookup(config.model_type, error)
        raise ValueError(f"model.path = {cfg.path!r}: {reason}") from error
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model.path = {cfg.path!r} cannot be loaded: {error}") from error
    lost = sorted(report["missing_keys"])
    if lost:
        raise ValueError(
            f"model.path = {cfg.path!r}: its files lack {len(lost)} weights of the model"
            f" ({', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}); they would be random. Copy the folder again"
        )
    model.eval()
    if device is not None:
        torch.nn.Module.to(model, device)
    try:
        attention.check_model(model)
    except ValueError as error:
        raise ValueError(f"model.path = {cfg.path!r}: {error}") from error
    return LoadedModel(model, tokenizer, path)


def _hub_source(cfg: ModelConfig) -> dict[str, Any]:
    """How from_pretrained shall get a hub id: from the cache alone where the hub has no address.

    transformers would try again for half a minute. Raises ValueError where it is not in the cache either.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    host = urlsplit(constants.ENDPOINT).hostname or ""
    away = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    if not away and not getproxies():  # a proxy looks names up itself
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            away = f"{host} cannot be reached"
    if not away:
        return {}
    if isinstance(try_to_load_from_cache(cfg.path, "config.json", revision=cfg.revision or None), str):
        return {"local_files_only": True}
    raise ValueError(
        f"model.path = {cfg.path!r}: there is no such folder, no model of that name in the hub's cache, and"
        f" {away}{did_you_mean_path(cfg.path)}"
    )


def _tokenizer(path: str, source: dict[str, Any]) -> Any:
    """The tokenizer, before the weights, which take longer."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, **source)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        folder = Path(path)
        if not folder.is_dir() or (folder / "tokenizer.json").is_file():
            raise ValueError(f"its tokenizer cannot be read: {error}") from error
        # What transformers says of it is a list of packages that could convert files which are not there.
        raise ValueError(
            "it has no tokenizer.json. Copy the tokenizer's files from the model that this one was made of, or write"
            " them with tokenizer.save_pretrained"
        ) from error


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


def stop_token_ids(loaded: LoadedModel, extra: list[int]) -> frozenset[int]:
    """Token ids that end a rollout: those of the generation config, the tokenizer's EOS, and `extra`."""
    ids = set(extra)
    for eos in (loaded.model.generation_config.eos_token_id, loaded.tokenizer.eos_token_id):
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(ids)
