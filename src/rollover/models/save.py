"""Writes a model folder: weights, tokenizer and processor.

A tokenizer that was not changed is written as the files that it was loaded from: transformers 5 writes a form of its
own, which transformers 4 and other programs cannot read.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from rollover.files import give_usual_mode
from rollover.models.load import LoadedModel

# Tokenizer files of all of transformers' models, code of `trust_remote_code` included.
_FILES = (
    "tokeniz*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "additional_chat_templates", "*.model", "*.tiktoken", "tekken.json", "normalizer.json", "bpe.codes",
)  # fmt: skip


def save_tokenizer(tokenizer: Any, path: str, folder: Path) -> None:
    """Write the tokenizer into `folder`.

    It is copied from the folder `path`, from which it was loaded, if it is unchanged; else transformers writes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not _is_unchanged(tokenizer, path):
        tokenizer.save_pretrained(folder)
        return
    for file in Path(path).iterdir():
        if not any(fnmatch(file.name, name) for name in _FILES):
            continue
        if file.is_dir():
            shutil.copytree(file, folder / file.name, copy_function=shutil.copyfile, dirs_exist_ok=True)
        else:
            shutil.copyfile(file, folder / file.name)  # without its mode: it may be read-only


def _is_unchanged(tokenizer: Any, path: str) -> bool:
    if not Path(path).is_dir():
        return False
    try:
        return _as_saved(tokenizer) == _as_saved(type(tokenizer).from_pretrained(path))
    except Exception:  # boundary: the files may be missing, and its class may be custom code
        return False


def _as_saved(tokenizer: Any) -> dict[str, bytes]:
    tokenizer("")  # a call sets truncation and padding, which are part of the saved state
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def write_folder(folder: Path, model: Any, tensors: Mapping[str, torch.Tensor], loaded: LoadedModel, path: str) -> None:
    """Write a folder that transformers' from_pretrained loads.

    `tensors`: the weights of `model`. Tokenizer and processor are those of `loaded`, which came from `path`.
    """
    model.save_pretrained(folder, state_dict=tensors)
    save_tokenizer(loaded.tokenizer, path, folder)
    if loaded.processor is not None:
        loaded.processor.save(folder)
    give_usual_modes(folder)


def give_usual_modes(folder: Path) -> None:
    """Reset the modes of safetensors files, which only their owner can read otherwise."""
    for weights in folder.rglob("*.safetensors"):
        give_usual_mode(weights)
