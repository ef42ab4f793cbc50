"""The examples of docs/algorithms.md, run as doctests."""

from __future__ import annotations

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_every_example_of_the_page_gives_what_it_shows() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0 and results.failed == 0
