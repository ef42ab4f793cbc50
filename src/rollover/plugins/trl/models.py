"""Folders of models and tokenizers that a script passes as objects, and the trained model's way back.

Owns `initial_model/`, `initial_adapter/` and `reward_models/` in a run's directory.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollover.config import ConfigError
from rollover.models.adapters import base_weights
from rollover.models.load import stored_buffers
from rollover.models.save import save_tokenizer

ADAPTER = "adapter"


def save_initial_model(model: Any, tokenizer: Any, output_dir: str) -> str:
    """Return model.path: the name, or the folder of a saved object (or of a name with another tokenizer).

    Saves the base model of a peft.PeftModel. ConfigError for anything but a model.
    """
    if isinstance(model, str):
        if tokenizer is None or _is_of(tokenizer, model):
            return model
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model)
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(f"model is a {type(model).__name__}: give a transformers model, a folder or a hub id")
    return _saved(model, tokenizer, Path(output_dir, "initial_model"))


def save_adapters(model: Any, peft_config: Any, output_dir: str) -> tuple[Any, str]:
    """Return (peft_config, folder of the initial adapters or "") of a model.

    Adapters of a peft.PeftModel are saved unless they are zero. ConfigError for several adapters, adapters outside of a
    peft.PeftModel, and a second configuration.
    """
    if not hasattr(model, "peft_config"):
        return peft_config, ""
    if not hasattr(model, "get_base_model"):
        raise ConfigError("model has adapters of its own: give its base model, and peft_config")
    if peft_config is not None:
        raise ConfigError("model is a PeftModel, which has adapters: leave out peft_config")
    if len(model.peft_config) > 1:
        raise ConfigError(f"model has {len(model.peft_config)} adapters ({', '.join(model.peft_config)}): give one")
    [(name, config)] = model.peft_config.items()
    if not any(tensor.any() for key, tensor in model.named_parameters() if ".lora_B." in key):
        return config, ""
    folder = Path(output_dir, "initial_adapter")
    model.save_pretrained(folder)
    config = copy.copy(config)
    config.init_lora_weights = True  # the folder has the weights
    return config, str(folder if name == "default" else folder / name)


def save_reward_models(rewards: Any, tokenizers: Any, output_dir: str) -> list[Any]:
    """Return reward_funcs as a list, with models replaced by their saved folders."""
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
    """Copy what TRL's save_model writes: the adapters if there are some, else the model."""
    adapter = model_path / ADAPTER
    source = adapter if adapter.is_dir() else model_path
    shutil.copytree(source, output_dir, dirs_exist_ok=True)


def load_trained(model: Any, model_path: Path) -> None:
    """Load the trained weights into the script's model, as TRL trains it in place."""
    if hasattr(model, "peft_config"):
        from peft import load_peft_weights, set_peft_model_state_dict

        [name] = model.peft_config
        set_peft_model_state_dict(model, load_peft_weights(str(model_path / ADAPTER)), adapter_name=name)
        return
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(model_path, dtype=model.dtype)
    model.load_state_dict(trained.state_dict())


def _saved(model: Any, tokenizer: Any, folder: Path) -> str:
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
        model.save_pretrained(folder, state_dict=dict(base_weights(model)) | stored_buffers(model))
    else:
        model.save_pretrained(folder)
    save_tokenizer(tokenizer, tokenizer.name_or_path, folder)
    return str(folder)


def _is_of(tokenizer: Any, model: str) -> bool:
    """Return whether prompts and end tokens are those of the model's own tokenizer."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(model)
    return all(
        getattr(own, name, None) == getattr(tokenizer, name, None) for name in ("chat_template", "eos_token_id")
    ) and (own.get_vocab() == tokenizer.get_vocab())
