"""Models and tokenizers that are handed over as objects, as folders; and a trained model on its way out.

Owns what is written below a run's directory beside the run's own files: `initial_model/`, `reward_models/`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollover.config import ConfigError

ADAPTER = "adapter"


def folder_of_model(model: Any, tokenizer: Any, output_dir: str) -> str:
    """What model.path is: a name as it is, unless the tokenizer is another than its own; else a folder of the object.

    ConfigError for a model with adapters.
    """
    if isinstance(model, str):
        if tokenizer is None or _is_of(tokenizer, model):
            return model
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model)
    if hasattr(model, "peft_config"):
        raise ConfigError("model has adapters: give its base model, and peft_config (or merge_and_unload() it before)")
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(f"model is a {type(model).__name__}: give a transformers model, a folder or a hub id")
    return _saved(model, tokenizer, Path(output_dir, "initial_model"))


def folders_of_rewards(rewards: Any, tokenizers: Any, output_dir: str) -> list[Any]:
    """reward_funcs as a list, in which a model is the folder that it was written to."""
    rewards = list(rewards) if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    tokenizers = tokenizers if isinstance(tokenizers, list) else [tokenizers] * len(rewards)
    if len(tokenizers) != len(rewards):
        raise ConfigError(f"reward_processing_classes has {len(tokenizers)} entries of {len(rewards)} reward functions")
    found = []
    for i, (reward, tokenizer) in enumerate(zip(rewards, tokenizers, strict=True)):
        if hasattr(reward, "save_pretrained"):
            name = Path(str(reward.config._name_or_path)).name or type(reward).__name__
            reward = _saved(reward, tokenizer, Path(output_dir, "reward_models", f"{i}", name))
        found.append(reward)
    return found


def copy_trained(model_path: Path, output_dir: Path) -> None:
    """What TRL's save_model writes: the adapters where there are some, else the model."""
    adapter = model_path / ADAPTER
    source = adapter if adapter.is_dir() else model_path
    shutil.copytree(source, output_dir, dirs_exist_ok=True)


def take_trained(model: Any, model_path: Path) -> None:
    """Put the trained weights into a model that was handed over, as TRL trains it in place."""
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(model_path, dtype=model.dtype)
    model.load_state_dict(trained.state_dict())


def _saved(model: Any, tokenizer: Any, folder: Path) -> str:
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _is_of(tokenizer: Any, model: str) -> bool:
    """Whether it is the model's own tokenizer, as far as prompts and the end of an answer show."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(model)
    return all(
        getattr(own, name, None) == getattr(tokenizer, name, None) for name in ("chat_template", "eos_token_id")
    ) and (own.get_vocab() == tokenizer.get_vocab())
