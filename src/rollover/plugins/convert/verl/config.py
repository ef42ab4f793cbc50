"""Composes a YAML of verl's options as Hydra does: its defaults list, and what other YAMLs it names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollover.plugins.convert.bash.programs import Script
from rollover.plugins.convert.files import tables_of
from rollover.plugins.convert.hydra import interpolated
from rollover.plugins.convert.launch import find_text
from rollover.plugins.convert.mapping import Unread
from rollover.plugins.convert.verl.programs import with_program

# verl's own configurations, whose values are the defaults of rows.py, and those in its groups.
_OWN = re.compile(
    r"(?:_generated_)?(?:ppo|dapo|entropy|fully_async_ppo|one_step_off_ppo)(?:_megatron|_torchtitan|_veomni)?_trainer"
    r"|legacy_reward_impl"
)
_BACKENDS = r"(?:dp|fsdp|megatron|torchtitan|veomni|automodel)"
_OWN_IN_GROUPS = re.compile(
    rf"(?:{_BACKENDS}_)?(?:actor|critic|ref|reward_model|reward_loop)|{_BACKENDS}|rollout|rollout_correction|hf_model"
    r"|legacy_data|distillation|npu_profile|profiler|reward|reward_manager|transfer_queue|algorithm"
)
_PACKAGE = re.compile(r"\A(?:\s*#.*\n)*?\s*#\s*@package\s+(\S+)")
_MOST_FILES = 20

Find = Callable[[Sequence[Path]], str | None]


def is_of_verl(name: str) -> bool:
    """Whether a configuration of this name is verl's own."""
    return bool(_OWN.fullmatch(name.removesuffix(".yaml")))


def options_of_yaml(
    tables: Mapping[str, Any], path: Path, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The options of a YAML, by dotted names. path: its own, beside which those of its defaults list are."""
    script = Script()
    composed = _composed(tables, [path.parent], lambda places: find_text(script, places), [0])
    return with_program(interpolated(composed, environment))


def options_of_config(name: str, directories: Sequence[Path], find: Find) -> dict[str, Any] | None:
    """The options of a YAML by its name; None if it is in no directory. ValueError for one that cannot be read."""
    return _options_of_file(name, directories, find, [0])


def _options_of_file(
    name: str, directories: Sequence[Path], find: Find, num: list[int], group: str = "", package: str = ""
) -> dict[str, Any] | None:
    """The options of a YAML of a group (a folder), by their names in its package. None if it is in no directory."""
    num[0] += 1
    if num[0] > _MOST_FILES:
        raise ValueError(f"it names more than {_MOST_FILES} others")
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    text = find([directory / group / file for directory in directories])
    if text is None:
        return None
    said = _PACKAGE.match(text)
    package = {"_global_": "", "_group_": group.replace("/", ".")}.get(said[1], said[1]) if said else package
    found = _composed(tables_of(text), directories, find, num, group)
    return {f"{package}.{option}" if package else option: value for option, value in found.items()}


def _composed(
    tables: Mapping[str, Any], directories: Sequence[Path], find: Find, num: list[int], group: str = ""
) -> dict[str, Any]:
    own = flat({name: value for name, value in tables.items() if name not in ("defaults", "hydra")})
    entries = tables.get("defaults") or []
    entries = entries if isinstance(entries, list) else [entries]
    options: dict[str, Any] = {}
    for entry in [*entries, *([] if "_self_" in entries else ["_self_"])]:
        if entry == "_self_":
            options |= own
        elif isinstance(entry, str):
            folder, _, name = entry.rpartition("/")
            options |= _of_entry(_below(group, folder, entry), name, "", directories, find, num)
        elif isinstance(entry, dict):
            for folder, names in entry.items():
                folder, _, package = re.sub(r"^(?:override|optional)\s+", "", str(folder)).partition("@")
                package = "" if package == "_global_" else package or folder.strip("/").replace("/", ".")
                for name in names if isinstance(names, list) else [names]:
                    options |= _of_entry(_below(group, folder, folder), name, package, directories, find, num)
    return options


def _below(group: str, folder: str, said: str) -> str:
    """The group of an entry of a defaults list in a YAML of `group`."""
    return os.path.normpath(folder.strip("/") if said.startswith("/") else f"{group}/{folder}").strip("./")


def _of_entry(
    group: str, name: Any, package: str, directories: Sequence[Path], find: Find, num: list[int]
) -> dict[str, Any]:
    """The options of one YAML that a defaults list names."""
    if name is None or group.split("/")[0] == "hydra":
        return {}
    found = _options_of_file(str(name), directories, find, num, group, package)
    if found is not None:
        return found
    own = _OWN_IN_GROUPS if group else _OWN
    if own.fullmatch(str(name).removesuffix(".yaml")):
        return {}
    place = f"{group}/{name}" if group else str(name)
    return {f"defaults.{place}": Unread(f"{place.removesuffix('.yaml')}.yaml is not there: put it beside its YAML")}


def flat(tables: Mapping[str, Any], prefix: str = "", whole: str = "chat_template_kwargs") -> dict[str, Any]:
    """Values of a YAML by dotted names. whole: how the names of tables end that are values."""
    out: dict[str, Any] = {}
    for name, value in tables.items():
        inner = isinstance(value, Mapping) and value and not str(name).endswith(whole)
        out |= flat(value, f"{prefix}{name}.", whole) if inner else {f"{prefix}{name}": value}
    return {name: value for name, value in out.items() if not name.endswith("_target_") and value != "???"}
