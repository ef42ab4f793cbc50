"""`rollover view`: a process that says where it is, answers, and ends when it is told to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recorded_run import write_run
from rollover import cli

SRC = Path(__file__).parents[4] / "src"


@contextmanager
def view(*words: str | Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(the process, what its first line says)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rollover", "view", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(SRC), **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def asked(url: str, token: str = "") -> object:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_answers_until_it_is_told_to_end(tmp_path: Path, number: int, code: int) -> None:
    with view(write_run(tmp_path)) as (process, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url), url
        (run,) = asked(f"{url}api/runs")  # type: ignore[misc]
        assert run["name"] == "told"
        process.send_signal(number)
        assert process.wait(60) == code


@pytest.mark.parametrize("given", ["", "a token of one's own"])
def test_elsewhere_than_on_this_machine_it_has_a_token(tmp_path: Path, given: str) -> None:
    with view(write_run(tmp_path), "--host", "0.0.0.0", ROLLOVER_SERVER_TOKEN=given) as (_, line):
        url, _, quoted = line.partition("#token=")
        token = urllib.parse.unquote(quoted)
        assert " " not in line
        assert token == given if given else len(token) > 20
        local = url.replace("0.0.0.0", "127.0.0.1")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            asked(f"{local}api/runs")
        assert asked(f"{local}api/runs", token)


def test_what_cannot_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path))
    for words, says in (
        ([str(tmp_path / "none")], "is not the directory of a run"),
        ([run] * 9, "9 runs, at most 8"),
        ([run, "--port", "70000"], "no port"),
        ([run, "--host", ""], "--host: it is empty"),
        ([run, "--train.num_steps", "1"], "reads no configuration"),
    ):
        try:
            code = cli.main(["view", *words])
        except SystemExit as error:
            code = error.code
        assert code == 2 and says in capsys.readouterr().err, words
