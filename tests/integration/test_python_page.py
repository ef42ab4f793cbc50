"""docs/python.md and the example of README.md: their blocks of Python run, with a tiny model in place of SmolLM2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from documents import Block, blocks

pytest.importorskip("reasoning_gym")


def programs() -> list[list[Block]]:
    """The blocks of the page are one program; that of README is another."""
    python = [block for block in blocks() if block.language == "python" and "import rollover" in block.text]
    of_page = [block for block in blocks() if block.language == "python" and block.page.name == "python.md"]
    return [of_page, [block for block in python if block.page.name == "README.md"]]


@pytest.mark.parametrize("program", programs(), ids=["python.md", "README.md"])
def test_the_blocks_are_a_program(program: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = repr(str(tiny.save(tmp_path / "model")))
    names: dict[str, Any] = {"__name__": "__main__"}
    assert program
    for block in program:
        assert '"smollm2-135m"' in block.text or names.get("rollover"), block.name
        exec(compile(block.text.replace('"smollm2-135m"', model), block.name, "exec"), names)
    assert names["run"].finished
