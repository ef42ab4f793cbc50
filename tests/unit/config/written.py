"""A configuration from text, with a source of tasks."""

from __future__ import annotations

from pathlib import Path

from rollover.config.load import Resolved, load_config

SOURCE = '\n[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n'


def load(folder: Path, text: str) -> Resolved:
    path = folder / "a.toml"
    path.write_text(text + SOURCE)
    return load_config([path])
