"""The import rules of docs/architecture.md, Layout: dependencies one way, asyncio and torch only where allowed."""

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollover.config.run import TOOLS

SRC = Path(__file__).parents[2] / "src"
PACKAGE = SRC / "rollover"
FILES = sorted(PACKAGE.rglob("*.py"))

# A part may import parts of its own level and below.
LEVELS = [
    {"types", "staleness", "trajectories"},
    {
        "suggest",
        "back_off",
        "config",
        "shutdown",
        "files",
        "functions",
        "http_guard",
        "http_server",
        "images",
        "live_objects",
        "logs",
        "process_tree",
        "processes",
        "registry",
        "std_streams",
        "system",
        "text",
        "workers",
    },
    {"models"},
    {"algorithms", "engine", "envs", "openai_wire", "rewards", "tasks", "weights", "workflows"},
    {"rollout", "recipes"},
    {"track", "checkpoint"},
    {"trainer"},
    {"run", "cluster", "sim"},
    {"api"},
    {"commands"},
    {"cli", "__main__", "__init__"},
    {"plugins"},  # what is below is the core: it loads plugins by name (registry.py)
    {"compat"},
]
LEVEL = {part: i for i, parts in enumerate(LEVELS) for part in parts}

OF_AN_EXTRA = tuple(f"plugins/trackers/{tool}_adapter.py" for tool in TOOLS)
MAY_ASYNCIO = (
    "shutdown.py",
    "functions.py",
    "workers/",
    "http_server.py",
    "plugins/dashboard/app.py",
    "trainer/local_backend.py",
    "trainer/ranks/backend.py",
    "plugins/tinker/",
    "rollout/driver.py",
    "rollout/player.py",
    "engine/",
    "envs/",
    "rewards/",
    "run/",
    "plugins/ray/",
    "plugins/sandbox/",
    "recipes/solver_judge.py",
    "rollout/requests.py",
    "rollout/env_tasks.py",
    "workflows/conversations.py",
    "workflows/episode.py",
    "workflows/episodes.py",
    "workflows/pool.py",
    "workflows/protocol.py",
    "workflows/command.py",
    "workflows/gateway.py",
    "plugins/verifiers/",
    "api/",
    "plugins/trl/trainer.py",
    "commands/",
    "plugins/dashboard/verbs/",
)
NO_TORCH = (
    "types.py",
    "trajectories.py",
    "staleness.py",
    "config/",
    "rollout/",
    "sim/",
    "plugins/dashboard/",
    "plugins/trackers/",
    "registry.py",
    "cluster/plan.py",
    "cluster/report.py",
    "engine/protocol.py",
    "track/",
    "functions.py",
    "live_objects.py",
    "cli.py",
    "commands/",
    "models/thread_tuner.py",
)
# Between a process of ours and its child, through a pipe that no one else writes to; nowhere else.
# The second sends our own code to our own child, and reads none.
MAY_PICKLE = ("rewards/serialization.py", "plugins/sandbox/launch.py")
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def type_checking_only(tree: ast.AST) -> set[ast.AST]:
    """Nodes under `if TYPE_CHECKING:`, which run never."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


@functools.cache
def imports(path: Path, *, at_run_time: bool = False) -> tuple[tuple[int, str], ...]:
    """(line, module) of every import in the file, those inside functions too."""
    return tuple(_imports(path, at_run_time))


def _imports(path: Path, at_run_time: bool) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = type_checking_only(tree) if at_run_time else set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module
            # `from rollover import x` names the part in the alias.
            if node.module == "rollover":
                yield from ((node.lineno, f"rollover.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def find(rule) -> list[str]:
    return [f"{name_of(path)}:{line} imports {module}" for path in FILES for line, module in rule(path)]


def test_dependencies_go_one_way():
    unknown = {name_of(p).split("/")[0].removesuffix(".py") for p in FILES} - set(LEVEL)
    assert not unknown, f"give these parts a level in LEVELS, and in docs/architecture.md: {unknown}"

    def upward(path: Path) -> Iterator[tuple[int, str]]:
        own = LEVEL[name_of(path).split("/")[0].removesuffix(".py")]
        for line, module in imports(path):
            if module.startswith("rollover.") and LEVEL.get(module.split(".")[1], own) > own:
                yield line, module

    assert find(upward) == []


def test_asyncio_only_in_the_shells():
    def stray(path: Path) -> Iterator[tuple[int, str]]:
        if not name_of(path).startswith(MAY_ASYNCIO):
            yield from (hit for hit in imports(path) if hit[1].split(".")[0] == "asyncio")

    assert find(stray) == []


def test_near_names_are_looked_for_in_one_place():
    def stray(path: Path) -> Iterator[tuple[int, str]]:
        if name_of(path) != "suggest.py":
            yield from (hit for hit in imports(path) if hit[1] == "difflib")

    assert find(stray) == []


def test_vllm_and_ray_have_files_of_their_own():
    owners = {"vllm": ("engine/vllm_worker.py",), "ray": ("plugins/ray/cluster.py",)}

    def stray(path: Path) -> Iterator[tuple[int, str]]:
        for line, module in imports(path):
            owner = owners.get(module.split(".")[0])
            if owner and name_of(path) not in owner:
                yield line, module

    assert find(stray) == []


def test_code_of_the_user_is_loaded_in_one_place():
    """By functions.py, whichever option names it; a verb comes by its entry point. vllm_worker.py runs vLLM's.

    What a policy wrote is loaded in the sandbox alone."""
    loads = {"spec_from_file_location", "exec_module", "run_path", "run_module", "exec", "__import__"}

    def loaders(path: Path) -> Iterator[tuple[int, str]]:
        inside = name_of(path).startswith("plugins/sandbox/guest/")
        if not inside and name_of(path) not in ("functions.py", "engine/vllm_worker.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in loads:
                    yield node.lineno, ast.unparse(node.func)

    assert find(loaders) == []


def test_nothing_is_unpickled():
    def unsafe(path: Path) -> Iterator[tuple[int, str]]:
        if name_of(path) not in MAY_PICKLE:
            yield from (hit for hit in imports(path) if hit[1].split(".")[0] in UNPICKLERS)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if ast.unparse(node.func) == "torch.load" and keywords.get("weights_only") != "True":
                yield node.lineno, "torch.load without weights_only=True"
            if keywords.get("allow_pickle", "False") != "False":
                yield node.lineno, "allow_pickle"

    assert find(unsafe) == []


def test_no_torch_is_imported_by_the_pure_core():
    def heavy(path: Path) -> Iterator[tuple[int, str]]:
        if name_of(path).startswith(NO_TORCH):
            hits = imports(path, at_run_time=True)
            yield from (hit for hit in hits if hit[1].split(".")[0] in {"torch", "transformers", "peft"})

    assert find(heavy) == []


def test_the_pure_core_loads_without_torch():
    modules = [
        "rollover." + name_of(p).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for p in FILES
        if name_of(p).startswith(NO_TORCH) and name_of(p) not in OF_AN_EXTRA
    ]
    assert {"rollover.types", "rollover.config.load", "rollover.cli"} <= set(modules)
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'vllm', 'ray', 'datasets'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_no_two_test_files_have_one_name():
    """Without packages pytest imports each by its name alone, and collects neither of a pair."""
    names = [path.name for path in (SRC.parent / "tests").rglob("*.py") if path.name.startswith("test_")]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch", [(1, "torch")]),
        ("def f():\n    from torch import nn", [(2, "torch")]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", [(1, "typing")]),
        ("from rollover import train", [(1, "rollover.train")]),
    ],
)
def test_the_scan_sees_imports(tmp_path, source, found):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(imports(path, at_run_time=True)) == found
