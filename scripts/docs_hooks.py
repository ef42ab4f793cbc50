"""Hands the pages of docs_pages.py to mkdocs before it builds, and writes beside its pages what is for programs.

`mkdocs serve` shows a change of docs/ at once, as each build lays the pages out anew.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for _folder in ("src", "scripts"):
    if str(ROOT / _folder) not in sys.path:
        sys.path.insert(0, str(ROOT / _folder))

import docs_pages  # noqa: E402
from mkdocs.exceptions import PluginError  # noqa: E402

LAID_OUT = ROOT / "build" / "docs"


def on_config(config: Any) -> Any:
    """Lay the pages out, and have mkdocs read those. PluginError for a link that leads nowhere."""
    site = docs_pages.lay_out(ROOT)
    if site.problems:
        raise PluginError("\n".join(site.problems))
    contents = {LAID_OUT / place: text.encode() for place, text in site.pages.items()}
    contents |= {LAID_OUT / place: file.read_bytes() for place, file in site.files.items()}
    for path in LAID_OUT.rglob("*"):
        if path.is_file() and path not in contents:
            path.unlink()
    for path, content in contents.items():
        if not path.exists() or path.read_bytes() != content:  # `mkdocs serve` builds again at what is written here
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    config.docs_dir = str(LAID_OUT)
    config.nav = docs_pages.whole_nav(config.nav, site.pages)
    return config


def on_post_build(config: Any) -> None:
    """Beside each page its Markdown; llms.txt lists them, llms-full.txt has them all."""
    target = Path(config.site_dir)
    places = [path.relative_to(LAID_OUT).as_posix() for path in LAID_OUT.rglob("*.md")]
    pages = {place: (LAID_OUT / place).read_text(encoding="utf-8") for place in places}
    for place, text in pages.items():
        (target / place).write_text(text, encoding="utf-8")
    (target / "llms.txt").write_text(docs_pages.llms_txt(config.nav, pages), encoding="utf-8")
    (target / "llms-full.txt").write_text(docs_pages.llms_full_txt(config.nav, pages), encoding="utf-8")
