"""The model card (README.md) of a saved model, with tags for the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollover.config import Config
from rollover.text import one_line

NAME = "README.md"


def write_model_card(folder: Path, config: Config, step: int, evaluation: Mapping[str, Any] | None) -> None:
    """Write the card of the model in `folder`, trained up to `step`. `evaluation`: its row of eval.jsonl, if any.

    `base_model` is set for a model of the hub only: a local path means nothing elsewhere. ValueError where the card
    cannot be written.
    """
    if not folder.is_dir() or config.backend.type == "tinker":
        return  # the service has the model, or a custom backend wrote no folder
    supervised = config.algorithm.supervised
    kinds = ["reinforcement-learning", config.algorithm.preset, config.algorithm.advantage]
    kinds = ["sft"] if supervised else list(dict.fromkeys(kinds))
    of_hub = not Path(config.model.path).exists() and config.model.path.count("/") == 1
    head: dict[str, Any] = {"base_model": config.model.path} if of_hub else {}
    head |= {"library_name": "transformers", "tags": ["rollover", *kinds]}
    of_rollouts = {
        "Advantage, loss": f"{config.algorithm.advantage}, {config.algorithm.loss}",
        "Groups a step, rollouts a group": f"{config.rollout.groups_per_step}, {config.rollout.group_size}",
    }
    rows = {
        "Base model": Path(config.model.path).name if not of_hub else config.model.path,
        "Steps": str(step),
        **({"Examples a step": str(config.sft.batch_examples)} if supervised else of_rollouts),
        "Learning rate": f"{config.train.learning_rate:g}",
        "LoRA rank": str(config.model.lora.rank or ""),
        "Held-out mean reward": f"{evaluation['mean']:.3f}" if evaluation and "mean" in evaluation else "",
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", ""]
    lines += [f"# {_cell(config.run.name)}", "", "Trained with Rollover.", "", "| | |", "|---|---|"]
    lines += [f"| {what} | {_cell(value)} |" for what, value in rows.items() if value]
    try:
        (folder / NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{folder / NAME} cannot be written: {error.strerror}. The model beside it is whole. Make room, or remove"
            " what is in its place, and go on with --resume"
        ) from error


def _cell(text: str) -> str:
    """Return `text` escaped for a cell of a Markdown table."""
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")
