"""The files of the page (the folder page/), and its modules joined to one script.

The modules import only names, at their top (`import { a, b } from "./c.js";`), and no two of them define the same name.
So joined in order, without imports, they are the same program.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent / "page"
MAIN = "main.js"
CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) )", re.MULTILINE)
_NAME = re.compile(r"^(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)


def page_files() -> dict[str, bytes]:
    """Read the files by their paths in addresses: "index.html", "vendor/uPlot.min.css"."""
    found = sorted(path for path in PAGE.rglob("*") if path.suffix in CONTENT_TYPES)
    return {path.relative_to(PAGE).as_posix(): path.read_bytes() for path in found}


def modules() -> dict[str, str]:
    """Read our modules by name, each after its imports; ValueError for a circle or a missing module."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(PAGE.glob("*.js"))}
    ordered: dict[str, str] = {}

    def add(name: str, importing: tuple[str, ...]) -> None:
        if name in importing or name not in texts:
            raise ValueError(f"{' imports '.join([*importing, name])}: a circle, or no module")
        if name not in ordered:
            for other in _IMPORT.findall(texts[name]):
                add(other, (*importing, name))
            ordered[name] = texts[name]

    add(MAIN, ())
    return ordered


def one_script() -> str:
    """Join all modules; ValueError if two define one name, or for another form of import or export."""
    owner: dict[str, str] = {}
    parts = []
    for name, text in modules().items():
        for defined in _NAME.findall(text):
            if defined in owner:
                raise ValueError(f"{name} and {owner[defined]} both have {defined}: rename one")
            owner[defined] = name
        text = _EXPORT.sub("", _IMPORT.sub("", text))
        if wrong := re.search(r"^(?:import|export)\b.*", text, re.MULTILINE):
            raise ValueError(f"{name}: {wrong[0]!r} cannot be joined with other modules")
        parts.append(f"// {name}\n{text}")
    return "\n".join(parts)
