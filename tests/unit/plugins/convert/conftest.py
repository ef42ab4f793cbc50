"""What the tests of `rollover convert` share."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from rollover import cli
from rollover.config import Config
from rollover.config.load import load_config

Convert = Callable[..., tuple[Config, str]]
Refuse = Callable[..., str]


@pytest.fixture
def convert_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    """convert_file(name, text, *words): writes a file, and returns the configuration that it becomes with these words
    of the command line, and all that is printed."""

    def convert_file(name: str, text: str, *words: str) -> tuple[Config, str]:
        (tmp_path / name).write_text(text)
        assert cli.main(["convert", str(tmp_path / name), *words]) == 0, capsys.readouterr().err
        out, err = capsys.readouterr()
        return load_config([tomllib.loads(out)]).config, out + err

    return convert_file


@pytest.fixture
def refuse_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """refuse_file(name, text, *words): the error that a conversion ends with. text: None for a file that is there, or
    none."""

    def refuse_file(name: str, text: str | None, *words: str) -> str:
        if text is not None:
            (tmp_path / name).write_text(text)
        assert cli.main(["convert", str(tmp_path / name), *words]) == 2
        out, err = capsys.readouterr()
        assert not out
        return err

    return refuse_file
