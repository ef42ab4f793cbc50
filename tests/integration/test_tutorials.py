"""docs/tutorials: every block of every page does what the page says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs

import tutorial

FOLDER = runs.REPOSITORY / "docs" / "tutorials"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.stem != "index")
QUICK = ("own-task-and-reward",)  # of the default tests; the others are of `make test-slow`
MARKED = [pytest.param(p, id=p.stem, marks=[] if p.stem in QUICK else [pytest.mark.slow]) for p in PAGES]
INDEX = (FOLDER / "index.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the toy model of the pages is made when the first of them asks for it."""
    return tmp_path_factory.mktemp("toy") / "toy"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, in which Python's blocks import the files of their page, and leave no module behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", MARKED)
def test_a_tutorial_does_what_it_says(page: Path, folder: Path, toy: Path) -> None:
    pytest.importorskip("datasets")
    if page.stem == "reading-the-dashboard":
        pytest.importorskip("starlette")
    tutorial.Reader(page, toy).follow()


def test_the_index_names_every_page_once_and_each_is_short() -> None:
    assert sorted(re.findall(r"\]\(([\w-]+)\.md\)", INDEX)) == [page.stem for page in PAGES]
    assert not [page.name for page in FOLDER.glob("*.md") if len(page.read_text().splitlines()) > 240]


@pytest.mark.parametrize(
    ("shown", "printed", "is_shown"),
    [
        ("step 1/20 | ... | partial 3%\n", "a\nstep 2/8 |  anything | partial 10%\n", True),
        ("a\nb\n", "b\na\n", False),
        ("health: entropy = 0.01\n", "health: grad_norm = 0.01\n", False),
    ],
)
def test_what_is_shown_has_to_be_printed(shown: str, printed: str, is_shown: bool) -> None:
    if is_shown:
        tutorial.check_printed(shown, printed)
    else:
        with pytest.raises(AssertionError, match="shown, and not printed"):
            tutorial.check_printed(shown, printed)


def test_a_fence_that_is_not_understood_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```python {linenums="1"}\nprint(1)\n```\n')
    with pytest.raises(AssertionError, match="a fence is not understood"):
        tutorial.blocks(page)
