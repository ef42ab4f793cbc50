"""`rollover completion`: print a script by which a shell completes verbs, options, recipes and keys.

The words come from the verbs and the configuration of this version; the script itself runs no program at TAB.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rollover.commands import Overrides, Verb, installed_verbs, our_verbs, shared_arguments

SHELLS = ("bash", "zsh", "fish")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="of which shell")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    write = {"bash": bash, "zsh": zsh, "fish": fish}[args.shell]
    print(write(completed_verbs(), keys()), end="")
    return 0


@dataclass(frozen=True)
class Completed:
    """Completions of a verb. `options` with their help; `values`: of options with choices; `words`: positional words
    beside files; `keys`: whether it accepts keys of the configuration."""

    about: str
    options: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[str]] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    keys: bool = False


def completed_verbs() -> dict[str, Completed]:
    """Return the completions of our verbs by name, and the names of those of other packages."""
    from rollover.config.recipes import recipes

    found = {}
    for name, verb in our_verbs().items():
        parser = argparse.ArgumentParser()
        verb.arguments(parser)
        shared_arguments(parser)
        options, values, words = {}, {}, list(recipes()) if verb.files or name == "init" else []
        for action in parser._actions:
            choices = [str(choice) for choice in action.choices or ()]
            longs = [word for word in action.option_strings if word.startswith("--")]
            options |= {word: action.help or "" for word in longs}
            values |= {word: choices for word in longs if choices}
            words += choices if not action.option_strings else []
        found[name] = Completed(verb.about, options, values, words, verb.keys)
    return found | {name: Completed("") for name in installed_verbs()}


def keys() -> dict[str, list[str]]:
    """Return every key of the configuration as an option, with its values where it has choices."""
    from typing import Literal, get_args, get_origin

    from rollover.config.schema import leaves

    found = {}
    for name, info in leaves():
        kind = info.annotation
        values = list(map(str, get_args(kind))) if get_origin(kind) is Literal else []
        found[f"--{name}"] = ["true", "false"] if kind is bool else values
    return found


# Shells


def bash(verbs: dict[str, Completed], of_keys: dict[str, list[str]]) -> str:
    """Return the script for bash 3.2 and newer."""
    cases = "\n".join(
        f"        {name}) options={_words(of.options)} words={_words(of.words)} keys={int(of.keys)} ;;"
        for name, of in verbs.items()
    )
    values = "\n".join(
        f'        {pattern}) COMPREPLY=($(compgen -W {_words(words)} -- "$cur")); return ;;'
        for pattern, words in _values(verbs, of_keys)
    )
    return f"""# Completes rollover in bash. source <(rollover completion bash)
_rollover() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} verb= options= words= keys=0 i
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [[ ${{COMP_WORDS[i]}} != -* ]]; then verb=${{COMP_WORDS[i]}}; break; fi
    done
    COMPREPLY=()
    case $verb in
        "") COMPREPLY=($(compgen -W {_words([*verbs, "--help", "--version"])} -- "$cur")); return ;;
{cases}
    esac
    if [[ $cur == -* ]]; then
        if ((keys)); then options+=" {" ".join(of_keys)}"; fi
        COMPREPLY=($(compgen -W "$options" -- "$cur"))
        return
    fi
    case $verb/$prev in
{values}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    local IFS=$'\\n'
    COMPREPLY+=($(compgen -f -- "$cur"))
    compopt -o filenames 2>/dev/null
}}
complete -F _rollover rollover
"""


def zsh(verbs: dict[str, Completed], of_keys: dict[str, list[str]]) -> str:
    cases = "\n".join(
        f"        {name}) options=({' '.join(of.options)}) names=({' '.join(of.words)}) keys={int(of.keys)} ;;"
        for name, of in verbs.items()
    )
    values = "\n".join(
        f"        {pattern}) compadd -- {' '.join(words)}; return ;;" for pattern, words in _values(verbs, of_keys)
    )
    return f"""#compdef rollover
# Completes rollover in zsh. rollover completion zsh > a folder of $fpath, as _rollover
_rollover() {{
    local verb= keys=0 i
    local -a options names
    for ((i = 2; i < CURRENT; i++)); do
        if [[ ${{words[i]}} != -* ]]; then verb=${{words[i]}}; break; fi
    done
    case $verb in
        "") compadd -- {" ".join([*verbs, "--help", "--version"])}; return ;;
{cases}
    esac
    if [[ ${{words[CURRENT]}} == -* ]]; then
        if ((keys)); then options+=({" ".join(of_keys)}); fi
        compadd -- $options
        return
    fi
    case $verb/${{words[CURRENT - 1]}} in
{values}
    esac
    compadd -- $names
    _files
}}
compdef _rollover rollover
"""


def fish(verbs: dict[str, Completed], of_keys: dict[str, list[str]]) -> str:
    lines = ["# Completes rollover in fish. rollover completion fish > ~/.config/fish/completions/rollover.fish"]
    for name, of in verbs.items():
        after = f"-n '__fish_seen_subcommand_from {name}'"
        lines.append(f"complete -c rollover -n __fish_use_subcommand -f -a {name} -d {_quoted(of.about)}")
        for option, text in of.options.items():
            taken = f" -x -a {_words(of.values[option])}" if option in of.values else ""
            lines.append(f"complete -c rollover {after} -l {option[2:]}{taken} -d {_quoted(text)}")
        if of.words:
            lines.append(f"complete -c rollover {after} -a {_words(of.words)}")
    with_keys = " ".join(name for name, of in verbs.items() if of.keys)
    for key, values in of_keys.items():
        taken = f" -x -a {_words(values)}" if values else " -r"
        lines.append(f"complete -c rollover -n '__fish_seen_subcommand_from {with_keys}' -l {key[2:]}{taken}")
    return "\n".join(lines) + "\n"


def _values(verbs: dict[str, Completed], of_keys: dict[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Iterate over (pattern of `case` verb/option, values) of the options with choices."""
    for name, of in verbs.items():
        yield from ((f"{name}/{option}", values) for option, values in of.values.items())
    yield from ((f"*/{key}", values) for key, values in of_keys.items() if values)


def _words(words: Iterable[str]) -> str:
    return _quoted(" ".join(words))


def _quoted(text: str) -> str:
    """Quote for all three shells: quotes and backslashes are removed."""
    return shlex.quote(text.replace("'", "").replace("\\", "")) if text else "''"


VERB = Verb("Print a script by which a shell completes what you type.", run, arguments, files="", keys=False)
