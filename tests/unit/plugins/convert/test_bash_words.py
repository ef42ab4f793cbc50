"""Words as bash expands them: each form is compared with bash itself, for several values of its name."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from rollover.plugins.convert.bash.script import read_script
from rollover.plugins.convert.bash.text import Text

VALUES = ("/a/b.c.d", "x", "", "a b  c", "-5", "007", "k=v", "it's")
FORMS = (
    "${X}", "$X", '"$X"', "${X##*/}", "${X%/*}", "${X#*.}", "${X%%.*}", "${X%.*}", "${X:-d e}", '"${X:-d e}"',
    "${X:+y}", "${X-z}", "${X^^}", "${X^}", "${X,,}", "${X/b/Q}", "${X//[a-c]/_}", "${X/b}", "${X:1}", "${X:1:2}",
    "${X: -2}", "${#X}", "p${X}s", "$((1 + 2 * 3 - 7 / 2))", "$((-7 / 2))", "$((-7 % 3))", "$((2 ** 5))", "${U:-$X}",
    "${U:-${X##*/}}", "${U:-$((3*4))}", '"${A[@]}"', "${A[@]}", '"${A[*]}"', "${A[1]}", "${#A[@]}", '"x${A[@]}y"',
    "$(echo $X)", '"$(dirname "$X")"', "$(basename a/b.c .c)", r"a\ b", "'$X'", r"$'a\tb'", r"$'ü\xc3\xbc\q\x'",
    r'"a\$X"', r'"\"q\""', r"$'a\0b\'c'",
    "a=[1,2]", "b={a:1}", '"${U:-}"', "${U:-}", "x${U:-}y", "a~b", "a#b", '''a'b'"c"''', '"$X $X"', '"$X" # no',
    "$(cat <<'EOF'\nh 1\n  h2\nEOF\n)", "${U:=w}$U", "${X%% *}", """"${U:-['a','b']}\"""", "\\\n  $X",
)  # fmt: skip


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("form", FORMS)
def test_words_are_those_of_bash(form: str) -> None:
    for value in VALUES:
        if value.startswith("-") and "$(" in form and "$((" not in form:
            continue  # an option of a program is not evaluated
        script = f"X={shlex.quote(value)}\nA=(1 'two w' \"$X\")\nshow {form}\n"
        shown = "show() { test $# = 0 || printf '%s\\0' \"$@\"; }\n" + script
        done = subprocess.run(["bash", "-c", shown], capture_output=True, env={"HOME": "~"}, text=True, check=False)
        (command,) = [one for one in read_script(script, "", {}).commands if one.words[0].text == "show"]
        assert [word.why for word in command.words] == [""] * len(command.words)
        assert [word.text for word in command.words[1:]] == done.stdout.split("\0")[:-1], value


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("$U", "$U has no value"),
        ("${X@Q}", "is not evaluated"),
        ("$(whoami)", "what a command prints is not known"),
        ("a{b,c}", "bash makes several words"),
        ("$((X + 1))", "is not an integer"),
        ("$((1 << 70))", "is not an integer expression"),
        ("$((9 ** 99))", "beyond bash's whole numbers"),
        ("${A[7]}", "has no value"),
    ],
)
def test_unknown_words_have_a_reason(form: str, why: str) -> None:
    (command,) = read_script(f"X=x\nA=(1)\nshow name={form}\n", "", {}).commands
    assert why in command.words[1].why
    assert command.words[1].head in ("name=", "")


def test_command_with_its_own_names_leaves_those_of_the_script() -> None:
    script = "X=1\nY=$(A=2 echo $X)\nX=5\nA=1 python a\nshow $X $Y ${A:-none}\n"
    command = read_script(script, "", {}).commands[-1]
    assert [word.text for word in command.words] == ["show", "5", "$(A=2 echo $X)", "none"]


CERTAIN = {
    "local name": ("f() { local LR=5e-6; local X; }; LR=1e-6; f", "1e-6"),
    "local name of the outer value": ("f() { local LR=${LR}0; OTHER=$LR; }; LR=1; f; LR=$OTHER", "10"),
    "two assignments before export": ("export A=1\nA=1 B=2\nexport LR=5e-6", "5e-6"),
    "two assignments before unset": ("LR=1\nA=1 B=2\nunset LR\nLR=${LR:-2}", "2"),
    "sourced text": ("cat > ./s.sh <<EOF\nLR=5e-6\nreturn\nLR=1\nEOF\nLR=1e-6\n. s.sh\nOTHER=1", "5e-6"),
    "appended text": ("echo LR=1 > s.sh\ncat >> s.sh <<EOF\nLR=2\nEOF\nsource ./s.sh", "2"),
    "text written in parts": ("echo LR=1 > s.sh; mkdir a; echo LR=2 >> s.sh; source s.sh", "2"),
    "environment of a shell": ("env LR=4e-6 bash -c 'python3 train.py lr=${LR:-1e-6}'; LR=4e-6", "4e-6"),
    "environment of a container": ("export LR=4e-6\ndocker run image bash -c 'python3 t.py lr=${LR:-1}'; LR=1", "1"),
    "container of root": ("export LR=4\nsudo docker run i bash -c 'python3 t.py lr=${LR:-1}'; LR=1", "1"),
    "environment of root": ("export LR=4\nsudo -E bash -c 'python3 t.py lr=${LR:-1}'", "4"),
    "passed to a container": ("export LR=4\ndocker run -e LR image bash -c 'python3 t.py lr=${LR:-1}'", "4"),
    "separator of a list": ("A=(1 2)\nIFS=,\nLR=\"${A[*]}\"", "1,2"),
    "separator of one command": ("A=(1 2)\nIFS=, read X\nLR=\"${A[*]}\"", "1 2"),
    "arguments that are set": ("set 5e-6 b; LR=$1", "5e-6"),
    "set up before": ("mkdir -p out >/dev/null && cd out && LR=5e-6", "5e-6"),
    "activated environment": ("LR=5e-6; source ~/venv/bin/activate; eval \"$(conda shell.bash hook)\"", "5e-6"),
    "return of a whole function": ("f() { if a; then LR=1; return; else LR=1; return; fi; LR=2; }; f", "1"),
}  # fmt: skip
IN_DOUBT = {
    "redirected test": "LR=1; command -v nvcc >/dev/null 2>&1 && LR=2",
    "piped test": "LR=1; nvidia-smi | grep -q H100 && LR=2",
    "function as a test": "is_large() { [ -d large ]; }; LR=1; is_large && LR=2",
    "subshell as a test": "LR=1; (cd large) && LR=2",
    "program as a test": "LR=1; nvidia-smi && LR=2",
    "test before what sets up": "LR=1; [ -d large ] && cd large && LR=2",
    "test behind assignments": "LR=1 A=1\n[ -d large ] && LR=2",
    "printed assignment as a test": "LR=1; A=$(nvidia-smi) && LR=2",
    "return under a condition": "f() { LR=1; [ -d large ] && return; LR=2; }; f",
    "return within an if": "f() { LR=1; if a; then return; fi; LR=2; }; f",
    "missing file": "LR=1; source ./missing.sh",
    "missing file by a point": "LR=1; set -a; . ./missing.sh",
    "default behind a missing file": "source missing.sh; LR=${LR:-1}",
    "alternative behind a missing file": "source missing.sh; LR=${OTHER:+1}",
    "function of a missing file": "source missing.sh; LR=1; setup_rates large",
    "changed file": "echo LR=1 > s.sh; sed -i s/1/2/ s.sh; source s.sh; LR=${LR:-1}",
    "file of a program": "echo LR=1 > s.sh; envsubst < t > s.sh; source s.sh; LR=${LR:-1}",
    "file written between trainings": "echo LR=1 > s.sh; python3 a.py\necho LR=2 > s.sh; source s.sh",
    "file that goes on": "cat >> s.sh <<EOF\nA=1\nEOF\nLR=1; source s.sh",
    "exported output": "LR=1; export $(grep -v x .env | xargs)",
    "exported name": 'LR=1; export "$NAME=2"',
    "name for a name": "LR=1; declare -n other=LR; other=2",
    "integer": "declare -i LR=1+1",
    "printed into a name": "LR=1; printf -v LR %s 2",
    "printed into some name": 'LR=1; printf -v "$NAME" %s 2',
    "read": "LR=1; read -r LR < file",
    "read into some name": 'LR=1; read -r "$NAME" < file',
    "mapped file": "LR=1; mapfile -t LR < file",
    "let": 'LR=1; let "LR += 1"',
    "counted before": "LR=1; ((++LR))",
    "counted in a sum": "LR=1; A=$((LR *= 2))",
    "counted by a loop": "LR=1; for ((LR=0; LR<3; LR++)); do a; done",
    "unset by some name": "LR=1; unset $NAME",
    "evaluated output": 'LR=1; eval "$(parse_yaml conf.yaml)"',
    "evaluated name": 'LR=1; eval "${NAME}=2"',
    "split by a separator": "A=1,2; IFS=,; LR=$A",
    "unknown separator": 'A=(1 2); IFS=$NAME; LR="${A[*]}"',
}


def _word_of(script: str, start: str = "lr=") -> Text:
    commands = read_script(script, environment={}).commands
    return next(word for command in commands for word in command.words if word.text.startswith(start))


@pytest.mark.parametrize("name", CERTAIN)
def test_value_of_a_name_is_the_one_of_bash(name: str) -> None:
    script, value = CERTAIN[name]
    word = _word_of(f'{script}\npython3 train.py lr="$LR"')
    assert word.known and word.text == f"lr={value}"


@pytest.mark.parametrize("name", IN_DOUBT)
def test_name_that_may_have_changed_is_in_doubt(name: str) -> None:
    quoted = "" if name == "split by a separator" else '"'
    assert not _word_of(f"{IN_DOUBT[name]}\npython3 train.py lr={quoted}$LR{quoted}").known


@pytest.mark.parametrize(
    "command",
    [
        "cat options | xargs python3 train.py lr=1",
        "parallel python3 train.py lr=1 < options",
        "cat <<EOF | xargs python3 train.py lr=1\nbeta=2\nEOF",
    ],
)
def test_words_of_an_input_are_asked_about(command: str) -> None:
    assert not _word_of(command, "$XARGS").known


@pytest.mark.parametrize("command", ["docker run --env-file x image", "docker run --env-file=x image", "sudo"])
def test_program_that_sets_the_environment_puts_it_in_doubt(command: str) -> None:
    assert not _word_of(f"export LR=2\n{command} bash -c 'python3 train.py lr=${{LR:-1}}'").known
