"""Where a policy is: alias, local folder, hub id or fsspec URL -> a folder, or what transformers asks the hub for.

Owns the copies of remote folders in the cache. Loads no model and, but to convert the alias's once, no torch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from rollover.config import ModelConfig
from rollover.files import did_you_mean_path, local_path
from rollover.models.smollm2 import ALIAS, HUB_ID, cache_root, smollm2_folder
from rollover.suggest import alike


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


def resolve_path(cfg: ModelConfig, *, needs_weights: bool = True) -> str:
    """Local folder or hub id of cfg.path. ValueError where a local path is not a model folder."""
    if cfg.path == ALIAS:
        return str(smollm2_folder() or HUB_ID)
    if "://" in cfg.path:
        return str(_download(cfg.path))
    folder = local_path(cfg.path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model.path = {cfg.path!r} is not a model folder: it has no config.json")
        if needs_weights and not any(folder.glob("*.safetensors")):
            raise ValueError(f"model.path = {cfg.path!r} has no *.safetensors: write it again with save_pretrained")
        return str(folder)
    local = folder.is_file() or cfg.path.startswith((".", "/", "~")) or cfg.path.count("/") > 1
    if local or ("/" in cfg.path and folder.parent.is_dir()):
        raise ValueError(f"model.path = {cfg.path!r}: there is no such folder{did_you_mean_path(cfg.path)}")
    if "/" not in cfg.path and alike(cfg.path.lower(), [ALIAS], cutoff=0.7):
        # The hub would be asked for it, and without a network for half a minute.
        raise ValueError(f"model.path = {cfg.path!r}: there is no such folder. Did you mean {ALIAS!r}?")
    return cfg.path
