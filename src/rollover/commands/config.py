"""`rollover config`: print the configuration that files and flags make."""

from __future__ import annotations

import argparse

from rollover.commands.verb import Overrides, Verb, load


def arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON without docs")
    form.add_argument("--schema", action="store_true", help="print the JSON schema of a file; needs no FILE.toml")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    from rollover.config import describe

    if args.schema:
        print(describe.schema(), end="")
        return 0
    if not args.files:
        raise ValueError("rollover config needs a FILE.toml (or --schema)")
    resolved = load(args.files, overrides, require_sources=False)
    print(describe.as_json(resolved) if args.json else describe.as_toml(resolved), end="")
    return 0


VERB = Verb("Print the resolved configuration, with the doc of every key.", run, arguments, files="*")
