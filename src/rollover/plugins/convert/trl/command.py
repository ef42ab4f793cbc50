"""Reads TRL's options from a command (`trl grpo`, or a script with TRL's arguments) or from TRL's YAML.

Maps arguments of TRL's scripts (ScriptArguments, ModelConfig) to those of GRPOTrainer. Runs nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollover.plugins.convert.bash.programs import Command, Script
from rollover.plugins.convert.bash.script import read_script
from rollover.plugins.convert.bash.text import Text
from rollover.plugins.convert.files import tables_of
from rollover.plugins.convert.launch import (
    candidate_paths,
    directories,
    find_program,
    find_text,
    merge_commands,
    parse_argument,
    read_flags,
)
from rollover.plugins.convert.mapping import Unknown

_TELLING = ("num_generations", "max_completion_length", "model_name_or_path", "reward_funcs")
_FLAG = re.compile(rf"(?<![\w.-])--(?:{'|'.join(_TELLING)})(?![\w.-])")
_CONFIG = re.compile(r"\.py\b(?:[^\n;|&]|\\\n)*\s--config[ =]\S+\.ya?ml\b")
_LORA = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora",
         "lora_target_modules": "target_modules", "use_dora": "use_dora"}  # fmt: skip
_QUANTIZED = ("load_in_8bit", "load_in_4bit")
_NO_RESULT = ("dataset_streaming", "ignore_bias_buffers", "bnb_4bit_quant_type", "use_bnb_nested_quant",
              "lora_task_type", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype")  # fmt: skip


def is_trl_command(text: str) -> bool:
    """Return whether a shell script launches TRL's GRPO."""
    return bool(re.search(r"\btrl\s+grpo\b", text) or _FLAG.search(text) or _CONFIG.search(text))


def is_trl_yaml(tables: Mapping[str, Any]) -> bool:
    """Return whether a YAML is one of TRL's."""
    return "model_name_or_path" in tables and any(name in tables for name in (*_TELLING[:2], *_TELLING[3:], "beta"))


def options_of_trl_command(text: str, path: Path, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Read the options of the training commands. ValueError if there are none."""
    script = read_script(text, str(path), environment)
    found: list[tuple[int, dict[str, Any]]] = []
    for command in script.commands:
        start = find_program(command.words)
        given = read_flags(command.words[start + 1 :], command.line) if start >= 0 else {}
        given = {name.replace("-", "_") if isinstance(name, str) else name: value for name, value in given.items()}
        verb = command.words[start].text if start > 0 and command.words[start - 1].text == "trl" else ""
        if verb == "grpo" or not verb and not {*_TELLING, "config"}.isdisjoint(given):
            found.append((command.line, _of_command(command, start, given, script, path)))
    if not found:
        raise ValueError("no flags of TRL are in it")
    return merge_commands(found)


def _of_command(command: Command, start: int, given: dict[str, Any], script: Script, path: Path) -> dict[str, Any]:
    processes = _processes(command.words[:start], command.line, lambda name: _yaml(name, command, script, path))
    if isinstance(config := given.pop("config", None), str):
        try:
            given = _yaml(config, command, script, path) | given
        except ValueError as error:
            given["--config"] = Unknown(f"line {command.line}: --config {config} cannot be read: {error}")
    elif config is not None:
        given["--config"] = config if isinstance(config, Unknown) else Unknown(f"line {command.line}: it names no file")
    return options_of_trl_flags(processes | given)


def _yaml(name: str, command: Command, script: Script, path: Path) -> dict[str, Any]:
    text = find_text(script, candidate_paths(name, directories(command, str(path))))
    if text is None:
        raise ValueError(f"there is no {name}")
    return tables_of(text)


def _processes(words: Sequence[Text], line: int, yaml_of: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return the number of training processes, from the launcher's arguments before the script."""
    given = {name.replace("-", "_"): value for name, value in read_flags(words, line).items()}
    if (file := given.get("config_file")) is not None and "num_processes" not in given:
        try:
            given["num_processes"] = yaml_of(str(file))["num_processes"]
        except (ValueError, KeyError) as error:
            why = f"line {line}: accelerate's --config_file {file} says how many processes train ({error})"
            return {"num_processes": Unknown(why)}
    for name in ("num_processes", "nproc_per_node", "num_gpus"):
        if (value := given.get(name)) is not None:
            nodes = given.get("nnodes", given.get("num_nodes", 1)) if name != "num_processes" else 1
            unread = next((item for item in (value, nodes) if isinstance(item, Unknown)), None)
            if unread is None and not (type(value) is int and type(nodes) is int):
                unread = Unknown(f"line {line}: {name} = {value} on {nodes} nodes is no number of processes")
            return {"num_processes": unread or value * nodes}
    return {}


def options_of_trl_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by the names of GRPOConfig and GRPOTrainer."""
    # 1e-5 is a text in YAML 1.1.
    left = {k: parse_argument(v) if isinstance(v, str) else v for k, v in flags.items() if k not in _NO_RESULT}
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
        options["quantization_config"] = Unknown("weights of 4 or 8 bits are asked for")
    rewards = left.pop("reward_funcs", None) or []
    rewards = [_reward(name) for name in (rewards if isinstance(rewards, list) else [rewards])]
    if reward_model := left.pop("reward_model_name_or_path", None):
        rewards.insert(0, reward_model)
    if rewards:
        unread = [one for one in rewards if isinstance(one, Unknown)]
        options["reward_funcs"] = unread[0] if unread else rewards
    return options | left


def _data(left: dict[str, Any]) -> dict[str, Any]:
    name, subset = left.pop("dataset_name", None), left.pop("dataset_config", None)
    train, test = left.pop("dataset_train_split", "train"), left.pop("dataset_test_split", "test")
    if "datasets" in left:
        left.pop("datasets")
        return {"train_dataset": Unknown("a mixture of data sets is a [[tasks.sources]] each")}
    if not name:
        return {}
    place = {"path": name} | ({"subset": subset} if subset else {})
    options: dict[str, Any] = {"train_dataset": place | {"split": train}}
    if left.get("eval_strategy", "no") not in ("no", False):
        options["eval_dataset"] = place | {"split": test}
    options["prompts"] = Unknown(
        "whether the column prompt holds texts or messages is not known: messages go through the chat template"
        " (--tasks.chat true), texts do not (--tasks.chat false)"
    )
    return options


def _reward(name: Any) -> Any:
    if name == "get_soft_overlong_punishment":
        return Unknown("the soft overlong punishment is rewards.overlong_buffer_tokens (256) of rewards.function")
    if "." in str(name):
        module, _, function = str(name).rpartition(".")
        return f"{module}:{function}"
    return f"trl.rewards:{name}"
