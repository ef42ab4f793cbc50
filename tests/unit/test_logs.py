"""The logger `rollover`: where messages go, and in which format."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import os
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from rollover import cli
from rollover.logs import messages_to, terminal
from rollover.processes import child_environment
from rollover.track.live import LiveView
from rollover.track.tracker import Tracker, Trackers

logger = logging.getLogger("rollover.tests")


@pytest.fixture
def json_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOVER_LOG_FORMAT", "json")


class Messages(Tracker):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_message(self, text: str) -> None:
        self.lines.append(text)


def test_message_without_run_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logger.warning("a \x1b[31mred line")
    assert capsys.readouterr() == ("", "a ?[31mred line\n")


def test_message_of_run_goes_to_its_trackers_alone(capsys: pytest.CaptureFixture[str]) -> None:
    trackers, messages = Trackers(), Messages()
    trackers.add("messages", messages)
    with trackers:
        logger.info("one")
        terminal.info("two")
    logger.info("three")
    assert messages.lines == ["one"]
    assert capsys.readouterr() == ("", "rollover: notice: two\nthree\n")


def test_two_open_runs_keep_their_messages_apart() -> None:
    first, second, elsewhere = [], [], contextvars.copy_context()
    with messages_to(first.append):
        own = contextvars.copy_context()
        with messages_to(second.append):
            own.run(logger.info, "of the first")
            logger.info("of the second")
            elsewhere.run(logger.info, "of a thread")
    assert first == ["of the first"] and second == ["of the second", "of a thread"]


@pytest.mark.parametrize(
    ("level", "prefix"), [(logging.INFO, "notice: "), (logging.WARNING, ""), (logging.ERROR, "error: ")]
)
def test_terminal_message_has_prefix_of_its_level(level: int, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.log(level, "text")
    assert capsys.readouterr().err == f"rollover: {prefix}text\n"


def test_json_line_has_time_level_logger_and_message(json_format: None, capsys: pytest.CaptureFixture[str]) -> None:
    logger.warning("a\nb")
    found = json.loads(capsys.readouterr().err)
    assert datetime.fromisoformat(found.pop("time")).tzinfo is not None
    assert found == {"level": "WARNING", "logger": "rollover.tests", "message": "a\nb"}


def test_live_view_prints_json_lines_and_no_panel(json_format: None, capsys: pytest.CaptureFixture[str]) -> None:
    view = LiveView("rich", 2, console=Console(file=(stream := io.StringIO()), force_terminal=True))
    trackers = Trackers()
    trackers.add("live", view)
    with trackers:
        logger.warning("careful")
        trackers.on_step({"step": 1, "reward/mean": 0.5})
    (step,) = map(json.loads, stream.getvalue().splitlines())
    assert step["logger"] == "rollover.track.live" and step["message"].startswith("step 1/2")
    assert json.loads(capsys.readouterr().out)["message"] == "careful", "once"


def test_log_format_option_makes_json_of_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setenv("ROLLOVER_LOG_FORMAT", "text")
    assert cli.main(["show", str(tmp_path / "none"), "--log-format", "json"]) == 2
    found = json.loads(capsys.readouterr().err)
    assert found["level"] == "ERROR" and found["logger"] == "rollover.terminal" and "none" in found["message"]
    assert os.environ["ROLLOVER_LOG_FORMAT"] == "json", "child processes inherit it"


def test_handler_of_program_gets_messages_once(tmp_path: Path) -> None:
    program = (
        "import logging, rollover\n"
        "logging.basicConfig(format='root %(message)s')\n"
        "handler = logging.FileHandler('mine.log')\n"
        "logging.getLogger('rollover').addHandler(handler)\n"
        "logging.getLogger('rollover.run').warning('text')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=child_environment(), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == "text\n" and (tmp_path / "mine.log").read_text() == "text\n"


@pytest.mark.usefixtures("json_format")
def test_lines_of_threads_stay_whole(capfd: pytest.CaptureFixture[str]) -> None:
    def log(number: int) -> None:
        for line in range(100):
            logger.warning("%d %d", number, line)

    threads = [threading.Thread(target=log, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([json.loads(line) for line in capfd.readouterr().err.splitlines()]) == 400
