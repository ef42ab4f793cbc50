"""What a server prints is kept over its starts, in a bounded file, and its last words are found."""

from __future__ import annotations

from pathlib import Path

from rollover.workers.worker import LogFile


def write(log: LogFile, *lines: str) -> None:
    with log.open() as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def test_a_start_appends_to_what_was_printed_before(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "server-0.log")
    write(log, "first")
    write(log, "second")
    text = log.path.read_text()
    assert text.index("first") < text.index("second") and text.count("--- started") == 2


def test_last_words_are_those_of_the_last_start(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "server-0.log")
    assert log.last_words() == ""
    write(log, "an error of before")
    write(log)
    assert log.last_words() == ""
    write(log, *map(str, range(10)))
    assert log.last_words().split() == ["5", "6", "7", "8", "9"]


def test_it_never_takes_more_than_twice_its_limit_and_the_process_writes_on(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "server-0.log", most_bytes=100)
    with log.open() as file:
        for number in range(50):
            file.write(f"line {number:03}\n".encode())
            file.flush()
            log.bound()
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 220
        assert "line 049" in "".join(path.read_text() for path in tmp_path.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"server-0.log", "server-0.log.1"}
    assert b"\0" not in log.path.read_bytes()
