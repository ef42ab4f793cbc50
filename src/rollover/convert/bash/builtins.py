"""Builtins of bash that change names, arguments or where a command ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from rollover.convert.bash.state import State
from rollover.convert.bash.text import Text

DECLARING = ("export", "declare", "typeset", "local", "readonly")
_READING = ("read", "mapfile", "readarray", "getopts")
_READ_FLAGS = ("-d", "-rd", "-t", "-n", "-p", "-u", "-i")  # that take a value
_CHANGES_VALUE = re.compile(r"[-+]\w*[iul]")  # of declare


def builtin(state: State, words: Sequence[Text], line: int, heredoc: Text | None) -> bool:
    """Evaluate a builtin. Return whether it is one. heredoc: its input."""
    program, rest = PurePosixPath(words[0].text).name, words[1:]
    if program in ("cd", "pushd"):
        if rest:
            state.names["PWD"] = rest[0]
    elif program in ("exit", "return"):
        state.ended = state.ended or program
    elif program == "shift":
        state.arguments = state.arguments[1:] if state.arguments is not None and not rest else None
    elif program == "set":
        given = [word.text for word in rest]
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
    if program == "export" or any("x" in option for option in options):
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
