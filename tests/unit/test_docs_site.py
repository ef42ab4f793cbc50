"""The documentation as a site: every page is there once, its links lead somewhere, and the reference is complete.

The site itself is built by `make docs`, in CI too: strict, so that MkDocs follows links and anchors once more, in what
it has rendered.
"""

from __future__ import annotations

import re
from pathlib import Path

import docs_pages
import docs_reference
import pytest
import yaml

import rollover
from documents import ROOT
from rollover import cli
from rollover.config.schema import field_at


class _AnyTag(yaml.SafeLoader):
    """Reads mkdocs.yml without what its tags name."""


_AnyTag.add_multi_constructor("", lambda loader, suffix, node: suffix)
NAV = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _AnyTag)["nav"]  # noqa: S506


@pytest.fixture(scope="module")
def site() -> docs_pages.Site:
    return docs_pages.lay_out()


def test_every_link_leads_somewhere(site: docs_pages.Site) -> None:
    assert not site.problems
    assert all(url.startswith(("https://", "http://")) for url in site.external)


def test_every_page_is_once_in_the_nav(site: docs_pages.Site) -> None:
    named = list(docs_pages.named_in(docs_pages.whole_nav(NAV, site.pages)))
    assert sorted(named) == sorted(site.pages)


def test_every_page_begins_with_its_title_and_says_what_it_is_about(site: docs_pages.Site) -> None:
    for place, text in site.pages.items():
        assert docs_pages.title_of(text), place
        about = docs_pages.first_sentence(text)
        assert 20 <= len(about) <= 400, f"{place}: {about!r}"


def test_llms_txt_has_every_page_in_the_form_that_is_asked_for(site: docs_pages.Site) -> None:
    nav = docs_pages.whole_nav(NAV, site.pages)
    lines = docs_pages.llms_txt(nav, site.pages).splitlines()
    assert lines[0] == "# Rollover" and lines[2].startswith("> Rollover trains")
    listed = [match for line in lines if (match := re.fullmatch(r"- \[(.+)\]\((\S+\.(?:md|html))\): \S.*", line))]
    assert {match[2].rpartition(".")[0] for match in listed} == {place.removesuffix(".md") for place in site.pages}
    assert len(listed) == len(site.pages)
    assert all(line in ("", lines[0], lines[2]) or line.startswith(("## ", "- [")) for line in lines)
    assert "- [Metrics](metrics.md): " in "\n".join(lines)
    whole = docs_pages.llms_full_txt(nav, site.pages)
    assert all(text.strip() in whole for text in site.pages.values())


# The reference


def test_the_reference_has_every_public_name_once() -> None:
    names = [name for names in docs_reference.PUBLIC.values() for name in names]
    assert sorted(names) == sorted(rollover.__all__)


@pytest.mark.parametrize("name", [name for names in docs_reference.PROTOCOLS.values() for name in names])
def test_what_is_implemented_is_where_the_reference_says(name: str) -> None:
    module, _, thing = name.rpartition(".")
    place = ROOT / "src" / module.replace(".", "/")
    source = (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text(encoding="utf-8")
    assert re.search(rf"^(class|def) {thing}\b|^{thing} =", source, re.MULTILINE)


def test_the_configuration_has_every_key_with_an_anchor() -> None:
    page = docs_reference.configuration()
    anchors = docs_pages.anchors_of(page)
    assert docs_reference.keys() <= anchors
    assert {"rollout.group_size", "tasks.sources.kind", "rollout.logits.regex"} <= anchors
    group_size = field_at("rollout.group_size")
    (row,) = re.findall(r"^\| `group_size`.*$", page, re.MULTILINE)
    assert group_size is not None and group_size.description and group_size.description.split("`")[0] in row
    assert "| `8` |" in row and "an integer, at least 1" in row


def test_every_row_of_a_generated_table_has_its_cells() -> None:
    for place in ("reference/configuration.md", "reference/commands.md"):
        columns = 0
        for line in docs_reference.pages()[place].splitlines():
            if line.startswith("|"):
                cells = len(re.findall(r"(?<!\\)\|", line)) - 1
                columns = columns or cells
                assert cells == columns, line
            else:
                columns = 0


def test_the_command_line_has_every_verb_and_option() -> None:
    page = docs_reference.commands()
    (verbs,) = [a.choices for a in cli.build_parser()._actions if getattr(a, "choices", None)]
    for name, verb in verbs.items():
        section = page.partition(f"\n## rollover {name}\n")[2].partition("\n## ")[0]
        for action in verb._actions:
            for word in action.option_strings:
                assert not word.startswith("--") or word == "--help" or f"`{word}" in section, (name, word)
    assert "\nrollover init [NAME] [FILE.toml] [--list] [--log-format text|json]\n" in page
    assert "rollover bench engine|train|step|tail|scale" in page and "`engine\\|train\\|step" in page


# Links


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a page, a tutorial, an example, code and a picture."""
    pages = {
        "README.md": "# Home\n\nSee [start](docs/start.md#a-part), [it](docs/start.md) and ![it](docs/images/a.png).\n"
        '\n<img src="a.png" width="3">\n',
        "docs/start.md": "# Start\n\nUp to [home](../README.md), [code](../src/a.py) and [more](tutorials/one.md)."
        "\n\n## A part\n",
        "docs/tutorials/one.md": "# One\n\n[Example](../../examples/first/README.md), [folder](../../examples/first),"
        " ![a](../images/a.png), [out](https://example.org/a).\n\n```\n[not](a-link.md)\n```\n",
        "examples/first/README.md": "# First\n\n`[nor](this.md)` [recipe](recipe.toml) [back](../../docs/start.md)\n",
        "examples/first/recipe.toml": "",
        "src/a.py": "",
        "docs/images/a.png": "",
        "a.png": "",
    }
    for name, text in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_links_between_files_become_links_between_pages(repository: Path) -> None:
    site = docs_pages.lay_out(repository)
    assert not site.problems
    assert "[start](start.md#a-part), [it](start.md) and ![it](images/a.png)" in site.pages["index.md"]
    start, one, first = (site.pages[place] for place in ("start.md", "tutorials/one.md", "examples/first/index.md"))
    assert "[home](index.md), [code](repository/src/a.py.txt) and [more](tutorials/one.md)" in start
    assert "[Example](../examples/first/index.md), [folder](../examples/first/index.md), ![a](../images/a.png)" in one
    assert '<img src="repository/a.png" width="3">' in site.pages["index.md"]
    assert "[recipe](../../repository/examples/first/recipe.toml.txt) [back](../../start.md)" in first
    assert "[not](a-link.md)" in one and "`[nor](this.md)`" in first, "code stays as it is"
    assert set(site.files) == {
        "images/a.png",
        "repository/a.png",
        "repository/src/a.py.txt",
        "repository/examples/first/recipe.toml.txt",
    }
    assert site.external == {"https://example.org/a": ["tutorials/one.md"]}


@pytest.mark.parametrize(
    "link", ["gone.md", "start.md#gone", "#gone", "../src/gone.py", "../../outside.md", "images", "start.md#a-part-1"]
)
def test_a_link_that_leads_nowhere_is_found(repository: Path, link: str) -> None:
    (repository.parent / "outside.md").write_text("")
    page = repository / "docs" / "start.md"
    text = page.read_text()
    for wrong in (f"[wrong]({link})", f'<a href="{link}">wrong</a>'):
        page.write_text(f"{text}\n{wrong}\n")
        assert docs_pages.lay_out(repository).problems == [f"docs/start.md: {link} leads nowhere"]


def test_a_key_of_the_configuration_leads_to_what_it_means() -> None:
    text = "## `rollout.group_size`\n\n`rollout.group_size`, `rollout.nothing`, [the `train.num_steps`](a.md)\n"
    linked = docs_pages.with_keys(text, "how/a.md", docs_reference.keys())
    there = "[`rollout.group_size`](../reference/configuration.md#rollout.group_size)"
    assert linked == text.replace("\n`rollout.group_size`", f"\n{there}")


def test_anchors_are_those_of_github() -> None:
    text = "# A `b_c`: [d](e.md) & f\n\n## Twice\n\n## Twice\n\n```\n# no heading\n```\n\n| `x`{ #a.x } |\n"
    assert docs_pages.anchors_of(text) == {"a-b_c-d--f", "twice", "twice-1", "a.x"}


def test_a_backtick_alone_takes_nothing_else_for_code() -> None:
    """Code ends within its paragraph, or its row."""
    text = "| `a` | a ` alone |\n| `b` | [c](d.md) |\n\nOne ` more.\n\n## Title\n\n`over\ntwo lines` [c](d.md)\n"
    assert docs_pages.anchors_of(text) == {"title"}
    assert docs_pages.with_links(text, lambda target: f"to/{target}") == text.replace("d.md", "to/d.md")


def test_a_folder_in_the_nav_stands_for_its_other_pages_in_the_order_of_its_index() -> None:
    nav = [{"First": ["t/b.md", "t/*"]}, {"None": ["u/*"]}]
    index = "# T\n\n[c](c.md#x), [a](../t/a.md), [e](e/index.md)\n"
    pages = {"t/a.md": "", "t/b.md": "", "t/c.md": "", "t/d.md": "", "t/e/index.md": "", "t/index.md": index}
    ordered = ["t/b.md", "t/index.md", "t/c.md", "t/a.md", "t/e/index.md", "t/d.md"]
    assert docs_pages.whole_nav(nav, pages) == [{"First": ordered}]
    assert docs_pages.whole_nav(nav, {"t/b.md": "", "t/d.md": "", "t/c.md": ""}) == [
        {"First": ["t/b.md", "t/c.md", "t/d.md"]}
    ]


# README.md


def test_the_readme_is_short_and_has_what_it_must_have() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200
    assert len(re.findall(r"^!\[.+\]\(docs/.+\)$", text, re.MULTILINE)) == 1, "one picture of a real run"
    assert "──admit──▶" in text, "the diagram"
    assert re.search(r"held-out mean reward after \d+ steps: 0\.\d+", text), "what a real run printed"
    assert len(re.findall(r"^\| .* \| works.* \|$", text, re.MULTILINE)) > 8, "the table of modes"
    assert "\n## What it does not do\n" in text
    assert "\nmake demo\n" in text and "`make test`" in text
