"""A run's directory that names code, programs and addresses in every option that can: reading it runs none of them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

import rollover
from recorded_run import row, write_run
from rollover.api.settings import Arguments, settings_of_run
from rollover.cli import main
from rollover.commands.sample import UNUSED
from rollover.config import Config, ConfigError
from rollover.config.load import load_config
from rollover.config.schema import field_at, leaves
from rollover.config.table import needs_of, row_of
from rollover.config.trust import FLAGS, FUNCTIONS, PLACES, TEXTS, OfRun, named, text_options
from rollover.functions import load_function
from rollover.live_objects import LIVE
from rollover.plugins.dashboard.report import make_report
from rollover.plugins.dashboard.run_data import RunData

# Whatever value they have is one that runs, is connected to, or is written to.
PROGRAMS = {
    "backend.url", "checkpoint.dir", "cluster.address", "engine.urls", "engine.vllm_args", "engine.vllm_python",
    "engine.weights_dir", "rewards.functions.params", "workflow.command", "workflow.verifiers",
    "workflow.verifiers_args", "workflow.verifiers_eval",
}  # fmt: skip
OPTIONS = [*dict.fromkeys(text_options(Config)), *FLAGS]
CODE = "open('ran', 'a').write('module ')\n\ndef make(*arguments, **named):\n    open('ran', 'a').write('call ')\n"
SAYS = "its configuration names"
_USUAL: dict[Any, Any] = {bool: True, int: 1, float: 1.0}
PLANNED = {
    "rollout": {"groups_per_step": 2, "group_size": 2, "max_new_tokens": 16, "interrupt": "when_enough",
                "in_flight_groups": 4, "max_staleness": 1},
    "plan": {"steps": 2},
}  # fmt: skip


class Canary:
    """What tells that something of the directory ran: the file `ran`, and connections to a port."""

    def __init__(self, folder: Path) -> None:
        self.file, self.program = folder / "ran", folder / "program"
        (folder / "canary.py").write_text(CODE)
        self.program.write_text(f"#!{sys.executable}\nopen({str(self.file)!r}, 'a').write('program ')\n")
        self.program.chmod(0o755)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        self.values = [
            "canary.py:make",
            "canary:make",
            "canary",
            str(self.program),
            "canary://host/x",
            f"http://127.0.0.1:{self.server.getsockname()[1]}/x",
        ]

    @property
    def told(self) -> str:
        said = self.file.read_text() if self.file.exists() else ""
        with suppress(BlockingIOError):
            self.server.accept()[0].close()
            said += "connection "
        self.file.unlink(missing_ok=True)
        return said


class CanaryFiles(AbstractFileSystem):
    """An fsspec file system that tells that it was made."""

    protocol = "canary"
    cachable = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Path("ran").write_text("url ")


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Canary]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    fsspec.register_implementation("canary", CanaryFiles, clobber=True)
    found = Canary(tmp_path)
    yield found
    found.server.close()
    sys.modules.pop("canary", None)


def put(config: dict[str, Any], option: str, value: Any) -> None:
    """Set an option, as the lists of config/trust.py name it, in the tables of a file: in rows and named tables too."""
    place, parts = config, option.split(".")
    for depth, part in enumerate(parts[:-1]):
        info = field_at(".".join(parts[: depth + 1]))
        if info is None:
            place = place.setdefault(part, {})
        elif row_of(info.annotation):
            place.setdefault(part, [{}])
            place = place[part][0]
        else:
            place = place.setdefault(part, {}).setdefault("role", {})
    info = dict(leaves()).get(option)
    kind = str(info.annotation if info else "dict" if option.endswith("params") else "str")
    wrapped: Any = [value] if "list" in kind else {"name": value} if "dict" in kind else value
    place[parts[-1]] = True if option in FLAGS else wrapped


def has(config: dict[str, Any], key: str) -> bool:
    *tables, name = key.split(".")
    for table in tables:
        config = config.get(table, {})
    return name in config


def settings(option: str, value: str, base: dict[str, Any] = PLANNED) -> dict[str, Any]:
    """Of a run with this option, and with what gives it an effect where one setting does."""
    config = json.loads(json.dumps(base))
    info = field_at(option)
    for need in needs_of(info) if info is not None else ():
        if not need.unless and (need.values or not has(config, need.key)):
            put(config, need.key, need.values[0] if need.values else _USUAL.get(field_at(need.key).annotation, value))  # type: ignore[union-attr]
    if option.startswith("tasks.sources.") and not option.endswith(".kind"):
        kind = "own.py:source" if option.endswith(".params") else "dataset"
        put(config, "tasks.sources.kind", kind)
        put(config, "tasks.sources.path", "rows.jsonl") if kind == "dataset" else None
    put(config, option, value)
    return config


def hostile_run(folder: Path, config: dict[str, Any]) -> Path:
    if not (folder / "rollouts").is_dir():
        write_run(folder, steps=4)
        more = {"tokens/step_generated": 16, "time/weights_s": 0.1}
        rows = [row(step, **more, **{"engine/decode_steps": 8 * step}) for step in range(1, 5)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(of) + "\n" for of in rows))
    (folder / "config.resolved.json").write_text(json.dumps(config))
    return folder


def read_by_every_verb(run: Path) -> None:
    """`view` is asked everything that its page asks."""
    plain = Path("plain.toml")
    plain.write_text("[plan]\nsteps = 2\n[rollout]\ngroups_per_step = 2\ngroup_size = 2\nmax_new_tokens = 16\n")
    for words in (
        ["report", run, "-o", "report.html"],
        ["show", run, "--rollouts"],
        ["show", run, "--json"],
        ["trace", run],
        ["plan", plain, "--from-run", run, "--json"],
    ):
        assert main([str(word) for word in words]) == 0, words
    data = RunData(run)
    of_one = {"rollout": {"step": "1", "id": "3-0"}, "episode": {"step": "1", "id": "3-0"}, "lanes": {"to": "9"}}
    for name in data.queries:
        with suppress(KeyError, ValueError):
            data.answer(name, of_one.get(name, {}))
    opened = rollover.open(run)
    assert repr(opened) and opened.config and opened.metrics and list(opened.records()) and opened.trace
    assert opened.evaluations and list(opened.rollouts(dropped=True)) and not opened.finished
    rollover.plan(config={"plan": {"steps": 2}}, from_run=run)


def test_canaries_are_alive(canary: Canary) -> None:
    load_function("canary.py:make", ".")()
    assert canary.told == "module call "
    load_function("canary:make", ".")
    subprocess.run([canary.values[3]], check=True)
    assert canary.told == "module program "
    fsspec.core.url_to_fs("canary://host/x")
    socket.create_connection(canary.server.getsockname()).close()
    assert canary.told == "url connection "


def test_every_text_option_is_listed_once() -> None:
    """A new option that may hold a text: list it in config/trust.py, or here among PROGRAMS."""
    lists = [*FUNCTIONS, *PLACES, *TEXTS, *PROGRAMS]
    assert sorted(lists) == sorted(set(OPTIONS) - set(FLAGS))
    assert [key for key, info in leaves() if info.annotation is bool and re.search("trust|urls", key)] == list(FLAGS)


@pytest.mark.parametrize("number", range(6))
def test_readers_run_nothing_of_a_run(canary: Canary, number: int, capsys) -> None:
    """All options at once: no reader but the planner checks them together."""
    config: dict[str, Any] = {}
    for option in OPTIONS:
        put(config, option, canary.values[number])
    run = hostile_run(Path("run"), config)
    read_by_every_verb(run)
    assert canary.told == ""
    capsys.readouterr()


SERVED = {"kind": "remote", "urls": ["http://127.0.0.1:1"], "weights_dir": "weights"}


def legal_configurations(value: str) -> tuple[list[dict[str, Any]], set[str]]:
    """Configurations that can be planned, which have this value in as many options as possible; and all these."""
    batches: list[dict[str, Any]] = []
    placed: set[str] = set()
    for option in OPTIONS:
        for batch in [*batches, PLANNED, {"plan": {"steps": 2}}, {"plan": {"steps": 2}, "engine": SERVED}]:
            config = settings(option, value, batch)
            with suppress(ValueError):
                Config.model_validate(config)
                placed.add(option)
                if batch in batches:
                    batches.remove(batch)
                batches.append(config)
                break
    return batches, placed


@pytest.mark.parametrize("number", [0, 1, 4])
def test_planner_runs_nothing_of_a_run(canary: Canary, number: int) -> None:
    batches, placed = legal_configurations(canary.values[number])
    assert len(placed) > 50 and (number == 4 or set(FUNCTIONS) <= placed), set(FUNCTIONS) - placed
    for config in batches:
        told = RunData(hostile_run(Path("run"), config)).answer("plan", {})
        assert "predicted" in told, (told, config)
        assert canary.told == "", config


def test_plan_of_a_custom_order_uses_the_default_and_says_so(canary: Canary) -> None:
    run = hostile_run(Path("run"), settings("rollout.order", "canary.py:make"))
    told = RunData(run).answer("plan", {})
    assert told["left_out"] == ["rollout.order = 'canary.py:make', planned as 'oldest_first'"], told
    assert told["predicted"]["step_s"] > 0 and canary.told == ""
    assert "left_out" not in told.get("why", "") and make_report([RunData(run)])
    hostile_run(run, PLANNED)
    assert RunData(run).answer("plan", {})["left_out"] == []


NAMING = [option for option in OPTIONS if option not in TEXTS]


@pytest.mark.parametrize("option", NAMING)
def test_resume_and_from_refuse_what_a_run_names(canary: Canary, option: str, capsys) -> None:
    value = "canary.py:make" if option in FUNCTIONS else "canary://host/x"
    run = hostile_run(Path("run"), settings(option, value))
    assert main(["sample", "--from", str(run), "1/3-0"]) == 2
    said = capsys.readouterr().err
    named_here = str(next(of for of in named(settings(option, value)) if of.option == option))
    if option.startswith(UNUSED):  # of a user's own run with a custom environment no one is asked
        assert SAYS not in said and canary.told == ""
    else:
        assert SAYS in said and named_here in said and "--trust" in said
    with pytest.raises(ConfigError, match="trust=True") as refused:
        rollover.train(resume=run)
    assert named_here in str(refused.value) and canary.told == ""
    for again in ({"trust": True}, {"config": settings(option, value)}):
        try:
            Arguments(resume=run, **again).settle().release()  # type: ignore[arg-type]
        except ValueError as error:  # there is no such function, or it has no effect here
            assert SAYS not in str(error), again


def test_trust_imports_what_a_run_names(canary: Canary) -> None:
    """The check comes before `@distilled` looks into the workflow's module."""
    Path("canary.py").write_text(f"# distilled\n{CODE}")
    run = hostile_run(Path("run"), settings("workflow.function", "canary.py:make", {}))
    with pytest.raises(ConfigError, match=SAYS):
        Arguments(resume=run).settle(require_sources=False)
    assert canary.told == ""
    Arguments(resume=run, trust=True).settle(require_sources=False).release()
    assert "module" in canary.told


def layer(run: Path, *, trusted: bool = False) -> OfRun:
    return OfRun(settings_of_run(run, "resume"), str(run), trusted, "resume of", "trust=True", {})


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({}, True),
        ({"tasks.sources.0.reward": "mine.py:f"}, False),  # the same value, given again
        ({"tasks.sources.0.reward": "exact_match"}, False),  # another one
        ({"tasks.sources": [{"kind": "dataset", "path": "rows.jsonl"}]}, False),
        ({"tasks.sources.0.answer_column": "x"}, True),  # of the same row, but another key
        ({"rewards.function": "mine.py:f"}, True),  # the same value for another key
    ],
)
def test_value_given_again_counts(tmp_path: Path, given: dict[str, Any], is_refused: bool) -> None:
    sources = [{"kind": "dataset", "path": "rows.jsonl", "reward": "mine.py:f"}]
    run = hostile_run(tmp_path, {"tasks": {"sources": sources}})
    try:
        load_config([layer(run), given])
    except ConfigError as error:
        assert (SAYS in str(error)) is is_refused
    else:
        assert not is_refused
    load_config([layer(run, trusted=True)])


def test_reward_of_the_run_is_not_given_by_new_tasks(tmp_path: Path) -> None:
    """`tasks=` changes the run's one source, whose reward stays: that one is the directory's."""
    sources = [{"kind": "dataset", "path": "rows.jsonl", "reward": "mine.py:f", "answer_column": "x"}]
    run = hostile_run(tmp_path, {"tasks": {"sources": sources}})
    rows = [{"prompt": f"{i} + 1 =", "x": str(i + 1)} for i in range(9)]
    with pytest.raises(ConfigError, match="tasks.sources.0.reward = 'mine.py:f'"):
        Arguments(resume=run, tasks=rows).settle()
    settled = Arguments(resume=run, tasks=rows, trust=True).settle()
    (source,) = settled.config.tasks.sources
    assert (source.reward, source.answer_column) == ("mine.py:f", "x") and source.path.startswith(LIVE)
    settled.release()


def test_what_a_run_names_of_live_objects_and_by_name_is_no_code(tmp_path: Path) -> None:
    config = {"rewards": {"function": f"{LIVE}:reward-0123abcd"}, "algorithm": {"advantage": "rloo"}}
    assert list(named(config)) == []
    assert list(named({"model": {"path": "owner/model"}, "tasks": {"system_prompt": "a:b"}})) == []


def test_role_with_a_dot_in_its_name_is_found() -> None:
    (found,) = named({"workflow": {"roles": {"a.b": {"advantage": "x.py:y"}}}})
    assert found.option == "workflow.roles.advantage"
