"""Files that mean harm, or are none at all: a conversion ends soon, with a sentence, and runs nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rollover import cli

_SOUND = "trainer:\n  total_training_steps: 5\ndata:\n  train_files: a.parquet\n  train_batch_size: 256\n"
_RUN = "python3 -m verl.trainer.main_ppo data.train_files=a trainer.total_training_steps="


def _multiplied(first: str, row: str) -> str:
    return first + "".join(row.format(of=i, last=i - 1) for i in range(1, 13))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.yaml", "a: [1, 2\nb: }", "no YAML"),
        ("a.yaml", "a: !!python/object/apply:os.system ['exit 1']", "no YAML"),
        ("a.yaml", "trainer: &a {b: *a}", "values"),
        ("a.yaml", _multiplied("trainer: {}\na0: &a0 {x: 1}\n",
                               "a{of}: &a{of} {{p: *a{last}, q: *a{last}, r: *a{last}}}\n"), "values"),
        ("a.yaml", "trainer: " + "[" * 2000, "nested too deeply"),
        ("a.sh", _RUN + "$((9**9**9))", "beyond bash's whole numbers"),
        ("a.sh", _RUN + "$((" + "-" * 3000 + "1))", "nested too deeply"),
        ("a.sh", _multiplied("A0=xxxxxxxx\n", "A{of}=$A{last}$A{last}$A{last}$A{last}\n") + _RUN + "$A12",
         "more than 65,536 characters"),
        ("a.sh", _RUN + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("a.sh", _RUN + "$(exit 1)", "what a command prints"),
        ("a.sh", _RUN + "5 x='" + "a.b=1\n" * 10_000, "cannot be parsed"),
        ("a.sh", _RUN + "5 " + "x" * 2**20, "more than 1,048,576 bytes"),
        ("a.sh", _RUN + "5 data.train_batch_size=inf", "is not understood"),
        ("a.sh", _RUN + "5 actor_rollout_ref.actor.ppo_mini_batch_size=0", "is not understood"),
        ("a.yaml", _SOUND + "algorithm: {adv_estimator: [1]}", "is not understood"),
        ("a.sh", _RUN + "${a:-" * 20_000 + "}" * 20_000, "nested too deeply"),
        ("a.sh", "f() { f; f; }\nf\n" + _RUN + "5", "call each other without an end"),
        ("a.sh", "for i in 1 2 3 4 5 6 7 8; do " * 8 + "X=$X1;" + " done;" * 8 + "\n" + _RUN + "5", "does too much"),
        ("a.sh", f"A=(a.b={'1' * 9999})\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 40 + _RUN + '5 "${A[@]}"', "does too much"),
        ("a.sh", f"X={'a' * 9000}\n{_RUN}${{X##*a*a*a*b}}", "is not evaluated"),
        ("a.py", "GRPOTrainer(args=GRPOConfig(max_steps=9**9**9))", "`9 ** 9 ** 9` (line 1) is not evaluated"),
        ("a.py", "GRPOTrainer(args=GRPOConfig(max_steps='a'*10**12))", "(line 1) is not evaluated"),
        ("a.py", "GRPOTrainer(args=GRPOConfig(max_steps='%99999999999d' % 1))", "(line 1) is not evaluated"),
        ("a.py", _multiplied("a0 = 'xxxxxxxx'\n", "a{of} = a{last} + a{last} + a{last} + a{last}\n")
         + "GRPOTrainer(args=GRPOConfig(max_steps=a12))", "more than 65,536 characters"),
        ("a.py", _multiplied("a0 = 1\n", "a{of} = a{last} + a{last} + a{last} + a{last}\n")
         + "GRPOTrainer(args=GRPOConfig(max_steps=a12))", "too many values"),
        ("a.py", "GRPOTrainer(args=GRPOConfig(max_steps=" + "-" * 50_000 + "1))", "nested too deeply"),
    ],
)  # fmt: skip
def test_it_is_refused_with_a_sentence(name: str, text: str, why: str, refuse_file) -> None:
    assert why in refuse_file(name, text)


def test_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "/dev/zero"]) == 2
    assert "not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.sh", "a.yaml", "a.py"])
def test_pipe_is_refused(name: str, tmp_path: Path, refuse_file) -> None:
    os.mkfifo(tmp_path / name)
    assert "not a regular file" in refuse_file(name, None)


def test_no_name_of_an_option_ends_its_comment(convert_file) -> None:
    name = '"skip.x\\n[run]\\ndir = 5 \\x07 # a_workers"'
    config, text = convert_file("a.yaml", f"{_SOUND}{name}: 3\n")
    assert config.run.dir != "5" and "a_workers is left out" in text and "\x07" not in text


def test_what_is_open_over_continued_lines_ends_where_it_does(convert_file) -> None:
    config, _ = convert_file("a.sh", f"X='5\nb' \\\n\n{_RUN}6 \\\n data.train_batch_size=256\n")
    assert config.train.num_steps == 6


@pytest.mark.parametrize("starts", ["bash {}", "source {}", f"{_RUN}5 --config-name {{}}"])
@pytest.mark.parametrize("name", ["~nobody_has_this_name/x.sh", "x" * 5000 + ".sh", r"$'a\0.sh'", "''", "/proc/kmsg"])
def test_no_name_of_a_script_breaks_the_conversion(name: str, starts: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "a.sh").write_text(f"{starts.format(name)}\n{_RUN}5\n")
    assert cli.main(["convert", str(tmp_path / "a.sh"), "--accept", "*"]) in (0, 2)
    assert "Traceback" not in "".join(capsys.readouterr())


def test_why_a_script_that_is_started_cannot_be_read_is_told(tmp_path: Path, refuse_file) -> None:
    said = "line 1 starts 'b c?.sh', which cannot be read (it is not there)"  # a name of several lines, in one
    assert said in refuse_file("a.sh", "bash $'b\\nc\\e.sh'\n")
    os.mkfifo(tmp_path / "b.sh")
    assert "starts b.sh, which cannot be read (it is not a regular file)" in refuse_file("a.sh", "bash b.sh\n")
    for i in range(50):
        (tmp_path / f"{i}.sh").write_text(f"bash {i + 1}.sh\n")
    assert "its scripts are nested too deeply" in refuse_file("0.sh", None)


def test_scripts_that_start_each_other_are_read_once(tmp_path: Path, convert_file) -> None:
    (tmp_path / "b.sh").write_text(f"bash a.sh\nbash a.sh\n{_RUN}5 data.train_batch_size=256\n")
    assert convert_file("a.sh", "bash b.sh\nbash b.sh\n")[0].train.num_steps == 5


@pytest.mark.parametrize("how", ["bash", "source"])
def test_a_large_script_is_not_read_again_and_again(how: str, tmp_path: Path, refuse_file) -> None:
    (tmp_path / "b.sh").write_text("# " + "x" * 1_000_000)
    rounds = " ".join(map(str, range(60)))
    started = time.monotonic()
    text = f"for i in {rounds}; do for j in {rounds}; do {how} b.sh; done; done\n{_RUN}5\n"
    assert "does too much to be read" in refuse_file("a.sh", text)
    assert time.monotonic() - started < 30
