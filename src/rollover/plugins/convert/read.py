"""Reads another system's file: whose it is, by its content, and its options by name. Nothing in it is run.

Add a system: its rows in SYSTEMS, its `Form` in FORMS.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollover.plugins.convert.axolotl.rows import AXOLOTL
from rollover.plugins.convert.bash.script import read_script
from rollover.plugins.convert.files import tables_of, text_of
from rollover.plugins.convert.lightrft.rows import LIGHTRFT
from rollover.plugins.convert.lightrft.script import is_lightrft, options_of_flags
from rollover.plugins.convert.mapping import System
from rollover.plugins.convert.trl.flags import is_trl_command, is_trl_yaml, options_of_trl_command, options_of_trl_flags
from rollover.plugins.convert.trl.rows import TRL
from rollover.plugins.convert.trl.script import calls_grpo_trainer, options_of_trl_script
from rollover.plugins.convert.verl.config import flat, options_of_yaml
from rollover.plugins.convert.verl.programs import is_rllm
from rollover.plugins.convert.verl.rllm import RLLM
from rollover.plugins.convert.verl.rows import VERL
from rollover.plugins.convert.verl.script import options_of_script
from rollover.text import one_line

SYSTEMS: dict[str, System] = {"verl": VERL, "trl": TRL, "axolotl": AXOLOTL, "lightrft": LIGHTRFT}
_YAML = (".yaml", ".yml")
_SCRIPTS = (".sh", ".sbatch", ".slurm", ".txt", "")
_OVERRIDE = re.compile(
    r"(?<![\w.-])\+{0,2}(?:data|actor_rollout_ref|algorithm|trainer|critic|reward_model)\.[\w.]+="
    r"|\bverl\.trainer\.main_|\bmain_(?:ppo|dapo)\b"
)


@dataclass(frozen=True)
class Form:
    """A form that the files of a system have. content: the tables of a YAML, the text of any other file.

    holds: whether content is of it, by what no other system has. options: those of content that is; ValueError where
    there are none, or for what cannot be read.
    """

    system: str
    suffixes: tuple[str, ...]
    holds: Callable[[Any], bool]
    options: Callable[[Any, Path], dict[str, Any]]


def _is_verl(tables: Mapping[str, Any]) -> bool:
    return any(name in tables for name in ("actor_rollout_ref", "critic", "reward_model", "algorithm", "trainer"))


def _is_axolotl(tables: Mapping[str, Any]) -> bool:
    return any(name in tables for name in ("base_model", "trl", "rl", "micro_batch_size", "adapter"))


def _options_of_axolotl(tables: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The options that are set (`key:` alone sets none), nested ones as `trl.beta`."""
    kind = tables.get("rl")
    if kind not in ("grpo", "gdpo"):
        raise ValueError(f"rl: {kind} trains on no rollouts of the policy; rl: grpo and rl: gdpo can be converted")
    return {name: value for name, value in flat(tables, whole="kwargs").items() if value is not None}


def _holds_overrides(text: str) -> bool:
    return bool(_OVERRIDE.search(text))


FORMS = (
    Form("verl", _YAML, _is_verl, options_of_yaml),
    Form("axolotl", _YAML, _is_axolotl, _options_of_axolotl),
    Form("trl", _YAML, is_trl_yaml, lambda tables, path: options_of_trl_flags(tables)),
    Form("trl", (".py",), calls_grpo_trainer, options_of_trl_script),
    Form("trl", _SCRIPTS, is_trl_command, options_of_trl_command),
    Form("verl", _SCRIPTS, _holds_overrides, options_of_script),
    Form("lightrft", _SCRIPTS, is_lightrft, options_of_flags),
)


def read(path: Path, system: str = "") -> tuple[System, dict[str, Any]]:
    """The system that a file is of (`system`, unless that is empty), and its options. ValueError for a file that cannot
    be read, and one whose system cannot be told."""
    text = text_of(path)
    try:
        content = tables_of(text) if path.suffix in _YAML else text
        called, why = _called(text, path) if path.suffix in _SCRIPTS else ("", "")
        form = _form(path.suffix, f"{content}\n{called}" if called else content, system, why)
        options = form.options(content, path)
        return RLLM if form.system == "verl" and is_rllm(options) else SYSTEMS[form.system], options
    except (ValueError, ImportError) as error:
        raise ValueError(f"{path}: {error}") from error
    except (RecursionError, MemoryError):
        raise ValueError(f"{path}: what it says is nested too deeply") from None


def _called(text: str, path: Path) -> tuple[str, str]:
    """The texts of the scripts that a launch script starts, and why they are not known. ValueError where it only starts
    one that cannot be read."""
    try:
        script = read_script(text, str(path))
    except (ValueError, ImportError) as error:
        return "", str(error)  # no bash, say; who reads it as bash says what is wrong
    if script.missing and not script.may_have_trained:
        line, name, reason = script.missing[0]
        shown, reason = shlex.quote(one_line(name)[:200]), one_line(reason)
        raise ValueError(
            f"line {line} starts {shown}, which cannot be read ({reason}), and nothing else here trains: convert it"
        )
    return "\n".join(script.called), ""


def _form(suffix: str, content: Any, system: str, why: str = "") -> Form:
    """The form of a file; `system`, unless that is empty. why: the scripts that it starts are not known."""
    of_suffix = [form for form in FORMS if suffix in form.suffixes] or [f for f in FORMS if "" in f.suffixes]
    if system:
        found: Sequence[Form] = [form for form in of_suffix if form.system == system]
        if not found:
            forms = ", ".join(sorted({s or "no suffix" for f in FORMS if f.system == system for s in f.suffixes}))
            raise ValueError(f"a file of {system} is one of {forms}")
        return found[0]
    found = [form for form in of_suffix if form.holds(content)]
    if len(found) == 1:
        return found[0]
    what = "more than one system has" if found else "no system has"
    names = " or ".join(f"--from {form.system}" for form in found or of_suffix)
    unread = f" (as bash it is not read: {one_line(why)})" if why and not found else ""
    raise ValueError(f"{what} such options{unread}: say which one's it is with {names}")
