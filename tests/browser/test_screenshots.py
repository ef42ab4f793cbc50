"""The script that makes the pictures of the docs: one of each, of any run."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import screenshots
from drawn_run import make_run

from documents import ROOT

pytestmark = pytest.mark.browser


def test_every_picture_of_the_docs_is_made(tmp_path: Path) -> None:
    assert screenshots.main([str(make_run(tmp_path / "run")), str(tmp_path / "images")]) == 0
    made = {path.name: path.read_bytes() for path in (tmp_path / "images").iterdir()}
    page = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
    assert set(re.findall(r"[(\"]images/([\w.-]+)[)\"]", page)) == set(made)
    assert screenshots.main([str(tmp_path / "run"), str(tmp_path / "one"), "phone"]) == 0
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["phone.png"]
    for content in made.values():
        assert content.startswith(b"\x89PNG") and struct.unpack(">II", content[16:24])[0] in (390, 1280)
