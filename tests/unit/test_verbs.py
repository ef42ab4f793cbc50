"""How a verb enters the command line: ours by the table, one of an installed package by an entry point."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollover import cli
from rollover.commands import VERBS, Verb, our_verbs

MODULE = """
from rollover.commands import Verb, load

def run(args, overrides):
    print("hello", args.loud, load(args.files, overrides, require_sources=False).config.train.num_steps)
    return 7

VERB = Verb("Say 100 % hello.", run, lambda parser: parser.add_argument("--loud", action="store_true"), files="*")
OTHER = 3
TWICE = Verb("Say it twice.", run, lambda parser: parser.add_argument("--help"))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that brings verbs, one of them under a name of ours."""
    (tmp_path / "greeter.py").write_text(MODULE)
    metadata = tmp_path / "greeter-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: greeter\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[rollover.verbs]\nhello = greeter:VERB\ntrain = greeter:VERB\nno_verb = greeter:OTHER\n"
        "gone = nothing_of_it:VERB\nleft = leaver:VERB\ntwice = greeter:TWICE\n"
    )
    (tmp_path / "leaver.py").write_text("raise SystemExit(5)")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(autouse=True)
def unloaded() -> None:
    sys.modules.pop("greeter", None)


def test_each_module_of_the_folder_is_in_the_table() -> None:
    folder = Path(cli.__file__).parent / "commands"
    modules = {place.partition(":")[0] for place in VERBS.values()}
    of_core = {name.rpartition(".")[2] for name in modules if name.startswith("rollover.commands.")}
    assert {path.stem for path in folder.glob("*.py")} == of_core | {"__init__"}
    assert all(isinstance(verb, Verb) and verb.about.endswith(".") for verb in our_verbs().values())


def test_a_verb_of_another_package_runs(package: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hello", "--loud", "--train.num_steps", "3"]) == 7
    assert capsys.readouterr().out == "hello True 3\n"


def test_an_option_may_stand_before_it(package: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--train.num_steps", "3", "hello"]) == cli.main(["--train.num_steps=3", "hello"]) == 7
    assert capsys.readouterr().out == "hello False 3\n" * 2


@pytest.mark.parametrize("words", [["hello"], ["--help"]])
def test_first_package_has_precedence_for_a_name(package: None, tmp_path: Path, capsys, words: list[str]) -> None:
    metadata = tmp_path / "a_greeter-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: a-greeter\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[rollover.verbs]\nhello = a_greeter:VERB\n")
    verb = "VERB = Verb('Say good day.', lambda args, overrides: 8, files='*')"
    (tmp_path / "a_greeter.py").write_text(f"from rollover.commands import Verb\n{verb}\n")
    try:
        assert cli.main(words) == 8
    except SystemExit as ended:
        assert words == ["--help"] and ended.code == 0
    printed = capsys.readouterr()
    assert "several packages bring a verb hello (a-greeter, greeter): a-greeter's is used" in printed.err
    if words == ["--help"]:
        assert "Say good day." in printed.out and "Say 100 % hello." not in printed.out


def test_an_option_that_it_does_not_have_is_refused_as_ours_are(package: None, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["hello", "--lound"])
    assert "unknown option --lound. Did you mean --loud" in capsys.readouterr().err


def test_help_lists_it_and_tells_of_one_that_cannot_be_loaded(package: None, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "Say 100 % hello." in text
    assert "the verb gone (nothing_of_it:VERB) cannot be loaded: ModuleNotFoundError" in text
    assert "the verb no_verb (greeter:OTHER) is 3, not a rollover.commands.Verb" in text
    assert "the verb left (leaver:VERB) cannot be loaded: SystemExit: 5" in text
    assert "the verb twice (greeter:TWICE) fails at its arguments: ArgumentError" in text
    assert "Train a model." in text, "a name of ours stays ours"


@pytest.mark.parametrize("name", ["gone", "no_verb", "left", "twice"])
def test_one_that_cannot_be_loaded_is_the_user_s_error(package: None, capsys, name: str) -> None:
    assert cli.main([name]) == 2
    assert f"rollover: error: the verb {name} (" in capsys.readouterr().err


def test_a_verb_of_ours_loads_none_of_another_package(package: None) -> None:
    assert cli.main(["init", "--list"]) == 0
    assert "greeter" not in sys.modules


def test_the_version_loads_none_either(package: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("rollover ") and "greeter" not in sys.modules
