"""Evaluates one command: a builtin, a function, a program that runs another script, or a program to collect.

Records the files that a script writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from rollover.plugins.convert.bash.state import State
from rollover.plugins.convert.bash.text import Piece, Text, join, plain, unknown
from rollover.plugins.convert.files import text_of

_SHELLS = ("bash", "sh", "zsh", "dash")
_DECLARING = ("export", "declare", "typeset", "local", "readonly", "unset")
_PRINTING = ("echo", "printf", "cat", "tee", "grep", "sed", "awk")
_STARTING = ("nohup", "env", "time", "timeout", "setsid", "srun", "sbatch", "qsub", "sudo", "numactl", "nice", "ionice",
             "stdbuf", "taskset")  # may start a script  # fmt: skip
_TAKES_VALUE = re.compile(r"[-+]\w*[oO]|--rcfile|--init-file")  # of the options of a shell
_ISOLATED = {"docker", "podman", "nerdctl", "kubectl", "ssh"}  # they do not inherit exported names
_SETTING_UP = re.compile(r"\b(?:conda|mamba|micromamba|pyenv|modulecmd|ssh-agent|direnv)\b")  # prints no options
_HOLDS_COMMAND = re.compile(r"\S\s.*\b(?:python[\d.]*|torchrun|accelerate|trl|bash|sh|ray)\s", re.S)
_ENVIRONMENT_FLAG = re.compile(r"(?:-e|--env)(?:=(.*))?", re.S)
# The names that these pass on are unknown.
_PASSES_OTHERS = re.compile(
    r"--(?:env-file|runtime-env|runtime-env-json|export|export-file|unset)(?:=(?!ALL$).*)?|sudo", re.S
)
# Known programs: not functions of a file that could not be read.
_KNOWN = re.compile(
    r"(?:python|pip|uv|ray|torchrun|accelerate|deepspeed|trl|conda|mamba|module|docker|srun|sbatch|ssh|mkdir|rm|ls|sleep|"
    r"nvidia|rocm|chmod|tar|git|wget|curl|hf|huggingface|nohup|env|time|ulimit|umask|wait|kill|pkill|trap|exec|true|"
    r"false|unzip|apt|sudo|numactl|taskset|ln|touch|date|tail|head|find|df|free|ps|nproc|hostname|export|:)[\w.-]*"
)
_EDITING = ("mv", "patch", "truncate", "yq", "crudini", "wget", "curl", "rsync", "dd", "jq")
_COPYING = ("cp", "ln", "install")  # to the last word
_IN_PLACE = re.compile(r"-\w*i\S*|--in-place\S*")  # of sed and the like
# Files that set up a shell, and contain no options of a run.
_ENVIRONMENTS = re.compile(
    r"(?:.*/)?(?:activate|conda\.sh|mamba\.sh|\.bashrc|\.bash_profile|\.profile|setvars\.sh|set_env\.sh|modules?\.sh|"
    r"lmod\.sh)|/etc/profile\S*|/etc/bashrc"
)


@dataclass(frozen=True)
class Command:
    """A command that is neither a builtin nor another script. directory: its working directory."""

    line: int
    words: tuple[Text, ...]
    directory: str = "."


@dataclass
class Script:
    """Commands of a script in order, and its files.

    files: the text of files that it writes, by path. may_have_trained: whether a command has started Python or TRL.
    called: the texts of the scripts that it starts. missing: (line, name, reason) of scripts that cannot be read.
    running: paths of the scripts under evaluation, outermost first.
    """

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

    def write(self, state: State, target: tuple[str, bool], text: Text | None) -> None:
        """Record a written file. target: its path, and whether text is appended. text: None if unknown."""
        path, adds = target
        if path.startswith("/dev/"):
            return
        where = _file_key(state, path)
        new = unknown(path, "what is written into it is not evaluated") if text is None else text
        before = self.files.get(where)
        if adds:
            new = (unknown(path, "what was in it before is not known") if before is None else before) + new
        if before is not None and before != new and self.may_have_trained:
            new = unknown(path, "it is written again after a command that may read it")
        self.files[where] = new

    def written_by(self, state: State, program: str, words: Sequence[str], heredoc: Text | None) -> bool:
        """Record the files that `tee`, `sed -i` and the like write. Return whether it is such a program."""
        options, paths = [w for w in words if w[:1] == "-"], [w for w in words if w[:1] != "-"]
        in_place = program in ("sed", "perl", "awk", "gawk") and any(map(_IN_PLACE.fullmatch, options))
        if program != "tee" and not in_place and program not in (*_EDITING, *_COPYING):
            return False
        for path in paths[-1:] if program in _COPYING else paths:
            self.write(state, (path, "-a" in options), heredoc if program == "tee" else None)
        return True

    def find(self, state: State, word: Text, path: str) -> tuple[str, Text]:
        """Return the path and the text of a file that the script at `path` names. ValueError if it cannot be read.

        Looks in the files that the script writes, its working directory, and all folders above it: launch scripts are
        started from the root of their repository.
        """
        if not word.known:
            raise ValueError(word.why)
        if (text := self.files.get(_file_key(state, word.text))) is not None:
            return word.text, text
        above, here = [str(parent) for parent in PurePosixPath(path).parents], state.text("PWD")
        directories = dict.fromkeys((here, *(os.path.join(parent, here) for parent in above), *above, "."))
        files = [os.path.expanduser(os.path.join(directory, word.text)) for directory in directories]
        for file in filter(os.path.isfile, files):
            return file, plain(text_of(Path(file)))
        raise ValueError("it is not a regular file" if any(map(os.path.exists, files)) else "it is not there")


class Shell(Protocol):
    """The interpreter of a script (script.py), as used by commands."""

    state: State
    script: Script
    path: str

    def call(self, name: str, arguments: list[Text]) -> None:
        """Evaluate a call of a function."""

    def run_text(self, text: Text, state: State, line: int, path: str = "") -> None:
        """Evaluate another text. path: its file, if another."""


def _file_key(state: State, path: str) -> str:
    """Return the key of a file in `Script.files`."""
    return os.path.normpath(os.path.join(state.text("PWD"), path))


def run_command(
    shell: Shell, words: list[Text], line: int, heredoc: Text | None, target: tuple[str, bool] | None
) -> None:
    """Evaluate a command. heredoc: its input. target: the file of its output."""
    program, state = PurePosixPath(words[0].text).name or words[0].text, shell.state
    if target is not None:
        text = heredoc if words[0].text == "cat" and len(words) == 1 else None
        if words[0].text == "echo" and (line_of := output_of(words, state)) is not None:
            text = line_of + plain("\n")
        shell.script.write(state, target, text)
    if program in state.functions:
        shell.call(program, words[1:])
    elif _builtin(state, program, words[1:], line, heredoc):
        pass
    elif program == "eval":
        text = join_words(words[1:])
        shell.run_text(text, state, line)
        if not re.search(r"\s", text.head) and not text.known and not _SETTING_UP.search(text.text):
            state.doubt(f"line {line} evaluates what is not known")
    elif program in ("source", ".") and len(words) > 1:
        _source(shell, words, line)
    elif not shell.script.written_by(state, program, [word.text for word in words[1:]], heredoc):
        if program not in _PRINTING:
            _program(shell, words, line, heredoc)


def _builtin(state: State, program: str, words: Sequence[Text], line: int, heredoc: Text | None) -> bool:  # noqa: C901 - one case for each builtin
    """Evaluate a builtin. Return whether the program is one."""
    texts = [word.text for word in words]
    if program in ("cd", "pushd", "popd"):
        _change_directory(state, program, [word for word in words if word.text == "-" or word.text[:1] != "-"])
    elif program in ("exit", "return"):
        state.ended = state.ended or program
    elif program == "shift":
        num = texts[0] if texts else "1"
        known = state.arguments is not None and num.isdecimal()
        given = state.arguments or [] if known else []
        state.arguments = given[int(num) if int(num) <= len(given) else 0 :] if known else None
    elif program == "set":
        for before, text in zip(("", *texts), texts, strict=False):  # set -a, set -o allexport
            if re.fullmatch(r"[-+]\w*a\w*", text) or (text == "allexport" and before[1:] == "o"):
                state.exports_all = (before if text == "allexport" else text)[0] == "-"
        if "--" in texts or (texts and texts[0][:1] not in ("-", "+")):
            state.arguments = list(words[texts.index("--") + 1 if "--" in texts else 0 :])
    elif program == "let":
        state.set_counted_unknown(" ".join(texts))
    elif program in _DECLARING:
        options = [text for text in texts if text[:1] in ("-", "+")]
        for word in words:
            if word.text not in options:
                declare(state, program, options, word, line)
    elif program == "printf" and texts[:1] == ["-v"] and len(texts) > 1:
        state.set_unknown(texts[1], f"${texts[1]}: printf sets it in line {line}")
    elif program in ("read", "mapfile", "readarray", "getopts"):
        whole = program == "read" and heredoc is not None and any(text in ("-d", "-rd") for text in texts)
        names = [text for text in texts if text[:1] != "-" and text and not (whole and text == "\n")]
        for name in names[program == "getopts" :]:
            if whole and heredoc is not None and len(names) == 1:
                state.assign(name, heredoc)
            elif name.isidentifier() or program != "read" or name[:1] == "$":
                state.set_unknown(name, f"${name}: it is read in line {line}")
    else:
        return False
    return True


def declare(
    state: State, program: str, options: Sequence[str], word: Text, line: int, make: Callable[[], None] | None = None
) -> None:
    """Evaluate one `NAME` or `NAME=VALUE` of `export`, `local`, `unset` and the like. make: assigns the value."""
    name, equals, value = word.head.partition("=")
    if program != "export" and any(re.fullmatch(r"-\w*n\w*", option) for option in options):
        state.doubt(f"line {line} declares a name for another one")
    if program == "unset":
        if not word.known:
            state.doubt(f"unset {word.text[:60]} in line {line} may remove any name")
        elif "[" in name:
            state.set_unknown(name.partition("[")[0], f"${name}: an item of it is removed in line {line}")
        else:
            (state.functions if "-f" in options else state.names).pop(name, None)
            state.exported.discard(name)
        return
    if not name.isidentifier() or not (equals or word.known):
        state.doubt(f"{word.text[:60]} in line {line} may set any name")
        return
    if program in ("local", "declare", "typeset") and not any("g" in option for option in options):
        state.make_local(name)
    if program == "export" or any("x" in option for option in options):
        (state.exported.discard if {"-n", "+x"} & {*options} else state.exported.add)(name)
    if make is not None:
        make()
    elif equals:
        state.assign(name, word.with_text(value) if word.head == word.text else unknown(f"${name}", word.why))
    elif program == "local":
        state.names.pop(name, None)
    if equals and program != "export" and any(re.fullmatch(r"[-+]\w*[iul]\w*", option) for option in options):
        state.set_unknown(name, f"${name} is declared in line {line} with {' '.join(options)}")


def _change_directory(state: State, program: str, words: Sequence[Text]) -> None:
    before = state.names["PWD"]
    before = before if isinstance(before, Text) else Text()
    word = words[0] if words else plain("-" if program == "popd" else state.text("HOME", before.text))
    if word.text == "-":
        word = plain(state.text("OLDPWD", before.text))
    elif word.known and before.known and word.text[:1] not in ("/", "~"):
        word = plain(os.path.normpath(os.path.join(before.text, word.text)))
    state.names |= {"OLDPWD": before, "PWD": word}


def _source(shell: Shell, words: list[Text], line: int) -> None:
    """Evaluate a sourced file; a missing one puts all names in doubt."""
    state = shell.state
    if _ENVIRONMENTS.fullmatch(words[1].text):
        return
    try:
        path, text = shell.script.find(state, words[1], shell.path)
        before = state.names.get("BASH_SOURCE"), state.returned, state.arguments
        state.names["BASH_SOURCE"], state.returned = plain(path), None
        state.arguments = words[2:] or state.arguments
        shell.run_text(text, state, line)
        state.leave(line)
        source, state.returned, state.arguments = before
        state.names.pop("BASH_SOURCE", None)
        state.names |= {"BASH_SOURCE": source} if source is not None else {}
        why = "" if text.known else text.why
    except ValueError as error:
        why = str(error)
    if why:
        state.doubt(f"`{words[0].text} {words[1].text}` (line {line}) may set any name: {why}")


def _program(shell: Shell, words: list[Text], line: int, heredoc: Text | None) -> None:
    """Evaluate the scripts that a program runs, or collect its command."""
    if any(word.text in ("xargs", "parallel") for word in words):
        words = [*words, unknown("$XARGS", f"{words[0].text} adds words of its input to the command")]
    child = _child(shell.state, words)
    found = _scripts(shell, words, line, heredoc, child)
    for text, path in found:
        shell.run_text(text, child.copy(), line, path)
    if not found:
        shell.script.add(Command(line, tuple(words), shell.state.text("PWD")))
        if shell.state.unset_doubt and re.fullmatch(r"[\w-]+", words[0].text) and not _KNOWN.fullmatch(words[0].text):
            shell.state.doubt(f"{words[0].text} (line {line}) may be a function: {shell.state.unset_doubt}")


def _child(state: State, words: Sequence[Text]) -> State:
    """Return the state of the program that a command starts."""
    child = state.child_state()
    texts = [word.text for word in words]
    isolated, is_env = not _ISOLATED.isdisjoint(texts), texts[0] == "env"
    if isolated or is_env and {"-i", "-", "--ignore-environment"} & {*texts[1:]}:
        child.names = {name: value for name, value in child.names.items() if name in ("HOME", "PWD")}
    for before, text in zip(texts, texts[1:], strict=False):
        if is_env and before == "-u":
            child.names.pop(text, None)
    passing = next((text for text in texts if _PASSES_OTHERS.fullmatch(text)), "")
    if passing and not (passing == "sudo" and (isolated or {"-E", "--preserve-env"} & {*texts})):
        child.doubt("sudo passes some names only" if passing == "sudo" else f"{passing[:60]} may set any name")
    given: list[Text] = []
    for word in words:  # env NAME=VALUE bash
        if PurePosixPath(word.text.partition("=")[0]).name in _SHELLS:
            break
        given.append(word)
    for flag, value in zip(words, words[1:], strict=False):
        if match := _ENVIRONMENT_FLAG.fullmatch(flag.text):
            given.append(flag.with_text(match[1]) if match[1] is not None else value)
            if given[-1].text in state.exported and given[-1].text in state.names:
                child.names[given[-1].text] = state.names[given[-1].text]
    for word in given:
        name, equals, value = word.text.partition("=")
        if equals and name.isidentifier():
            child.assign(name, word.with_text(value))
            child.exported.add(name)
    return child


def _scripts(shell: Shell, words: list[Text], line: int, heredoc: Text | None, child: State) -> list[tuple[Text, str]]:
    """Return the scripts that a command runs, with their paths: a text behind `-c`, a file, or its input."""
    texts = [word.text for word in words]
    shell_at = next((i for i, text in enumerate(texts) if PurePosixPath(text).name in _SHELLS), None)
    rest = words[shell_at + 1 :] if shell_at is not None else []
    option = next((i for i, word in enumerate(rest) if re.fullmatch(r"-\w*c", word.text)), None)
    if option is not None and len(rest) > option + 1:
        child.arguments = rest[option + 3 :]
        return [(rest[option + 1], "")]
    ofs = zip((Text(), *rest), rest, strict=False)
    file = next((i for i, (before, word) in enumerate(ofs)
                 if word.text[:1] not in ("-", "+") and not _TAKES_VALUE.fullmatch(before.text)), None)  # fmt: skip
    if shell_at is None and (texts[0].endswith(".sh") or texts[0] in _STARTING):
        rest = words
        file = next((i for i, text in enumerate(texts) if text.endswith((".sh", ".sbatch", ".slurm"))), None)
        if file is None and texts[0] in ("sbatch", "qsub") and len(words) > 1:
            file = len(words) - 1
    if file is not None and (found := _called_script(shell, rest[file], line)) is not None:
        child.arguments = rest[file + 1 :]
        return [found]
    if heredoc is not None and (shell_at is not None or texts[0] in ("sbatch", "ssh")):
        return [(heredoc, "")]
    of_words = [w for w in words[1:] if _HOLDS_COMMAND.search(w.text) and "=" not in w.text.split()[0]]
    of_words += [plain(w.text.partition("=")[2]) for w in words if w.known and w.text.startswith("--wrap=")]
    return [(text, "") for text in of_words]


def _called_script(shell: Shell, word: Text, line: int) -> tuple[Text, str] | None:
    """Return the text and the path of a started script; None if it is under evaluation, or (recorded) unreadable."""
    script = shell.script
    try:
        found, text = script.find(shell.state, word, shell.path)
    except ValueError as error:
        script.missing.append((line, word.text, str(error)))
        return None
    if _file_key(shell.state, word.text) in script.files:
        return text, shell.path
    if any(os.path.exists(one) and os.path.samefile(found, one) for one in (shell.path, *script.running)):
        return None  # recursion
    script.called.append(text.text)
    return text, found


def output_of(words: Sequence[Text], state: State) -> Text | None:
    """Return the output of a command if its arguments determine it."""
    program, rest = words[0].text if words else "", list(words[1:])
    if program == "date":
        return plain("now")
    if program == "pwd":
        return state.named("PWD", "")
    if not all(word.known or word.in_doubt for word in rest):
        return None
    if program == "echo" and not (rest and rest[0].text.startswith("-")):
        return join_words(rest)
    first = rest[0] if rest and not rest[0].text.startswith("-") else None
    if first is None:
        return None
    if program == "dirname" and len(rest) == 1:
        return first.with_text(os.path.dirname(first.text.rstrip("/")) or ("/" if first.text[:1] == "/" else "."))
    if program == "basename" and len(rest) < 3:
        name = os.path.basename(first.text.rstrip("/")) or "/"
        suffix = rest[1].text if len(rest) > 1 else ""
        return first.with_text(name.removesuffix(suffix) if name != suffix else name)
    return None


def join_words(words: Sequence[Text]) -> Text:
    """Join words with spaces."""
    found: list[Piece] = []
    for word in words:
        found += [Piece(" "), *word.pieces] if found else list(word.pieces)
    return join(found)
