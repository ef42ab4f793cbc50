"""`rollover completion`: what bash offers when TAB is pressed, asked of bash itself; and that nothing is missing."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from rollover import cli
from rollover.commands import VERBS
from rollover.config.recipes import recipes
from rollover.config.schema import leaves

BASH = shutil.which("bash") or ""
needs_bash = pytest.mark.skipif(not BASH, reason="there is no bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "rollover.bash"
    with pytest.MonkeyPatch.context() as monkeypatch, open(path, "w") as file:
        monkeypatch.setattr("sys.stdout", file)
        assert cli.main(["completion", "bash"]) == 0
    return path


def offered(script: Path, *words: str, within: Path | None = None) -> set[str]:
    """What the function gives for the last of these words."""
    program = (
        'source "$1"; shift; COMP_WORDS=(rollover "$@"); COMP_CWORD=$#; _rollover; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    args = [BASH, "--norc", "--noprofile", "-c", program, "bash", str(script), *words]
    done = subprocess.run(args, capture_output=True, text=True, cwd=within or script.parent, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return set(done.stdout.splitlines()) - {""}


@needs_bash
def test_verbs(script: Path) -> None:
    assert offered(script, "") == {*VERBS, "--help", "--version"}
    assert offered(script, "tra") == {"train", "trace"}
    assert offered(script, "nonsense", "--") == set()


@needs_bash
def test_options_and_keys(script: Path) -> None:
    assert offered(script, "show", "--") == {"--rollouts", "--num", "--json", "--log-format", "--help"}
    assert offered(script, "train", "quickstart", "--tr") >= {"--train.num_steps", "--track.live"}
    assert "--resume" in offered(script, "train", "--res") and offered(script, "show", "--train.num") == set()
    assert offered(script, "train", "--") >= {f"--{name}" for name, _ in leaves()}


@needs_bash
def test_values_of_which_there_are_few(script: Path) -> None:
    live = {"auto", "rich", "plain", "verbose", "off"}
    assert offered(script, "train", "quickstart", "--track.live", "") == live
    assert offered(script, "train", "--track.trace", "f") == {"false"}
    assert offered(script, "completion", "z") == {"zsh"}


@needs_bash
def test_recipes_and_files(script: Path, tmp_path: Path) -> None:
    (tmp_path / "my run").mkdir()
    (tmp_path / "mine.toml").write_text("")
    assert offered(script, "train", "", within=tmp_path) == {*recipes(), "my run", "mine.toml"}
    assert offered(script, "show", "my", within=tmp_path) == {"my run"}
    assert offered(script, "plan", "--svg", "mi", within=tmp_path) == {"mine.toml"}


@needs_bash
def test_tab_is_pressed_in_a_real_shell(script: Path, tmp_path: Path) -> None:
    (tmp_path / "my run").mkdir()
    typed = "rollover sho\tmy\t --roll\t\nexit\n"
    setting = f"PS1=; source {script}; rollover() {{ printf 'ran'; printf '<%s>' \"$@\"; echo; }}\n"
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(BASH, ["bash", "--norc", "--noprofile", "-i"], {"TERM": "dumb", "PATH": os.environ["PATH"]})
    try:
        os.write(fd, (setting + typed).encode())
        read, deadline = b"", time.monotonic() + 120
        while b"ran<" not in read.replace(b"'ran'", b"") and time.monotonic() < deadline:
            if select.select([fd], [], [], 1)[0]:
                try:
                    read += os.read(fd, 4096)
                except OSError:  # the shell is gone
                    break
    finally:
        os.close(fd)
        os.waitpid(pid, 0)
    assert b"ran<show><my run/><--rollouts>" in read, read.decode("utf-8", "replace")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_are_told_the_same(capsys: pytest.CaptureFixture[str], shell: str, tmp_path: Path) -> None:
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    dashes = "-l " if shell == "fish" else "--"
    for word in (*VERBS, *recipes(), f"{dashes}rollouts", f"{dashes}resume"):
        assert word in text, word
    assert all(f"{dashes}{name}" in text for name, _ in leaves())
    if path := shutil.which(shell):
        (tmp_path / "script").write_text(text)
        subprocess.run([path, "-n", str(tmp_path / "script")], check=True, timeout=300)


def test_a_shell_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["completion", "tcsh"])
    assert exit_info.value.code == 2 and "tcsh" in capsys.readouterr().err
    assert cli.main(["completion", "bash", "--train.num_steps", "3"]) == 2
    assert "reads no configuration" in capsys.readouterr().err
