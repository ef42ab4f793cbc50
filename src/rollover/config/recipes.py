"""The recipes that come with Rollover: where they are, what they are for, and which file a word on the command line is.

Owns the names. Never reads a table of one (toml_file.py does).
"""

from __future__ import annotations

from pathlib import Path

from rollover.config.table import ConfigError
from rollover.suggest import alike

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
QUICKSTART = "quickstart"


def recipes() -> dict[str, Path]:
    """Name -> file of every recipe; the quickstart comes first."""
    files = sorted(FOLDER.glob("*.toml"), key=lambda path: (path.stem != QUICKSTART, path.stem))
    return {path.stem: path for path in files}


def about(path: Path) -> str:
    """Return the purpose of a recipe: the first sentence of its leading comment."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        lines.append(line.removeprefix("# "))
    return " ".join(lines).partition(". ")[0].removesuffix(".")


def located(word: Path | str) -> tuple[str, Path]:
    """Return (the name for messages, the path) of a FILE on the command line.

    A word without a folder and without a suffix is the file of that name, that file with .toml, or a recipe, whichever
    there is first. So is the name of a recipe with a dot in it. Anything else is the path that it is.
    """
    path = Path(word)
    shipped = recipes().get(str(word))
    if (path.suffix and shipped is None) or path.parent != Path(".") or path.is_file():
        return str(path), path
    beside = Path(f"{path}.toml")
    if beside.is_file():
        return str(beside), beside
    return (str(path), path) if shipped is None else (f"recipe {path}", shipped)


def word_for(name: str) -> Path:
    """Return the word that means the recipe `name` as a FILE, even if a file in the working directory has that name."""
    path = recipe(name)
    return Path(name) if located(name)[1] == path else path


def recipe(name: str) -> Path:
    """Return the file of a recipe. ConfigError if there is none of that name."""
    known = recipes()
    if name not in known:
        raise ConfigError(f"there is no recipe {name!r}{hint(name)}")
    return known[name]


def near(name: str) -> str:
    """Return the recipe that `name` may have meant; "" if none is like it."""
    known = list(recipes())
    found = alike(name, known) or [k for k in known if name in k.split("_")]
    return found[0] if found else ""


def hint(name: str) -> str:
    """Return the end of a message about a name that no recipe has: the one that was meant, or all of them."""
    meant = near(name)
    return f". Did you mean the recipe {meant}?" if meant else f". The recipes are {', '.join(recipes())}"
