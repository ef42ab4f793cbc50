"""Reads the options of `trl grpo`, or of a script that takes them from its command line, out of the command or of TRL's
YAML.

Owns what the arguments of TRL's scripts (ScriptArguments, ModelConfig) are among those of GRPOTrainer. Nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollover.convert.bash import Script, value_of
from rollover.convert.mapping import Unread

_TELLING = ("num_generations", "max_completion_length", "model_name_or_path", "reward_funcs")
_FLAG = re.compile(rf"(?<![\w.-])--(?:{'|'.join(_TELLING)})(?![\w.-])")
_LORA = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora",
         "lora_target_modules": "target_modules", "use_dora": "use_dora"}  # fmt: skip
_QUANTIZED = ("load_in_8bit", "load_in_4bit")
_NO_RESULT = ("dataset_streaming", "ignore_bias_buffers", "bnb_4bit_quant_type", "use_bnb_nested_quant",
              "lora_task_type", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype")  # fmt: skip


def is_trl_command(text: str) -> bool:
    """Whether a shell script launches TRL's GRPO."""
    return bool(re.search(r"\btrl\s+grpo\b", text) or _FLAG.search(text))


def is_trl_yaml(tables: Mapping[str, Any]) -> bool:
    """Whether a YAML is one of TRL's."""
    return "model_name_or_path" in tables and any(name in tables for name in (*_TELLING[:2], *_TELLING[3:], "beta"))


def options_of_trl_command(text: str, path: Path) -> dict[str, Any]:
    """The flags of the one command. ValueError where there is none, or one that cannot be parted into words."""
    flags: dict[str, Any] = {}
    script = Script(text)
    for number, words in script.commands():
        try:
            words = [script.expand(word) for word in words] if is_trl_command(" ".join(words)) else []
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if words and flags:
            raise ValueError("several commands of TRL are in it; one is read")
        flags = _flags(words) if words else flags
    if not flags:
        raise ValueError("no flags of TRL are in it")
    if config := flags.pop("config", None):
        import yaml

        place = path.parent / str(config)
        try:
            flags = dict(yaml.safe_load(place.read_text(encoding="utf-8"))) | flags
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"--config {config} cannot be read: {error}") from error
    return options_of_trl_flags(flags)


def options_of_trl_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options by the names of GRPOConfig and GRPOTrainer."""
    # YAML takes 1e-5 for a text.
    left = {k: value_of(v) if isinstance(v, str) else v for k, v in flags.items() if k not in _NO_RESULT}
    options: dict[str, Any] = {}
    if model := left.pop("model_name_or_path", None):
        options["model"] = model
    further = {"revision": left.pop("model_revision", None), "dtype": left.pop("dtype", left.pop("torch_dtype", None))}
    left.pop("attn_implementation", None)
    if further := {name: value for name, value in further.items() if value and value != "main"}:
        options["model_init_kwargs"] = further
    options |= _data(left)
    lora = {ours: left.pop(theirs) for theirs, ours in _LORA.items() if theirs in left}
    if left.pop("use_peft", False):
        options["peft_config"] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05} | lora  # ModelConfig's own
    if any([left.pop(name, False) for name in _QUANTIZED]):
        options["quantization_config"] = Unread("weights of 4 or 8 bits are asked for")
    rewards = left.pop("reward_funcs", None) or []
    rewards = [_reward(name) for name in (rewards if isinstance(rewards, list) else [rewards])]
    if reward_model := left.pop("reward_model_name_or_path", None):
        rewards.insert(0, reward_model)
    if rewards:
        unread = [one for one in rewards if isinstance(one, Unread)]
        options["reward_funcs"] = unread[0] if unread else rewards
    return options | left


def _data(left: dict[str, Any]) -> dict[str, Any]:
    name, subset = left.pop("dataset_name", None), left.pop("dataset_config", None)
    train, test = left.pop("dataset_train_split", "train"), left.pop("dataset_test_split", "test")
    if "datasets" in left:
        left.pop("datasets")
        return {"train_dataset": Unread("a mixture of data sets is a [[tasks.sources]] each")}
    if not name:
        return {}
    place = {"path": name} | ({"subset": subset} if subset else {})
    options: dict[str, Any] = {"train_dataset": place | {"split": train}}
    if left.get("eval_strategy", "no") not in ("no", False):
        options["eval_dataset"] = place | {"split": test}
    options["prompts"] = Unread(
        "whether the column prompt holds texts or messages is not known: messages go through the chat template"
        " (--tasks.chat true), texts do not (--tasks.chat false)"
    )
    return options


def _reward(name: Any) -> Any:
    if name == "get_soft_overlong_punishment":
        return Unread("the soft overlong punishment is rewards.overlong_buffer_tokens (256) of rewards.function")
    if "." in str(name):
        module, _, function = str(name).rpartition(".")
        return f"{module}:{function}"
    return f"trl.rewards:{name}"


def _flags(words: list[str]) -> dict[str, Any]:
    """--name value ... of a command, of which `--name` alone is true; what accelerate has before the script: the number
    of its processes."""
    start = next((i for i, word in enumerate(words) if word.endswith(".py") or word == "grpo"), -1)
    flags: dict[str, Any] = {}
    if "--num_processes" in words[:start]:
        flags["num_processes"] = int(words[words.index("--num_processes") + 1])
    name = ""
    for word in words[start + 1 :]:
        if word in (">", "2>&1", "|", "&", "&&", ";", "tee"):
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name.replace("-", "_")] = value_of(value) if equals else True
            name = name.replace("-", "_")
        elif name:
            item = value_of(word.rstrip(",") if name.endswith("modules") else word)
            held = flags[name]
            flags[name] = item if held is True else [*(held if isinstance(held, list) else [held]), item]
    return flags
