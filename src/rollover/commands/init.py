"""`rollover init`: write a recipe as a file to edit."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from rollover.commands import Overrides, Verb


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", default="", help="which recipe (default: quickstart)")
    add("file", nargs="?", metavar="FILE.toml", default="", help="what to write (default: NAME.toml)")
    add("--list", action="store_true", help="print the names of all recipes, and write nothing")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    from rollover.config import recipes
    from rollover.config.starter import write_starter

    if args.list:
        for name, path in recipes.recipes().items():
            print(f"{name:18} {recipes.about(path)}")
        return 0
    name, file = args.name, args.file
    if not file and name.endswith(".toml"):
        name, file = "", name
    name = name or recipes.QUICKSTART
    target = Path(file or f"{name}.toml")
    write_starter(name, target)
    print(f"wrote {target}; to train with it: rollover train {shlex.quote(str(target))}")
    return 0


VERB = Verb("Write a recipe as a file of your own, every key explained.", run, arguments, files="", keys=False)
