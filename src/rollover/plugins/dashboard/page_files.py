"""The files that the page is made of, as they lie in page/.

Owns which they are, and how its modules become one script for a page in one file: they import from each other by name
alone, each at its top (`import { a, b } from "./c.js";`), and no two of them have a name in common, so that one after
the other without their imports they are the same program.
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
    """By name, as it stands in addresses: "index.html", "vendor/uPlot.min.css"."""
    found = sorted(path for path in PAGE.rglob("*") if path.suffix in CONTENT_TYPES)
    return {path.relative_to(PAGE).as_posix(): path.read_bytes() for path in found}


def modules() -> dict[str, str]:
    """Our own modules by name, each after those that it imports from. ValueError for a circle, or one that is
    missing."""
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
    """All modules as one. ValueError where two have a name in common, or an import or export is of another form."""
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
