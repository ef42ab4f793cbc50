"""The files of the page: what they may not do, and how they become one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rollover.plugins.dashboard.page_files import modules, one_script, page_files

NODE = shutil.which("node")


def test_no_text_becomes_markup_or_code() -> None:
    for name, content in page_files().items():
        if name.startswith("vendor/"):
            continue
        text = content.decode()
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
        ):
            assert forbidden not in text.replace("no innerHTML anywhere", ""), f"{name} has {forbidden}"
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), f"{name} names another server"
    page = page_files()["index.html"].decode()
    assert not re.search(r"<script[^>]*>[^<]|\son\w+=|style=", page)  # the policy would refuse it


def test_the_vendored_library_comes_with_its_licence() -> None:
    files = page_files()
    assert b"MIT License" in files["vendor/LICENSE.uPlot.txt"] and b"uPlot" in files["vendor/uPlot.iife.min.js"]


def test_modules_come_after_those_that_they_import() -> None:
    seen: set[str] = set()
    for name, text in modules().items():
        assert {found for found in re.findall(r'from "\./([\w-]+\.js)"', text)} <= seen, name
        seen.add(name)
    assert seen == {name for name in page_files() if name.endswith(".js") and "/" not in name}, (
        "a module that nobody needs"
    )


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.js").write_text(text)


def test_one_script_is_all_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollover.plugins.dashboard.page_files.PAGE", tmp_path)
    write(
        tmp_path,
        main='import { a } from "./one.js";\nimport { b } from "./two.js";\n\nconsole.log(a() + b);\n',
        one='import { b } from "./two.js";\n\nexport function a() {\n  return b;\n}\n',
        two="export const b = 1;\n",
    )
    assert one_script() == (
        "// two.js\nconst b = 1;\n\n// one.js\n\nfunction a() {\n  return b;\n}\n\n"
        "// main.js\n\nconsole.log(a() + b);\n"
    )


@pytest.mark.parametrize(
    ("main", "says"),
    [
        ('import { a } from "./one.js";\nconst a1 = 1;\n', "both have a1: rename one"),
        ('import { a } from "./none.js";\n', "main.js imports none.js: a circle, or no module"),
        ('import { a } from "./two.js";\n', "main.js imports two.js imports main.js"),
        ('import a from "./one.js";\n', "cannot be joined"),
        ("export default 1;\n", "cannot be joined"),
    ],
)
def test_what_cannot_be_one_script_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: str, says: str
) -> None:
    monkeypatch.setattr("rollover.plugins.dashboard.page_files.PAGE", tmp_path)
    write(tmp_path, main=main, one="export const a = 1;\nconst a1 = 2;\n", two='import { x } from "./main.js";\n')
    with pytest.raises(ValueError, match=says):
        one_script()


@pytest.mark.skipif(NODE is None, reason="no node")
def test_the_page_is_javascript_module_by_module_and_as_one(tmp_path: Path) -> None:
    assert NODE is not None
    for name, text in {**modules(), "one_script.js": one_script()}.items():
        file = (tmp_path / name).with_suffix(".mjs")
        file.write_text(text)
        done = subprocess.run([NODE, "--check", file], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


WORDS = """
import { decimal, short, count, percent, duration, versions, visible } from "./words.mjs";
console.log(JSON.stringify([
  decimal(null), short(0.123456), short(12345), short(3), short(1e-7), count(1234567), percent(0.034), percent(0.5),
  duration(75), duration(4000), duration(0.1234, 0.001), duration(4000.5, 0.1), duration(65, 0.5), versions(null, null),
  versions(2, 2), versions(2, 5),
  visible("a\\u001b[2J\\u202eb\\u200f\\n\\tc\\u0000\\u009b"),
  visible("\\u{e0041}\\u180e\\u3164\\u115f\\u034f\\u2800a\\ufe0f \\u2764\\ufe0f \\ud800 \\u00e9 \\u{e0100}"),
]));
"""


@pytest.mark.skipif(NODE is None, reason="no node")
def test_numbers_times_and_characters_that_are_not_seen(tmp_path: Path) -> None:
    assert NODE is not None
    (tmp_path / "words.mjs").write_bytes(page_files()["words.js"])
    (tmp_path / "ask.mjs").write_text(WORDS)
    done = subprocess.run([NODE, tmp_path / "ask.mjs"], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    import json

    assert json.loads(done.stdout) == [
        "–", "0.1235", "12.3k", "3", "1.00e-7", "1.23M", "3.4%", "50%", "1:15", "1:06:40", "0.123 s", "1:06:40.5",
        "1:05.0", "–", "2", "2 to 5", "a\u241b[2J⟨202E⟩b⟨200F⟩\n\tc\u2400⟨009B⟩",
        "⟨E0041⟩⟨180E⟩⟨3164⟩⟨115F⟩⟨034F⟩⟨2800⟩a⟨FE0F⟩ ❤\ufe0f \ud800 é ⟨E0100⟩",
    ]  # fmt: skip
