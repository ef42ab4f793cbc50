"""`rollover config`: print the configuration that files and flags make."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollover.commands import Overrides, Verb, load


def arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON without docs")
    form.add_argument("--schema", action="store_true", help="print the JSON schema of a file; needs no FILE.toml")
    text = "rewrite each FILE.toml with the present names of keys that an earlier version called otherwise"
    form.add_argument("--upgrade", action="store_true", help=text)


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    from rollover.config import describe

    if args.schema:
        print(describe.schema(), end="")
        return 0
    if not args.files:
        raise ValueError("rollover config needs a FILE.toml (or --schema)")
    if args.upgrade:
        if overrides:
            raise ValueError(f"rollover config --upgrade changes files alone: leave out --{overrides[0][0]}")
        for path in args.files:
            _upgrade(path)
        return 0
    resolved = load(args.files, overrides, require_sources=False)
    print(describe.as_json(resolved) if args.json else describe.as_toml(resolved), end="")
    return 0


def _upgrade(path: Path) -> None:
    """Rewrite a file with today's keys, and say what changed."""
    from rollover.config.renames import upgraded_text
    from rollover.config.toml_file import read_toml
    from rollover.files import atomic_write_text

    read_toml(path)  # a clear error for a file that is missing, or not TOML
    try:
        text, messages = upgraded_text(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if messages:
        atomic_write_text(path, text)
    for message in messages or ["nothing to change"]:
        print(f"{path}: {message}")


VERB = Verb("Print the resolved configuration, with the doc of every key.", run, arguments, files="*")
