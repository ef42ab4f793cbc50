"""The pages of the documentation's site as Markdown: what is a page, where it stands, where its links lead.

A page is written for GitHub, where a link leads to a file of the repository. On the site that file is another page, or
a copy. Owns the layout, the links, the order (`nav` of mkdocs.yml, in which `folder/*` stands for the other pages of a
folder, as its index.md has them) and llms.txt (https://llmstxt.org). Renders nothing: docs_hooks.py hands this to
mkdocs.

    python scripts/docs_pages.py      prints what is wrong with links, and then every link to another site
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import docs_reference

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = "reference/configuration.md"
STYLE = "site.css"
COPIES = "repository"  # the folder of the site for files of the repository that are no pages
_AS_IT_IS = (".gif", ".html", ".jpg", ".jpeg", ".pdf", ".png", ".svg", ".webp", ".txt")  # any other becomes a text

# A block; what is between two backticks each side, or between one, in one paragraph or row.
_CODE = re.compile(
    r"(^[ >]*```.*?^[ >]*```[ ]*$|``[^\n]+?``|`(?:[^`\n]|\n(?![ \t]*(?:\n|\||#|<!--)))+`)", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r'(\]\(|<(?:a|img)\b[^>]*? (?:href|src)=")([^)\s"]+)')
_HEADING = re.compile(r"^(#+) +(.*?) *$", re.MULTILINE)
_NAMED = re.compile(r"\{ #([\w.-]+) \}")


@dataclass
class Site:
    """What the site consists of. `pages` and `files` by their place on it."""

    pages: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    external: dict[str, list[str]] = field(default_factory=dict)


def sources(root: Path = ROOT) -> dict[Path, str]:
    """Every file of the repository that is a page, and its place on the site."""
    found = {root / "README.md": "index.md"}
    others = (root / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))
    found |= {path: path.name for path in others if path.exists()}
    for folder, inside in ((root / "docs", root / "docs"), (root / "examples", root)):
        for path in sorted(folder.rglob("*.md")):
            place = path.relative_to(inside).as_posix()
            found[path] = re.sub(r"(^|/)README\.md$", r"\1index.md", place)
    return found


def lay_out(root: Path = ROOT) -> Site:
    """The whole site; what is wrong with a link stands in its `problems`."""
    site = Site()
    generated = docs_reference.pages()
    of_file = sources(root)
    texts = {path: path.read_text(encoding="utf-8") for path in of_file}
    anchors = {path.resolve(): anchors_of(text) for path, text in texts.items()}
    places = {path.resolve(): place for path, place in of_file.items()}
    keys = docs_reference.keys()
    site.files |= {STYLE: root / "docs" / STYLE} if (root / "docs" / STYLE).exists() else {}
    for path, place in of_file.items():
        assert place not in site.pages and place not in generated, f"two pages at {place}"

        def follow(target: str, path: Path = path, place: str = place) -> str:
            if re.match(r"[a-z]+:", target):
                site.external.setdefault(target, []).append(place)
                return target
            file, _, anchor = target.partition("#")
            there = _existing(root, path, file)
            problem = there is None or (anchor and there in anchors and anchor not in anchors[there])
            if there is None or problem:
                site.problems.append(f"{path.relative_to(root)}: {target} leads nowhere")
                return target
            if there not in places:
                places[there] = _copied(root, there)
                site.files[places[there]] = there
            beside = posixpath.relpath(places[there], posixpath.dirname(place) or ".") if file else ""
            return beside + (f"#{anchor}" if anchor else "")

        site.pages[place] = with_links(texts[path], follow)
    site.pages |= generated
    site.pages = {place: with_pipes(with_keys(text, place, keys)) for place, text in site.pages.items()}
    return site


def _existing(root: Path, page: Path, file: str) -> Path | None:
    """The file that a link of a page leads to; of a folder its README.md."""
    there = (page.parent / file).resolve() if file else page.resolve()
    if there.is_dir():
        there /= "README.md"
    return there if there.is_file() and there.is_relative_to(root.resolve()) else None


def _copied(root: Path, file: Path) -> str:
    """The place of a file that is no page: a picture of docs/ beside its page, another file as a text to be read."""
    place = file.relative_to(root.resolve()).as_posix()
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    return f"{COPIES}/{place}" + ("" if file.suffix in _AS_IT_IS else ".txt")


def with_links(text: str, follow: Callable[[str], str]) -> str:
    """A text with another target for each of its links; code stays as it is."""
    parts = _CODE.split(text)
    parts[::2] = [_LINK.sub(lambda m: m[1] + follow(m[2]), part) for part in parts[::2]]
    return "".join(parts)


def with_pipes(text: str) -> str:
    """A text whose code in tables has its `|` bare, as Python-Markdown has it; GitHub wants it escaped."""

    def bare(row: re.Match[str]) -> str:
        return re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row[0])

    return re.sub(r"^\|.*$", bare, text, flags=re.MULTILINE)


def with_keys(text: str, place: str, keys: Collection[str]) -> str:
    """A text in which each key of the configuration, where it stands as code, leads to what it means."""
    if place == CONFIGURATION:
        return text
    there = posixpath.relpath(CONFIGURATION, posixpath.dirname(place) or ".")
    parts = _CODE.split(text)
    for i in range(1, len(parts), 2):
        before = "".join(parts[max(0, i - 9) : i])
        in_link = before.rfind("[") > before.rfind("]")
        in_heading = before.rpartition("\n")[2].startswith("#")
        if parts[i].strip("`") in keys and not in_link and not in_heading:
            parts[i] = f"[{parts[i]}]({there}#{parts[i].strip('`')})"
    return "".join(parts)


def anchors_of(text: str) -> set[str]:
    """The anchors of a page: those of its headings as GitHub makes them, and those that are named."""
    parts = _CODE.split(text)
    parts[1::2] = [part if "\n" not in part else "" for part in parts[1::2]]
    found: dict[str, int] = {}
    for _, title in _HEADING.findall("".join(parts)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug if n == 0 else f"{slug}-{n}" for slug, last in found.items() for n in range(last + 1)} | set(
        _NAMED.findall(text)
    )


# Order


def whole_nav(nav: list[Any], pages: Mapping[str, str]) -> list[Any]:
    """`nav` of mkdocs.yml with the pages that `folder/*` stands for; without an empty section."""
    named = {place for place in named_in(nav) if "*" not in place}

    def expanded(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            if isinstance(inner, list):
                below = [one for each in inner for one in expanded(each)]
                return [{title: below}] if below else []
            return [entry]
        if "*" not in entry:
            return [entry]
        matching = [place for place in pages if fnmatchcase(place, entry) and place not in named]
        index = entry.replace("*", "index.md")
        inside = posixpath.dirname(index)
        order = [index, *(posixpath.normpath(f"{inside}/{link}") for link in _links(pages.get(index, "")))]
        return sorted(matching, key=lambda place: (order.index(place) if place in order else len(order), place))

    return [one for entry in nav for one in expanded(entry)]


def _links(text: str) -> list[str]:
    """The files that a text links to, in order."""
    return [link.partition("#")[0] for part in _CODE.split(text)[::2] for _, link in _LINK.findall(part)]


def named_in(nav: Any) -> Iterator[str]:
    """The places that a nav names, in order."""
    if isinstance(nav, str):
        yield nav
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from named_in(entry)


# For language models


def llms_txt(nav: list[Any], pages: Mapping[str, str]) -> str:
    """llms.txt: what this is, then each section of the nav as a list of links with what each page is about."""
    home = pages["index.md"]
    lines = [f"# {title_of(home)}", "", f"> {_plain(_first_paragraph(home))}"]
    sections = {"Start": [entry for entry in nav if isinstance(entry, str)]}
    for entry in nav:
        for section, inner in entry.items() if isinstance(entry, dict) else ():
            sections.setdefault(section, []).extend(named_in(inner))
    for section, places in sections.items():
        lines += ["", f"## {section}", ""]
        for place in places:
            # What mkdocstrings fills in is on the rendered page alone.
            target = place.removesuffix("md") + "html" if "\n::: " in pages[place] else place
            lines.append(f"- [{title_of(pages[place])}]({target}): {first_sentence(pages[place])}")
    return "\n".join(lines) + "\n"


def llms_full_txt(nav: list[Any], pages: Mapping[str, str]) -> str:
    """All pages in the order of the nav, as one text."""
    return "\n\n".join(pages[place].strip() for place in named_in(nav)) + "\n"


def title_of(text: str) -> str:
    heading = _HEADING.search(text)
    assert heading and heading[1] == "#", f"a page begins with its title, and this with {text[:40]!r}"
    return heading[2].replace("`", "")


def first_sentence(text: str) -> str:
    """What a page is about, in its own words."""
    sentence = re.match(r".*?[.:](?= [A-Z`*]|$)", _plain(_first_paragraph(text)))
    return sentence[0].rstrip(":") if sentence else _plain(_first_paragraph(text))


def _first_paragraph(text: str) -> str:
    for part in text.partition("\n")[2].strip().split("\n\n"):
        if not re.match(r"#|\||<!--|```|!\[|:::", part):
            return part
    return ""


def _plain(text: str) -> str:
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"\*\*([^*]+)\*\*", r"\1", text).split())


def main() -> int:
    site = lay_out()
    for problem in site.problems:
        print(problem)
    for url, places in sorted(site.external.items()):
        print(url, *(str(PurePosixPath(place)) for place in dict.fromkeys(places)))
    return 1 if site.problems else 0


if __name__ == "__main__":
    sys.exit(main())
