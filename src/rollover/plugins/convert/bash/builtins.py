"""Builtins of bash that change names, arguments or where a command ends."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from rollover.plugins.convert.bash.state import State
from rollover.plugins.convert.bash.text import Text

DECLARING = ("export", "declare", "typeset", "local", "readonly")
_READING = ("read", "mapfile", "readarray", "getopts")
_READ_FLAGS = ("-d", "-rd", "-t", "-n", "-p", "-u", "-i")  # that take a value
_CHANGES_VALUE = re.compile(r"[-+]\w*[iul]")  # of declare


def builtin(state: State, words: Sequence[Text], line: int, heredoc: Text | None) -> bool:
    """Evaluate a builtin. Return whether it is one. heredoc: its input."""
    program, rest = PurePosixPath(words[0].text).name, words[1:]
    if program in ("cd", "pushd", "popd"):
        _change_directory(state, program, [word for word in rest if word.text == "-" or word.text[:1] != "-"])
    elif program in ("exit", "return"):
        state.ended = state.ended or program
    elif program == "shift":
        num = rest[0].text if rest else "1"
        known = state.arguments is not None and num.isdecimal()
        given = list(state.arguments or ()) if known else []
        state.arguments = given[int(num) if int(num) <= len(given) else 0 :] if known else None
    elif program == "set":
        given = [word.text for word in rest]
        _export_all(state, given)
        if "--" in given or (given and given[0][:1] not in ("-", "+")):
            state.arguments = list(rest[given.index("--") + 1 if "--" in given else 0 :])
    elif program == "let":
        for word in rest:
            state.count(word.text)
    elif program == "unset":
        unset(state, rest, line)
    elif program in DECLARING:
        declare_words(state, program, rest, line)
    elif program == "printf" and len(rest) > 1 and rest[0].text == "-v":
        _forget(state, rest[1], f"printf sets it in line {line}")
    elif program in _READING:
        _read(state, words, line, heredoc)
    else:
        return False
    return True


def _change_directory(state: State, program: str, words: Sequence[Text]) -> None:
    """`cd`, `pushd` and `popd`."""
    before = state.names["PWD"]
    if program == "popd":
        word, state.pushed = (state.pushed[-1], state.pushed[:-1]) if state.pushed else (before, ())
    elif not words:
        word = state.names.get("HOME", before) if program == "cd" else before
    elif words[0].text == "-":
        word = state.names.get("OLDPWD", before)
    elif words[0].known and before.known and words[0].text[:1] not in ("/", "~"):
        word = words[0].like(os.path.normpath(os.path.join(before.text, words[0].text)))
    else:
        word = words[0]
    if program == "pushd":
        state.pushed = (*state.pushed, before)
    state.names |= {"OLDPWD": before, "PWD": word}


def _export_all(state: State, words: Sequence[str]) -> None:
    """`set -a` and `set -o allexport`: names that are assigned from here on are exported; with + no longer."""
    for before, word in zip(("", *words), words, strict=False):
        if word == "--" or word[:1] not in ("-", "+") and before[1:] != "o":
            break
        if re.fullmatch(r"[-+]\w*a\w*", word) or (word == "allexport" and before[1:] == "o"):
            state.exports_all = (before if word == "allexport" else word)[0] == "-"


def declare_words(state: State, program: str, words: Sequence[Text], line: int) -> None:
    """Evaluate the words of `export`, `declare` and their siblings."""
    options = [word.text for word in words if word.text[:1] in ("-", "+")]
    if program != "export" and any(re.fullmatch(r"-\w*n\w*", option) for option in options):
        state.doubt(f"line {line} declares a name for another one")
    for word in words:
        if word.text[:1] in ("-", "+"):
            continue
        name, equals, value = word.head.partition("=")
        if not name.isidentifier() or not (equals or word.known):
            state.doubt(f"{word.text[:60]} in line {line} may set any name")
            continue
        declare_name(state, program, name, options)
        if program == "local" and not equals:
            state.unset(name)
        if equals and word.head != word.text or _changes_value(program, options):
            state.forget(name, word.why or f"${name} is declared in line {line} with {' '.join(options)}")
        elif equals:
            state.assign(name, word.like(value))


def declare_name(state: State, program: str, name: str, options: Sequence[str]) -> None:
    """Declare a name before it is assigned: as one that child processes see, or as a local one."""
    if program in ("local", "declare", "typeset") and not any("g" in option for option in options):
        state.make_local(name)
    removes = "-n" in options if program == "export" else any(option[0] == "+" and "x" in option for option in options)
    if removes:
        state.exported.discard(name)
    elif program == "export" or any("x" in option for option in options):
        state.exported.add(name)


def declare_assigned(state: State, program: str, name: str, options: Sequence[str], line: int) -> None:
    """Forget a name whose value a declaration changes: `declare -i`, `-u`, `-l`."""
    if _changes_value(program, options):
        state.forget(name, f"${name} is declared in line {line} with {' '.join(options)}")


def _changes_value(program: str, options: Sequence[str]) -> bool:
    return program != "export" and any(_CHANGES_VALUE.fullmatch(option) for option in options)


def unset(state: State, words: Sequence[Text], line: int) -> None:
    """Remove names or functions."""
    names = [word for word in words if word.text[:1] != "-"]
    for word in names:
        if not word.known:
            state.doubt(f"unset {word.text[:60]} in line {line} may remove any name")
        elif "-f" in [word.text for word in words]:
            state.functions.pop(word.text, None)
        elif word.text.isidentifier():
            state.unset(word.text)
            state.exported.discard(word.text)
        else:
            _forget(state, word, f"an item of it is removed in line {line}")


def _forget(state: State, word: Text, why: str) -> None:
    name = word.text.partition("[")[0]
    if word.known and name.isidentifier():
        state.forget(name, f"${name}: {why}")
    else:
        state.doubt(f"{word.text[:60]}: {why}")


def _read(state: State, words: Sequence[Text], line: int, heredoc: Text | None) -> None:
    pairs = zip(words, words[1:], strict=False)
    flags = _READ_FLAGS if words[0].text == "read" else ()
    names = [word for before, word in pairs if word.text[:1] != "-" and before.text not in flags]
    names = names[1:] if words[0].text == "getopts" else names
    whole = words[0].text == "read" and any(word.text in ("-d", "-rd") for word in words)
    for name in names:
        if whole and heredoc is not None and len(names) == 1 and name.known and name.text.isidentifier():
            state.assign(name.text, heredoc)
        elif name.text:  # an empty one is a delimiter
            _forget(state, name, f"it is read in line {line}")
