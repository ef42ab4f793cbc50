"""Resolves the arguments of the Python API (names, rows, functions, keys) to one configuration.

    an earlier run's config.resolved.json (resume) < config= < model=, tasks=, reward= and keywords

Owns the mapping of arguments to keys, and the live objects of a run: a key has the name of each (live_objects.py), and
`Settings.release` releases them. Every mistake is a ConfigError before a model is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from rollover import system
from rollover.config import Config, ConfigError, Table
from rollover.config.load import PYTHON, Resolved, load_config
from rollover.config.presets import PRESETS
from rollover.config.renames import RENAMED, upgraded
from rollover.config.resume import OF_THE_START
from rollover.config.schema import default_of, leaves, tables
from rollover.config.sft import SUPERVISED
from rollover.config.table import row_of
from rollover.config.trust import OfRun
from rollover.files import read_tables
from rollover.live_objects import LIVE, hold, is_live, live_object, name_of, release
from rollover.logs import terminal
from rollover.processes import prepare_libraries
from rollover.rewards.serialization import packed
from rollover.suggest import did_you_mean
from rollover.tasks.rows import LiveStream, live_rows
from rollover.workflows.distilled import distill_options

Layer = str | os.PathLike[str] | Mapping[str, Any]
_FILES = (".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")


@dataclass(frozen=True)
class Settings:
    """A configuration and the live objects that it names, by name, which are held until `release`."""

    resolved: Resolved
    live: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.resolved.config

    def release(self) -> None:
        """Release the live objects at the end of the run. To be called once."""
        _release(self.live)


@dataclass(frozen=True)
class Arguments:
    """The arguments of `train` and `Session` (docs/python.md). `live`: objects of an earlier run, by name. `given`: the
    configuration of the resumed run, if this process made it: it is trusted. `supervised`: the arguments of `sft`, with
    `examples` and `rollouts`."""

    model: str | os.PathLike[str] | Mapping[str, Any] | None = None
    tasks: Any = None
    reward: Any = None
    eval_tasks: Any = None
    config: Layer | Sequence[Layer] | None = None
    resume: str | os.PathLike[str] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    live: Mapping[str, Any] = field(default_factory=dict)
    trust: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)
    supervised: bool = False
    examples: Any = None
    rollouts: str | os.PathLike[str] | None = None

    def settle(self, *, require_sources: bool = True) -> Settings:
        """Resolve the configuration, which the caller releases. OSError for an unsupported system."""
        held = _LiveObjects()
        try:
            for spec, value in self.live.items():
                held.add(value, spec.removeprefix(f"{LIVE}:"))
            before = None if self.resume is None else self._before(self.resume)
            given: list[Any] = [held.plain(x, "") if isinstance(x, Mapping) else os.fspath(x) for x in self._files()]
            if self.supervised:
                given.append(SUPERVISED)
            own = self._own(held)
            layers: list[Any] = [*given, own] if before is None else [before, *given, *_over(before, own)]
            resolved = load_config(
                layers, require_sources=require_sources, under=lambda config: held.plain(distill_options(config), "")
            )
            self._check(resolved.config, held)
            for notice in resolved.notices:
                terminal.info(notice)
            if reason := system.refusal():
                raise OSError(reason)
            prepare_libraries(resolved.config.run)
        except BaseException:
            _release(held.live)
            raise
        return Settings(resolved, held.live)

    def _before(self, folder: str | os.PathLike[str]) -> OfRun:
        settings = settings_of_run(Path(folder), "resume")
        return OfRun(settings, str(folder), self.trust, "resume of", "trust=True", self.given)

    def _files(self) -> Sequence[Layer]:
        if self.config is None:
            return []
        return [self.config] if isinstance(self.config, str | os.PathLike | Mapping) else self.config

    def _own(self, held: _LiveObjects) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if isinstance(self.model, Mapping):
            values["model"] = held.plain(self.model, "model")
        elif self.model is not None:
            if not isinstance(self.model, str | os.PathLike):
                raise ConfigError(f"model is a {type(self.model).__name__}: give a folder, a hub id or a known name")
            values["model.path"] = os.fspath(self.model)
        if self.tasks is not None:
            values["tasks.sources"] = _sources(self.tasks, self.eval_tasks, held)
        elif self.eval_tasks is not None:
            raise ConfigError("eval_tasks needs tasks: a configuration's sources have eval_path for it")
        if self.reward is not None:
            values |= held.rewards(self.reward)
        if self.examples is not None:
            values["sft.path"] = _path_of(self.examples, "examples", held)
        if self.rollouts is not None:
            values["sft.rollouts"] = os.fspath(self.rollouts)
        for name, value in self.overrides.items():
            key = key_of(name, supervised=self.supervised)
            values[key] = held.plain(value, key)
        if self.resume is not None:
            values["run.dir"] = os.fspath(self.resume)
        return values

    def _check(self, config: Config, held: _LiveObjects) -> None:
        """Raise ConfigError for mistakes that only the whole configuration shows."""
        own = [source.name or source.path for source in config.tasks.sources if source.reward]
        if self.reward is not None and own:
            raise ConfigError(
                f"reward has no effect on the source {own[0]!r}, which names its own (tasks.sources.reward): remove one"
            )
        if held.streams and config.eval.num_tasks and not config.tasks.sources[0].eval_path:
            raise ConfigError(
                "eval.num_tasks: nothing is held out of an iterable that does not know its length. Give eval_tasks (a"
                " list), or set eval.num_tasks = 0"
            )
        rewards = {
            config.rewards.function,
            config.rewards.eval_function,
            *(source.reward for source in config.tasks.sources),
        }
        rewards |= {row.function for row in config.rewards.functions}
        for key, value in _texts(config.model_dump(), ""):
            if is_live(value):
                try:
                    live_object(value)
                    if value in rewards:
                        packed(value)
                    elif value == config.workflow.function and config.workflow.num_processes:
                        packed(value, "workflow")
                except ValueError as error:
                    raise ConfigError(f"{key}: {error}") from error


@dataclass
class _LiveObjects:
    """Live objects of the arguments, by name."""

    live: dict[str, Any] = field(default_factory=dict)

    def add(self, value: Any, name: str) -> str:
        spec = hold(value, name)
        if spec in self.live:
            release(spec)  # each run holds it once
        self.live[spec] = value
        return spec

    @property
    def streams(self) -> bool:
        """Whether the tasks are an iterable without a length."""
        return any(isinstance(value, LiveStream) for value in self.live.values())

    def rewards(self, reward: Any) -> dict[str, Any]:
        """Return the keys for one or several functions or names of functions."""
        if isinstance(reward, str) or not isinstance(reward, Sequence):
            return {"rewards.function": self._reward(reward), "rewards.functions": []}
        if not reward:
            raise ConfigError("reward is an empty list: give a function")
        if len(reward) == 1:
            return self.rewards(reward[0])
        return {"rewards.function": "", "rewards.functions": [{"function": self._reward(one)} for one in reward]}

    def _reward(self, reward: Any) -> str:
        if isinstance(reward, str):
            return reward
        _check_callable(reward, "reward")
        return self.add(reward, name_of(reward))

    def plain(self, value: Any, key: str) -> Any:
        """Return `value` for a configuration: names for functions, lists for tuples, texts for paths."""
        if isinstance(value, Mapping):
            return {str(name): self.plain(item, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item, f"{key}.{i}") for i, item in enumerate(value)]
        if isinstance(value, str | int | float):
            return value
        if isinstance(value, PurePath):
            return str(value)
        if getattr(value, "shape", None) == ():  # a numpy scalar
            return value.item()
        if value is None:
            raise ConfigError(f"{PYTHON}: {key} = None: leave the key out to have its default")
        _check_callable(value, key)
        return self.add(value, name_of(value))


def key_of(name: str, *, supervised: bool = False) -> str:
    """Return the dotted key of a keyword: a dotted key, a table, or the last part of a key.

    Of several keys with that last part [run] comes first, then [rollout]; [plan], [critic] and [sft] come last, with
    `supervised` [sft] first.
    """
    known = [key for key, _ in leaves()]
    if "." in name or name in dict(tables()):
        return name
    found = [key for key in known if key.rpartition(".")[2] == name]
    if supervised and f"sft.{name}" in found:
        return f"sft.{name}"
    found = [key for key in found if not key.startswith(("plan.", "critic.", "sft."))] or found
    first = [key for key in (f"run.{name}", f"rollout.{name}") if key in found]
    found = first[:1] or found
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{name} may be {' or '.join(found)}: write **{{{json.dumps(found[0])}: ...}}, or"
            f" {found[0].partition('.')[0]}={{{json.dumps(name)}: ...}}"
        )
    if former := [old for old in RENAMED if old.rpartition(".")[2] == name]:
        return former[0]  # read with a notice
    raise ConfigError(f"there is no option {name}{did_you_mean(name, [k.rpartition('.')[2] for k in known])}")


def _check_callable(value: Any, key: str) -> None:
    if not callable(value):
        raise ConfigError(
            f"{PYTHON}: {key} is a {type(value).__name__}, which no option takes: give a function. For an object (a"
            " tracker, say) that is its class, or a function that returns the one that you have (lambda: it)"
        )


def _sources(tasks: Any, eval_tasks: Any, held: _LiveObjects) -> list[dict[str, Any]]:
    """Return `tasks` as [[tasks.sources]]: names of generators and files, or rows."""
    names = [tasks] if isinstance(tasks, str | os.PathLike) else tasks
    if isinstance(names, list | tuple) and names and all(isinstance(n, str | os.PathLike) for n in names):
        rows = [_source(os.fspath(name)) for name in names]
        if eval_tasks is not None:
            if len(rows) > 1 or rows[0]["kind"] != "dataset":
                raise ConfigError("eval_tasks goes with one file or with rows as tasks: a generator holds out its own")
            rows[0]["eval_path"] = _path_of(eval_tasks, "eval_tasks", held)
        return rows
    source = {"kind": "dataset", "name": "tasks", "path": _path_of(tasks, "tasks", held)}
    if eval_tasks is not None:
        source["eval_path"] = _path_of(eval_tasks, "eval_tasks", held)
    return [source]


def _source(name: str) -> dict[str, Any]:
    if name.lower().endswith(_FILES):
        return {"kind": "dataset", "path": name}
    return {"kind": "reasoning_gym", "name": name}


def _path_of(rows: Any, name: str, held: _LiveObjects) -> str:
    if isinstance(rows, str | os.PathLike):
        return os.fspath(rows)
    try:
        made = live_rows(rows)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    # An iterable can be read once, so it has one reader; a list keeps its name from run to run.
    return held.add(made if isinstance(made, LiveStream) else rows, name)


def settings_of_run(folder: Path, option: str) -> dict[str, Any]:
    """Return the settings of an earlier run, from its config.resolved.json, without its own directory.

    Defaults are left out, so that new values are not rejected as ineffective beside them. `option`: for ConfigError.
    """
    path = folder / "config.resolved.json"
    if not path.is_file():
        raise ConfigError(f"{option}: {str(folder)!r} holds no run: there is no config.resolved.json")
    try:
        saved: Any = upgraded(read_tables(path))
        saved = {table: {} for table, _ in tables()} | saved
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    preset = {f"algorithm.{k}": v for k, v in PRESETS.get(saved["algorithm"].get("preset"), {}).items()}
    out: dict[str, Any] = {}
    for key, info in leaves():
        value: Any = saved
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        usual = preset[key] if key in preset else default_of(key)
        if value is None or value == usual or key in OF_THE_START:
            continue
        table = row_of(info.annotation)
        out[key] = value if table is None else [_row(row, table) for row in value]
    if out.get("rollout.in_flight_groups", 0) == saved["rollout"].get("groups_per_step"):
        del out["rollout.in_flight_groups"]
    return out


def _over(before: OfRun, own: dict[str, Any]) -> list[Any]:
    """Return the layers of `own` values above those of an earlier run. If both have one source of tasks, the values of
    the new one override those of the run's."""
    ours, theirs = own.get("tasks.sources", []), before.settings.get("tasks.sources", [])
    if not len(ours) == len(theirs) == 1:
        return [own]
    values = {f"tasks.sources.0.{name}": value for name, value in ours[0].items()}
    others = {key: value for key, value in own.items() if key != "tasks.sources"}
    return [replace(before, settings={"tasks.sources": theirs}), {**others, **values}]


def _row(row: Mapping[str, Any], table: type[Table]) -> dict[str, Any]:
    usual = {name: info.get_default(call_default_factory=True) for name, info in table.model_fields.items()}
    return {name: value for name, value in row.items() if name in usual and value != usual[name]}


def _release(live: dict[str, Any]) -> None:
    while live:
        release(live.popitem()[0])


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str):
        yield key, value
    elif isinstance(value, Iterable):
        for i, item in enumerate(value):
            yield from _texts(item, f"{key}.{i}")
