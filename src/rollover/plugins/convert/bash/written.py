"""What a script holds: its commands, and the files that it writes, sources or changes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rollover.plugins.convert.bash.state import State
from rollover.plugins.convert.bash.text import Text, plain, unknown
from rollover.plugins.convert.files import text_of

_EDITING = ("mv", "patch", "truncate", "yq", "crudini", "wget", "curl", "rsync", "dd", "jq")
_COPYING = ("cp", "ln", "install")  # to the last word
_EDITING_IN_PLACE = ("sed", "perl", "awk", "gawk")
_IN_PLACE = re.compile(r"-\w*i\S*|--in-place\S*")
# They set up a shell as the environment of `rollover convert` is: no options of a run are in them.
_ENVIRONMENTS = re.compile(
    r"(?:.*/)?(?:activate|conda\.sh|mamba\.sh|\.bashrc|\.bash_profile|\.profile|setvars\.sh|set_env\.sh|modules?\.sh|"
    r"lmod\.sh)|/etc/profile\S*|/etc/bashrc"
)


@dataclass(frozen=True)
class Command:
    """A command that is neither a builtin nor a script within the script. directory: where it starts."""

    line: int
    words: tuple[Text, ...]
    directory: str = "."

    @property
    def program(self) -> str:
        """The last part of the name of what is started."""
        return PurePosixPath(self.words[0].text).name if self.words else ""


@dataclass
class Script:
    """commands: those of a script, in order. files: the text of files that it writes, by their place.
    may_have_trained: whether a command has started Python or TRL. called: the texts of the scripts that it starts.
    missing: (line, name, reason) of scripts that it starts and that cannot be read. running: the paths of those that it
    is in while it is evaluated."""

    commands: list[Command] = field(default_factory=list)
    files: dict[str, Text] = field(default_factory=dict)
    may_have_trained: bool = False
    called: list[str] = field(default_factory=list)
    missing: list[tuple[int, str, str]] = field(default_factory=list)
    running: list[str] = field(default_factory=list)

    def add(self, command: Command) -> None:
        """Append a command."""
        self.commands.append(command)
        texts = [word.text for word in command.words]
        self.may_have_trained |= any(text in ("-m", "trl") or text.endswith(".py") for text in texts)


@dataclass(frozen=True)
class Target:
    """The file that the output of a command goes to. adds: to what is in it."""

    path: str
    adds: bool = False


def place(path: str, directory: str) -> str:
    """The key of a file in `Script.files`."""
    return os.path.normpath(os.path.join(directory, path))


def written(script: Script, state: State, path: str) -> Text | None:
    """The text of a file that the script writes; None of any other."""
    return script.files.get(place(path, state.names["PWD"].text))


def write(script: Script, state: State, target: Target, text: Text | None) -> None:
    """Note what is written. text: None if it is not known."""
    if target.path.startswith("/dev/"):
        return
    where = place(target.path, state.names["PWD"].text)
    new = unknown(target.path, "what is written into it is not evaluated") if text is None else text
    before = script.files.get(where)
    if target.adds:
        new = (unknown(target.path, "what was in it before is not known") if before is None else before) + new
    if before is not None and before != new and script.may_have_trained:
        new = unknown(target.path, "it is written again after a command that may read it")
    script.files[where] = new


def write_of(script: Script, state: State, program: str, words: Sequence[Text], heredoc: Text | None) -> bool:
    """Note the files that `tee`, `sed -i` and other programs write. Return whether it is one of them."""
    options = [word.text for word in words if word.text[:1] == "-"]
    paths = [word.text for word in words if word.text[:1] != "-"]
    if program == "tee":
        for path in paths:
            write(script, state, Target(path, "-a" in options), heredoc)
        return True
    in_place = program in _EDITING_IN_PLACE and any(_IN_PLACE.fullmatch(option) for option in options)
    if not in_place and program not in (*_EDITING, *_COPYING):
        return False
    for path in paths[-1:] if program in _COPYING else paths:
        write(script, state, Target(path), None)
    return True


def sourced(script: Script, state: State, word: Text, path: str) -> tuple[str, Text | None]:
    """The path and the text of a file that a script sources; None for one that only sets up a shell. path: that of the
    script. ValueError for one that cannot be read."""
    if _ENVIRONMENTS.fullmatch(word.text):
        return "", None
    if not word.known:
        raise ValueError(word.why)
    if (text := written(script, state, word.text)) is not None:
        return word.text, text
    return _on_disk(state, word, path)


def called(script: Script, state: State, word: Text, path: str, line: int) -> tuple[str, Text] | None:
    """The path and the text of a script that another one starts; None for one that is being evaluated, and, with a
    note, for one that cannot be read. path: that of the script that starts it."""
    if (text := written(script, state, word.text)) is not None:
        return path, text
    try:
        if not word.known:
            raise ValueError(word.why)
        found, text = _on_disk(state, word, path)
    except ValueError as error:
        script.missing.append((line, word.text, str(error)))
        return None
    if any(os.path.exists(one) and os.path.samefile(found, one) for one in (path, *script.running)):
        return None  # it starts itself, or they start each other
    script.called.append(text.text)
    return found, text


def _on_disk(state: State, word: Text, path: str) -> tuple[str, Text]:
    """The path and the text of a file that a script names: as seen from where it runs, or from any folder above the
    script's own (launch scripts are started from the root of their repository)."""
    above, here = [str(parent) for parent in PurePosixPath(path).parents], state.names["PWD"].text
    directories = dict.fromkeys((here, *(os.path.join(parent, here) for parent in above), *above, "."))
    files = [os.path.expanduser(os.path.join(directory, word.text)) for directory in directories]
    for file in filter(os.path.isfile, files):
        return file, plain(text_of(Path(file)))
    raise ValueError("it is not a regular file" if any(map(os.path.exists, files)) else "it is not there")
