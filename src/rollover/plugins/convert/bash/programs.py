"""Evaluates one command: a builtin, a function, a program that runs another script, or a program that is collected."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, Protocol

from rollover.plugins.convert.bash.builtins import builtin
from rollover.plugins.convert.bash.state import State
from rollover.plugins.convert.bash.text import Piece, Text, joined, plain, unknown
from rollover.plugins.convert.bash.written import Command, Script, Target, called, sourced, write, write_of

_SHELLS = ("bash", "sh", "zsh", "dash")
_PRINTING = ("echo", "printf", "cat", "tee", "grep", "sed", "awk")
_STARTING = ("nohup", "env", "time", "timeout", "setsid", "srun", "sbatch", "qsub", "sudo", "numactl", "nice", "ionice",
             "stdbuf", "taskset")  # a script, too  # fmt: skip
_TAKES_VALUE = re.compile(r"[-+]\w*[oO]|--rcfile|--init-file")  # of the options of a shell
_ADDING_WORDS = ("xargs", "parallel")  # to a command, from their input
_ISOLATED = {"docker", "podman", "nerdctl", "kubectl", "ssh"}  # which do not see the names that are exported here
_SETTING_UP = re.compile(r"\b(?:conda|mamba|micromamba|pyenv|modulecmd|ssh-agent|direnv)\b")  # prints no options
# Not functions that a file which is not read may define.
_KNOWN = re.compile(
    r"(?:python|pip|uv|ray|torchrun|accelerate|deepspeed|trl|conda|mamba|module|docker|srun|sbatch|ssh|mkdir|rm|ls|sleep|"
    r"nvidia|rocm|chmod|tar|git|wget|curl|hf|huggingface|nohup|env|time|ulimit|umask|wait|kill|pkill|trap|exec|true|"
    r"false|unzip|apt|sudo|numactl|taskset|ln|touch|date|tail|head|find|df|free|ps|nproc|hostname|export|:)[\w.-]*"
)
_HOLDS_COMMAND = re.compile(r"\S\s.*\b(?:python[\d.]*|torchrun|accelerate|trl|bash|sh|ray)\s", re.S)
_ENVIRONMENT_FLAG = re.compile(r"(?:-e|--env)(?:=(.*))?", re.S)
_UNSET = re.compile(r"(?:-u|--unset=)(\w+)")  # of env
_ENVIRONMENT_FILE = re.compile(r"--(?:env-file|runtime-env|runtime-env-json|export|export-file)(?:=(?!ALL$).*)?", re.S)


class Run(Protocol):
    """What evaluates a script."""

    state: State
    script: Script
    path: str

    def call(self, body: Any, arguments: list[Text], line: int) -> None:
        """Evaluate a function."""

    def within(self, text: Text, state: State, line: int, path: str = "") -> None:
        """Evaluate another text as a script. path: of its file, if that is another one."""


def start(run: Run, words: list[Text], line: int, heredoc: Text | None, target: Target | None) -> None:
    """Evaluate a command. heredoc: its input. target: the file that its output goes to."""
    program, state = PurePosixPath(words[0].text).name or words[0].text, run.state
    if target is not None:
        write(run.script, state, target, _output(words, state, heredoc))
    if program in state.functions:
        run.call(state.functions[program], words[1:], line)
    elif builtin(state, words, line, heredoc):
        pass
    elif program == "eval":
        text = spaced(words[1:])
        run.within(text, state, line)
        if not re.search(r"\s", text.head) and not text.known and not _SETTING_UP.search(text.text):
            state.doubt(f"line {line} evaluates what is not known")
    elif program in ("source", ".") and len(words) > 1:
        _source(run, words, line)
    elif not write_of(run.script, state, program, words[1:], heredoc) and program not in _PRINTING:
        _program(run, words, line, heredoc)


def _output(words: list[Text], state: State, heredoc: Text | None) -> Text | None:
    if words[0].text == "cat" and len(words) == 1:
        return heredoc
    text = printed(words, state) if words[0].text == "echo" else None
    return None if text is None else text + plain("\n")


def _source(run: Run, words: list[Text], line: int) -> None:
    """Evaluate a file in the shell itself; one that is not there may set any name."""
    state = run.state
    try:
        path, text = sourced(run.script, state, words[1], run.path)
        if text is None:
            return
        before = state.names.get("BASH_SOURCE"), state.returned, state.arguments
        state.names["BASH_SOURCE"], state.returned = plain(path), None
        state.arguments = words[2:] or state.arguments
        run.within(text, state, line)
        state.leave(line)
        source, state.returned, state.arguments = before
        state.names.pop("BASH_SOURCE", None)
        state.names |= {"BASH_SOURCE": source} if source is not None else {}
        why = "" if text.known else text.why
    except ValueError as error:
        why = str(error)
    if why:
        state.doubt(f"`{words[0].text} {words[1].text}` (line {line}) may set any name: {why}")


def _program(run: Run, words: list[Text], line: int, heredoc: Text | None) -> None:
    """A program: the scripts that it is given, or the command itself."""
    if any(word.text in _ADDING_WORDS for word in words):
        words = [*words, unknown("$XARGS", f"{words[0].text} adds words of its input to the command")]
    child = _child(run.state, words)
    for flag, value in zip(words, words[1:], strict=False):
        if match := _ENVIRONMENT_FLAG.fullmatch(flag.text):
            given = flag.like(match[1]) if match[1] is not None else value
            name, equals, item = given.text.partition("=")
            if equals:
                child.assign(name, given.like(item))
                child.exported.add(name)
            elif name in run.state.exported and name in run.state.names:
                child.assign(name, run.state.names[name])
    found = _scripts(run, words, line, heredoc, child)
    for text, path in found:
        run.within(text, child.copy(), line, path)
    if not found:
        run.script.add(Command(line, tuple(words), run.state.names["PWD"].text))
        if run.state.unseen and re.fullmatch(r"[\w-]+", words[0].text) and not _KNOWN.fullmatch(words[0].text):
            run.state.doubt(f"{words[0].text} (line {line}) may be a function: {run.state.unseen}")


def _child(state: State, words: Sequence[Text]) -> State:
    """What the program that a command starts sees of the names."""
    child = state.of_child()
    texts = [word.text for word in words]
    if not _ISOLATED.isdisjoint(texts):
        child.names = {name: value for name, value in child.names.items() if name in ("HOME", "PWD")}
    if file := next((word.text for word in words if _ENVIRONMENT_FILE.fullmatch(word.text)), ""):
        child.doubt(f"{file[:60]} may set any name")
    if "sudo" in texts and _ISOLATED.isdisjoint(texts) and not {"-E", "--preserve-env"} & {*texts}:
        child.doubt("sudo passes some names only")
    for before, word in zip(("", *texts), words, strict=False):  # env NAME=VALUE bash
        if "env" in texts[:1] and word.text in ("-i", "-", "--ignore-environment"):
            child.names = {name: value for name, value in child.names.items() if name == "PWD"}
        elif "env" in texts[:1] and (unset := _UNSET.fullmatch(word.text if before != "-u" else f"-u{word.text}")):
            child.unset(unset[1])
        name, equals, value = word.text.partition("=")
        if PurePosixPath(name).name in _SHELLS:
            break
        if equals and name.isidentifier():
            child.assign(name, word.like(value))
            child.exported.add(name)
    return child


def _scripts(run: Run, words: list[Text], line: int, heredoc: Text | None, child: State) -> list[tuple[Text, str]]:
    """What a command runs as a script, each with the path of its file: a text behind `-c`, a file, or its input."""
    texts = [word.text for word in words]
    shell = next((i for i, text in enumerate(texts) if PurePosixPath(text).name in _SHELLS), None)
    rest = words[shell + 1 :] if shell is not None else []
    option = next((i for i, word in enumerate(rest) if re.fullmatch(r"-\w*c", word.text)), None)
    if option is not None and len(rest) > option + 1:
        child.arguments = rest[option + 3 :]
        return [(rest[option + 1], "")]
    file = next(
        (
            i
            for i, word in enumerate(rest)
            if word.text[:1] not in ("-", "+") and not (i and _TAKES_VALUE.fullmatch(rest[i - 1].text))
        ),
        None,
    )
    if shell is None and (texts[0].endswith(".sh") or texts[0] in _STARTING):
        rest = words
        file = next((i for i, text in enumerate(texts) if text.endswith((".sh", ".sbatch", ".slurm"))), None)
        if file is None and texts[0] in ("sbatch", "qsub") and len(words) > 1:
            file = len(words) - 1
    if file is not None and (found := called(run.script, run.state, rest[file], run.path, line)) is not None:
        child.arguments = rest[file + 1 :]
        return [(found[1], found[0])]
    if heredoc is not None and (shell is not None or texts[0] in ("sbatch", "ssh")):
        return [(heredoc, "")]
    of_words = [w for w in words[1:] if _HOLDS_COMMAND.search(w.text) and "=" not in w.text.split()[0]]
    of_words += [plain(w.text.partition("=")[2]) for w in words if w.known and w.text.startswith("--wrap=")]
    return [(text, "") for text in of_words]


def printed(words: Sequence[Text], state: State) -> Text | None:
    """What a command prints, if only its arguments decide that."""
    program, rest = words[0].text if words else "", list(words[1:])
    if program == "date":
        return plain("now")
    if program == "pwd":
        return state.names["PWD"]
    if not all(word.known or word.in_doubt for word in rest):
        return None
    if program == "echo" and not (rest and rest[0].text.startswith("-")):
        return spaced(rest)
    first = rest[0] if rest and not rest[0].text.startswith("-") else None
    if first is None:
        return None
    if program == "dirname" and len(rest) == 1:
        return first.like(os.path.dirname(first.text.rstrip("/")) or ("/" if first.text[:1] == "/" else "."))
    if program == "basename" and len(rest) < 3:
        name = os.path.basename(first.text.rstrip("/")) or "/"
        suffix = rest[1].text if len(rest) > 1 else ""
        return first.like(name.removesuffix(suffix) if name != suffix else name)
    return None


def spaced(words: Sequence[Text]) -> Text:
    """The words with a space between them."""
    found: list[Piece] = []
    for word in words:
        found += [Piece(" "), *word.pieces] if found else list(word.pieces)
    return joined(found)
