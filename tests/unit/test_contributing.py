"""CONTRIBUTING.md says which files are read to be sure of something, and which are touched to add something."""

from __future__ import annotations

import re

from documents import ROOT
from rollover.config.schema import field_at

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

# The most files that each row may name: what the structure is for. Of any other kind it is 5.
MOST = {
    "How old may a token get?": 1,
    "What happens to a rollout that is parked?": 2,
    "How do new weights get to the engine?": 1,
    "What does `--resume` restore, and where does the run go on?": 2,
    "What ends a reward call that takes too long?": 2,
    "an estimator": 4,
    "a policy loss": 4,
    "a source of tasks": 4,
    "an engine": 4,
    "a verb": 5,
    "a metric": 4,
    "a tracker": 5,
    "a built-in reward": 5,
}


def rows(section: str) -> dict[str, str]:
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return dict(found[1:])


def test_each_look_up_names_few_files_that_exist() -> None:
    looked_up = {**rows("Where to look"), **rows("What to touch")}
    assert looked_up.keys() >= MOST.keys()
    for what, cell in looked_up.items():
        files = re.findall(r"`((?:src|tests|docs)/\S+|README\.md)`", cell)
        num_files = len(files) + cell.count("its test")
        assert 1 <= num_files <= MOST.get(what, 5), (what, files)
        for file in files:
            there = ROOT / file.partition("<new>")[0]
            assert there.is_dir() if "<new>" in file else there.is_file(), (what, file)


def test_a_name_that_stands_for_a_table_is_in_a_file_of_its_row() -> None:
    for what, cell in rows("What to touch").items():
        for name in re.findall(r"`([A-Z]+)`", cell):
            files = [ROOT / file for file in re.findall(r"`((?:src|tests)/[\w/.]+)`", cell)]
            assert any(re.search(rf"^{name}\b", file.read_text(), re.MULTILINE) for file in files), (what, name)


def test_each_door_for_extensions_is_a_key_and_has_a_toy() -> None:
    toys = (ROOT / "tests" / "integration" / "test_extensions.py").read_text(encoding="utf-8")
    for kind, cell in rows("The same from outside").items():
        for key in re.findall(r"`(\w+\.[\w.]+)`", cell):
            if not key.startswith("rollover."):
                assert field_at(key.replace("sources.", "sources.0.")), (kind, key)
        word = kind.split(",")[0].split()[0]
        assert f"{word}" in toys.lower(), f"test_extensions.py has no {kind}"
