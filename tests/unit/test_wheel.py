"""The wheel: what is in it, what it asks for, and that it works without a checkout and without any extra."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
import runs
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import rollover

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# Extras that need no Python of their own; the others are for the tests and the benchmarks of this repository.
FOR_USERS = ("datasets", "tasks", "lora", "smollm2")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy: setuptools leaves a build folder in what it builds."""
    work = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work / name)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", work / "src", ignore=ignored)
    code = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=work, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return work / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is in the wheel, as pip lays it out."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python that finds the installed package, and no source of ours, in a folder that has nothing to do with it."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("rollover/")}
    source = ROOT / "src"
    files = {str(p.relative_to(source)) for p in (source / "rollover").rglob("*") if p.is_file()}
    assert packed == {name for name in files if "__pycache__" not in name}
    for wanted in ("py.typed", "recipes/quickstart.toml", "models/kernels.cpp", "models/kernels_attention.h"):
        assert f"rollover/{wanted}" in packed


def test_it_works_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    listed = run(installed, tmp_path, "-m", "rollover", "init", "--list")
    assert listed.returncode == 0 and listed.stdout.startswith("quickstart "), listed.stderr
    assert run(installed, tmp_path, "-m", "rollover", "init", "x.toml").returncode == 0
    shown = run(installed, tmp_path, "-m", "rollover", "config", "x.toml", "apr", "--train.num_steps", "1")
    assert shown.returncode == 0 and "group_size = 8  # recipe apr" in shown.stdout, shown.stderr


def test_benchmarks_are_in_a_checkout(wheel: Path, installed: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "bench" in name and name != "rollover/commands/bench.py"]
    said = run(installed, tmp_path, "-m", "rollover", "bench", "engine")
    assert said.returncode == 2 and "git clone https://github.com/rollover-rl/rollover" in said.stderr


IN_ONE_PROCESS = """
import sys
import rollover
from rollover import cli, registry
from rollover.compat.trl import GRPOConfig, GRPOTrainer

for kind, names in registry.PLUGINS.items():
    for name in names:
        assert registry.load(kind, name) is not None
recipe, script = sys.argv[1:]
assert cli.main(["train", recipe]) == 0
assert cli.main(["convert", script]) == 0
try:
    cli.main(["demo", "--help"])
except SystemExit as end:
    assert end.code == 0
from_elsewhere = [m for m in sys.modules.values() if (m.__name__ + ".").startswith("rollover.")]
print("imported from", {m.__file__.rpartition("/rollover/")[0] for m in from_elsewhere if m.__file__})
"""


def test_verbs_and_plugins_work_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, steps=1, rows=20, checkpoint={"every_steps": 0, "save_final_model": False})
    script = ROOT / "tests" / "unit" / "plugins" / "convert" / "corpus" / "verl_plain.sh"
    done = run(installed, tmp_path, "-c", IN_ONE_PROCESS, str(recipe), str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"imported from { ({str(installed)}) }\n"), done.stdout
    assert "group_size = 8" in done.stdout and "usage: rollover demo" in done.stdout
    assert len(runs.json_lines(tmp_path / "run" / "metrics.jsonl")) == 1
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "rollover", "view", str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as view:
        try:
            assert view.stdout is not None
            url = view.stdout.readline().strip()
            with urllib.request.urlopen(url, timeout=60) as page:
                assert "<script" in page.read().decode()
            with urllib.request.urlopen(f"{url}api/runs", timeout=60) as answer:
                assert json.loads(answer.read())[0]["name"] == "tiny"
        finally:
            view.terminate()
    assert view.returncode == 0


EVERY_MODULE = """
import importlib, importlib.util, pkgutil, rollover
from rollover.config.run import TOOLS
for extra in ("datasets", "peft", "reasoning_gym", "gguf", "trl", "starlette", "openai", "tinker", "verifiers", "ray"):
    assert importlib.util.find_spec(extra) is None, extra
names = [m.name for m in pkgutil.walk_packages(rollover.__path__, "rollover.") if not m.name.endswith("__main__")]
for name in names:
    # Servers, for which the extras `agents` and `remote` are, a class of verifiers, for which that is, and Ray.
    server = *(f"rollover.engine.server.{name}" for name in ("app", "embedded", "texts")), "rollover.http_server"
    server += "rollover.plugins.dashboard.app",
    tools = tuple(f"rollover.plugins.trackers.{tool}_adapter" for tool in TOOLS)  # each for an extra of its own
    others = "rollover.workflows.gateway", "rollover.plugins.verifiers.harness", "rollover.plugins.ray.cluster"
    if not name.startswith((*others, *server, *tools)):
        importlib.import_module(name)
print(rollover.__file__, len(names))
"""


def hard_dependencies() -> list[Distribution]:
    """What is installed of what the package asks for without an extra, and of what that asks for."""
    found: dict[str, Distribution] = {}
    waiting, seen = [(text, "") for text in PROJECT["dependencies"]], set()
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in {(requirement.name, extra) for extra in ("", *requirement.extras)} - seen:
            seen.add(wanted)
            package = found.setdefault(requirement.name, distribution(requirement.name))
            waiting += [(text, wanted[1]) for text in package.requires or ()]
    return list(found.values())


def test_every_module_is_imported_with_the_hard_dependencies_alone(installed: Path, tmp_path: Path) -> None:
    """In a Python whose site has those packages and no others."""
    site = tmp_path / "site"
    site.mkdir()
    for package in hard_dependencies():
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / name).is_symlink():
                (site / name).symlink_to(package.locate_file(name))
    path = os.pathsep.join((str(installed), str(site)))
    command = [sys.executable, "-S", "-c", EVERY_MODULE]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    place, num = done.stdout.split()
    assert place == str(installed / "rollover" / "__init__.py")
    assert int(num) > 100


@pytest.mark.parametrize(
    ("recipe", "package", "message"),
    [
        ('kind = "reasoning_gym"\nname = "chain_sum"', "reasoning_gym", "pip install reasoning-gym"),
        ('kind = "dataset"\npath = "openai/gsm8k"', "datasets", "pip install datasets"),
    ],
)
def test_a_missing_extra_is_named(recipe: str, package: str, message: str, monkeypatch, tmp_path: Path) -> None:
    from rollover.config.load import load_config
    from rollover.tasks.stream import TaskStream

    path = tmp_path / "mine.toml"
    path.write_text(f"[[tasks.sources]]\n{recipe}\n")
    config = load_config([path]).config
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=re.escape(message)):
        TaskStream(config.tasks, 0, "train", rewards=config.rewards)


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """All names that the package imports. Its grammar is that of Python 3.11."""
    names = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 11))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
    return {name.split(".")[0] for name in names}


def test_what_is_imported_is_asked_for_and_what_is_asked_for_is_imported(imported: set[str]) -> None:
    hard = {Requirement(text).name for text in PROJECT["dependencies"]}
    extras = {Requirement(t).name for extra in PROJECT["optional-dependencies"].values() for t in extra}
    modules = {name.replace("-", "_") for name in hard}
    assert modules <= imported, "asked for, and not used"
    by_another = {
        "huggingface_hub": "transformers",
        "tokenizers": "transformers",
        "yaml": "transformers",
        "jinja2": "torch",
        "referencing": "jsonschema",
    }
    # In its own environment, which one file of ours is loaded in; in a checkout.
    elsewhere = {"vllm", "benchmarks"}
    others = imported - set(sys.stdlib_module_names) - {"rollover"} - modules - by_another.keys() - elsewhere
    named_otherwise = {"PIL": "pillow"}
    assert {named_otherwise.get(of, of) for of in others} <= {name.replace("-", "_") for name in extras}


@pytest.mark.parametrize("python", PYTHONS)
def test_every_python_from_3_11_on_is_taken(python: str) -> None:
    assert f"{python}.0" in SpecifierSet(PROJECT["requires-python"])
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    for name in FOR_USERS:
        for text in PROJECT["optional-dependencies"][name]:
            assert Requirement(text).marker is None, f"{name}: users get it on every Python"
    wanted = [Requirement(text) for text in PROJECT["dependencies"]]
    assert all(r.marker is None or Marker(str(r.marker)).evaluate({"python_version": python}) for r in wanted)


def test_nothing_is_imported_that_a_newer_python_has_removed(imported: set[str]) -> None:
    assert not imported & {"asynchat", "asyncore", "cgi", "crypt", "distutils", "imghdr", "imp", "pipes", "telnetlib"}


def test_the_citation_is_of_this_version() -> None:
    (version,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert version == rollover.__version__
