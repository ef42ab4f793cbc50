"""The tokenizer that a trained model is saved with: the files that it came from, where nothing was changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from rollover.config import ModelConfig
from rollover.models.load import load_model
from rollover.models.save import save_tokenizer

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>",
    "model_max_length": 1024, "clean_up_tokenization_spaces": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As transformers 4 writes one: version 5 has neither special_tokens_map.json nor merges.txt."""
    folder = tiny.save(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    return folder


def loaded(folder: Path, **options: Any) -> Any:
    return load_model(ModelConfig(path=str(folder), **options)).tokenizer


def files(folder: Path) -> dict[str, bytes]:
    found = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    return {name: content for name, content in found.items() if "config.json" != name[-11:] or "tokenizer" in name}


def test_save_unchanged_tokenizer_copies_its_files(folder: Path, tmp_path: Path) -> None:
    tokenizer = loaded(folder, chat_template_kwargs={"think": True})
    tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=True)
    tokenizer("hello", truncation=True, max_length=3, padding="max_length")  # which its file would hold
    (folder / "tokenizer.json").chmod(0o444)
    save_tokenizer(tokenizer, str(folder), tmp_path / "out")
    expected = {k: v for k, v in files(folder).items() if not k.endswith(".safetensors")}
    assert files(tmp_path / "out") == expected and len(expected) == 6
    save_tokenizer(tokenizer, str(folder), tmp_path / "out")  # once more into the same folder


@pytest.mark.parametrize("change", ["template", "token", "files gone"])
def test_save_changed_tokenizer_writes_it(folder: Path, tmp_path: Path, change: str) -> None:
    tokenizer = loaded(folder)
    if change == "template":
        tokenizer.chat_template = "{{ 'mine' }}"
    elif change == "token":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    else:
        (folder / "tokenizer.json").unlink()
    save_tokenizer(tokenizer, str(folder), tmp_path / "out")
    again = type(tokenizer).from_pretrained(tmp_path / "out")
    assert again.get_vocab() == tokenizer.get_vocab() and again.chat_template == tokenizer.chat_template
    assert not (tmp_path / "out" / "merges.txt").exists()


def test_save_tokenizer_of_the_hub_writes_it(tmp_path: Path) -> None:
    save_tokenizer(tiny.tokenizer(), "owner/name", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
