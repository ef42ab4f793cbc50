"""The Python API as users know it, frozen in tests/golden/api.txt: names, signatures, and how light the import is.

A deliberate change: `UPDATE_GOLDEN=1 pytest tests/unit/test_api_surface.py`, and say so in CHANGELOG.md.
"""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rollover

GOLDEN = Path(__file__).parents[1] / "golden" / "api.txt"
SRC = Path(__file__).parents[2] / "src"


def members(cls: type) -> list[str]:
    lines = []
    for name, member in sorted(vars(cls).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            lines.append(f"    {name}: {inspect.signature(member.fget).return_annotation}")
        elif isinstance(member, classmethod | staticmethod):
            lines.append(f"    {name}{inspect.signature(member.__func__)}")
        elif inspect.isfunction(member):
            kind = "async " if inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member) else ""
            lines.append(f"    {kind}{name}{inspect.signature(member)}")
    return lines


def surface() -> str:
    lines = []
    for name in rollover.__all__:
        thing = getattr(rollover, name)
        if not inspect.isclass(thing):
            kind = "async " if inspect.iscoroutinefunction(thing) else ""
            lines.append(f"{kind}{name}{inspect.signature(thing)}")
            continue
        if dataclasses.is_dataclass(thing):
            fields = ", ".join(f"{f.name}: {f.type}" for f in dataclasses.fields(thing) if not f.name.startswith("_"))
            lines.append(f"{name}({fields})")
        else:
            lines.append(f"{name}{inspect.signature(thing)}")
        lines += members(thing)
    return "\n".join(lines) + "\n"


def test_surface_is_frozen() -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(surface(), encoding="utf-8")
    assert surface() == GOLDEN.read_text(encoding="utf-8")


def test_every_public_thing_says_what_it_is() -> None:
    for name in rollover.__all__:
        thing = getattr(rollover, name)
        assert thing.__doc__, name
        for member in (
            vars(thing).values() if inspect.isclass(thing) and thing.__module__.startswith("rollover.api") else ()
        ):
            if inspect.isfunction(member) and not member.__name__.startswith("_"):
                assert member.__doc__, f"{name}.{member.__name__}"


def test_the_page_names_all_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    listed = page.split("The names are these")[1].split("## Train")[0]
    assert sorted(set(re.findall(r"`(\w+)`", listed))) == sorted(rollover.__all__)


def test_the_import_loads_nothing_heavy() -> None:
    """Which is why it is fast. A run that is only read loads no torch either."""
    code = (
        "import sys, rollover\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy', 'rich', 'asyncio', 'inspect'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "rollover.open, rollover.Run\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'train', 'open', 'Session'} <= set(dir(rollover))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'; it has .*train"):
        _ = rollover.trian  # pyright: ignore[reportAttributeAccessIssue]


def test_the_package_is_typed() -> None:
    assert (SRC / "rollover" / "py.typed").is_file()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SRC)}
