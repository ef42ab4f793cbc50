"""Executes a tutorial (docs/tutorials): its blocks in order, in one empty folder, as they are written.

A fenced block is what its info string says: with `title="NAME"` the file NAME, which is written; without, `bash` is run
line by line, `python` in one namespace, and a block without a language is what the block before it has printed. In
front of a block a comment may stand: `<!-- exits with 2 -->`, `<!-- runs until Ctrl-C -->`.

What was printed is compared line by line, in order: lines may be left out, `...` stands for anything, and a number for
any number, because times differ from machine to machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runs

_FENCE = re.compile(
    r"^(?:<!-- (?P<how>[^>]+) -->\n)?```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_VARIES = re.compile(r"(\.\.\.|[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?k?)")
_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+|—)(?:e[-+]?\d+)?k?"
_TOY = "python -m rollover.recipes.toy_model "
_SHOWN = ("text", "")  # languages of what was printed
_PATIENCE_S = 300


@dataclass(frozen=True)
class Block:
    """A fenced block. `how`: what the comment before it says."""

    line: int
    language: str
    title: str
    text: str
    how: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [
        Block(
            text.count("\n", 0, m.start("language")) + 1, m["language"], m["title"] or "", m["text"], (m["how"] or "")
        )
        for m in _FENCE.finditer(text)
    ]
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE)), f"{page.name}: a fence is not understood"
    return found


class Reader:
    """Who follows a page, in the present folder. `names`: what the blocks of Python have defined so far."""

    def __init__(self, page: Path, toy: Path) -> None:
        """`toy`: the toy model, made once for all pages; the command that makes it is answered with a copy."""
        self.page, self._toy = page, toy
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self._printed = ""

    def follow(self) -> None:
        for block in blocks(self.page):
            where = f"{self.page.name}:{block.line}"
            try:
                self._do(block)
            except BaseException as error:
                error.add_note(f"{where}\n{block.text}\nprinted before:\n{self._printed[-6000:]}")
                raise

    def _do(self, block: Block) -> None:
        if block.title:
            path = Path(block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            if path.suffix == ".py":
                compile(block.text, block.title, "exec")
        elif block.language == "bash":
            wanted = re.fullmatch(r"exits with (\d)", block.how)
            self._printed = "".join(
                self._command(line, int(wanted[1]) if wanted else 0, block.how == "runs until Ctrl-C")
                for line in commands(block.text)
            )
        elif block.language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block.text, f"{self.page.name}:{block.line}", "exec"), self.names)
            self._printed = out.getvalue()
        else:
            assert block.language in _SHOWN, f"a block of {block.language!r} needs a title"
            check_printed(block.text, self._printed)

    def _command(self, line: str, code: int, until_stopped: bool) -> str:
        """What a command prints; AssertionError where it ends otherwise than with `code`."""
        if line.startswith(_TOY):
            return self._make_toy(line.removeprefix(_TOY))
        match = re.fullmatch(r"((?:\w+=\S+ )*)(rollover |python (?=\w+\.py))(.*?)(?: > (\S+))?", line, re.DOTALL)
        if match is None:
            done = subprocess.run(["bash", "-euc", line], capture_output=True, text=True, timeout=_PATIENCE_S)
            assert done.returncode == code, (line, done.stderr)
            return done.stdout + done.stderr
        words = shlex.split(match[3], comments=True)
        script = Path(words.pop(0)) if match[2].startswith("python") else None
        with environment(dict(word.split("=", 1) for word in match[1].split())):
            run = runs.Run(words, None, script)
        try:
            if until_stopped:
                wait_for_output(run)
                run.send_signal(signal.SIGINT)
                assert run.wait(_PATIENCE_S) in (0, 130), run.err
            else:
                assert run.wait(_PATIENCE_S) == code, (line, run.out[-3000:], run.err[-3000:])
        finally:
            run.kill()
        if match[4]:
            Path(match[4]).write_text(run.out)
            return run.err
        return run.out + run.err

    def _make_toy(self, folder: str) -> str:
        if not self._toy.exists():
            command = [sys.executable, "-m", "rollover.recipes.toy_model", str(self._toy)]
            subprocess.run(command, env=runs.environment(), check=True, stdout=subprocess.DEVNULL)
        shutil.copytree(self._toy, folder)
        return ""


def commands(text: str) -> list[str]:
    """The lines of a block, those that a backslash continues joined."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    return [re.sub(r"\s{2,}#.*", "", line) for line in lines if line and not line.startswith("#")]


def check_printed(shown: str, printed: str) -> None:
    """AssertionError for a line that is shown and was not printed behind the one before it."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    start = 0
    for line in filter(str.strip, shown.splitlines()):
        pattern = re.compile(pattern_of(line))
        found = next((i for i in range(start, len(lines)) if pattern.fullmatch(lines[i])), None)
        if line.strip() == "...":
            continue
        assert found is not None, f"shown, and not printed (behind line {start}): {line!r}\n" + "\n".join(lines)
        start = found + 1


def pattern_of(line: str) -> str:
    parts = _VARIES.split(" ".join(line.split()))
    return "".join((".*" if part == "..." else _NUMBER) if i % 2 else re.escape(part) for i, part in enumerate(parts))


@contextlib.contextmanager
def environment(variables: dict[str, str]):
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def wait_for_output(run: runs.Run) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not run.out and run.poll() is None:
        assert time.monotonic() < deadline, run.err
        time.sleep(0.05)
    assert run.out, run.err
