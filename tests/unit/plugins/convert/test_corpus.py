"""Launch scripts in the styles that users write, in corpus/: each with the options that it gives, the questions that it
raises, and settings of the run that comes of it once they are answered.

FILE.toml says what is expected of FILE: `options` (all that are read, by the other system's names), `questions` (the
options that are asked about), `answers` (words of the command line), `environment`, and `settings` (of the run).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollover.config.load import load_config
from rollover.config.table import value_of
from rollover.plugins.convert.bash.script import read_script
from rollover.plugins.convert.conversion import convert_file, read_options
from rollover.plugins.convert.mapping import LeftOut, Unknown

CORPUS = Path(__file__).parent / "corpus"
CASES = sorted(path.with_suffix("").name for path in CORPUS.glob("*.toml"))

PROGRAM = re.compile(r"\.main_(?:ppo|dapo)$|fully_async_main$|main_spin$")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Any]:
    """The path of a script and what is expected of it. Nothing is in the working folder."""
    expected = tomllib.loads((CORPUS / f"{request.param}.toml").read_text())
    for name in ("LR", "BATCH", "RESPONSE", "STEPS", "KL", "MODE", "N", "HEAD", "EXTRA_ARGS", "EXTRA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in expected.get("environment", {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return CORPUS / request.param, expected


def overrides_and_accepted(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--accept=") else [word])]
    pairs = list(zip(words[::2], words[1::2], strict=True))
    overrides = [(name.removeprefix("--"), value) for name, value in pairs if name != "--accept"]
    return overrides, [value for name, value in pairs if name == "--accept"]


def test_corpus_has_thirty_scripts() -> None:
    assert len(CASES) >= 30


def test_every_option_of_a_script_is_read(case: tuple[Path, Any]) -> None:
    path, expected = case
    _, options = read_options(path)
    given = {name: value for name, value in options.items() if not isinstance(value, Unknown | LeftOut)}
    wanted = {name: value for name, value in expected["options"].items() if value != "null"}
    assert {name: value for name, value in given.items() if value is not None} == wanted


def test_what_is_not_understood_is_asked_about(case: tuple[Path, Any]) -> None:
    path, expected = case
    if not expected.get("questions"):
        convert_file(path, *overrides_and_accepted(expected.get("answers", [])))
        return
    with pytest.raises(ValueError, match="has to be answered") as error:
        convert_file(path)
    lines = str(error.value).splitlines()[1:]
    asked = {re.split(r": ", line.strip(), maxsplit=1)[0] for line in lines}
    assert asked == set(expected["questions"])


def test_settings_of_an_answered_script_are_the_expected_ones(case: tuple[Path, Any]) -> None:
    path, expected = case
    text, _ = convert_file(path, *overrides_and_accepted(expected.get("answers", [])))
    config = load_config([tomllib.loads(text)]).config
    for key, value in expected["settings"].items():
        found = value_of(config, key)
        if key == "tasks.sources":
            found = [source.model_dump(include=set(value[0])) for source in found]
        assert found == value, key


PROGRAMS = ("basename", "dirname", "date", "cat", "env", "nohup", "tee", "chmod", "bash", "ls", "head", "wc")
WITHOUT_BASH = (
    "docker",
    "ray_job",
    "srun",
    "heredoc_shell",
    "conditions",
    "several_commands",
    "loop.sh",
    "words",
    "prints",
)


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    "name", [n for n in CASES if n.startswith("verl_") and n.endswith(".sh") and not any(w in n for w in WITHOUT_BASH)]
)
def test_bash_itself_gives_the_same_words(name: str, tmp_path: Path) -> None:
    """The one test that runs a script: in a bash that finds a printing `python3` and a few harmless programs."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for program in PROGRAMS:
        if place := shutil.which(program):
            (stubs / program).symlink_to(place)
    (stubs / "python3").write_text(f'#!{shutil.which("bash")}\nprintf "%s\\0" "$@" > {tmp_path}/words\n')
    (stubs / "python3").chmod(0o700)
    environment = tomllib.loads((CORPUS / f"{name}.toml").read_text()).get("environment", {})
    environment |= {"PATH": str(stubs), "HOME": str(tmp_path)}
    bash = str(shutil.which("bash"))
    subprocess.run([bash, str(CORPUS / name)], cwd=tmp_path, env=environment, timeout=20, check=False)
    for _ in range(100):  # a command in the background
        if (tmp_path / "words").exists() and (tmp_path / "words").stat().st_size:
            break
        time.sleep(0.05)
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    found = read_script((CORPUS / name).read_text(), str(CORPUS / name), environment).commands
    command = next(command for command in found if any(PROGRAM.search(word.text) for word in command.words))
    texts = [word.text for word in command.words]
    texts = texts[texts.index("-m") :]
    date = time.strftime("%Y%m%d")
    assert texts == [w.replace(f"{tmp_path}/ck", "./ck").replace(date, "now") for w in words[words.index("-m") :]]
