"""`make gpu-report` (experiments/gpu_report.py), on a CPU: what a kill leaves, limits, failures, missing packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gpu_report

SCRIPT = gpu_report.__file__
# A stand-in for pytest, which the part "tests" asks: a second part costs nothing but its process.
PASSING_TESTS = """
def main(arguments, plugins):
    report = type("Report", (), dict(when="call", outcome="passed", failed=False))
    plugins[0].pytest_runtest_logreport(report)
    return 0
"""
HANGING_TESTS = "def main(arguments, plugins):\n    import time\n    time.sleep(600)\n"
FAILING_TESTS = "def main(arguments, plugins):\n    raise RuntimeError('no such device')\n"


def packages(folder: Path, **sources: str) -> dict[str, str]:
    """An environment in which these modules come before the installed ones."""
    folder.mkdir()
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return os.environ | {"PYTHONPATH": str(folder)}


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, SCRIPT, "--tiny", "--out", str(out), *arguments]


def run(out: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(out, *arguments), env=env, capture_output=True, text=True, timeout=300)


@contextmanager
def begun(out: Path, part: str, *arguments: str, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A report whose `part` has begun; killed at the end."""
    report = subprocess.Popen(command(out, *arguments), env=env, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (out / "gpu-report.json").exists() or part not in parts(out):
            assert report.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield report
    finally:
        report.kill()
        report.wait()


def parts(out: Path) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in json.loads((out / "gpu-report.json").read_text())["parts"]}


def test_parts_that_pass_are_in_both_files(tmp_path: Path) -> None:
    env = packages(tmp_path / "site", pytest=PASSING_TESTS)
    done = run(tmp_path / "out", "--only", "tests,decode", env=env)
    assert done.returncode == 0, done.stderr
    found = parts(tmp_path / "out")
    assert {name: part["status"] for name, part in found.items()} == {"tests": "passed", "decode": "passed"}
    *speeds, launches = found["decode"]["rows"]
    assert [row["sequences"] for row in speeds] == [1, 4] and all(row["tokens/s"] > 0 for row in speeds)
    assert launches["launches a step"] == 0, "on a CPU nothing is launched"
    text = (tmp_path / "out" / "gpu-report.md").read_text()
    assert "| tiny | 4 |" in text and "1 passed, 0 failed" in text and text.strip() == done.stdout.strip()


def test_a_kill_leaves_the_parts_before_it(tmp_path: Path) -> None:
    env = packages(tmp_path / "site", pytest=PASSING_TESTS)
    out = tmp_path / "out"
    with begun(out, "training", "--only", "tests,training", env=env):
        pass
    found = parts(out)
    assert found["tests"]["status"] == "passed" and found["tests"]["rows"]
    assert found["training"]["status"] == "running"


@pytest.mark.parametrize(
    ("tests", "minutes", "status"),
    [
        (HANGING_TESTS, "0.02", "cut off by its time limit"),
        (FAILING_TESTS, "1", "failed"),
        ("def main(arguments, plugins):\n    import os\n    os._exit(0)\n", "1", "failed"),
    ],
)
def test_a_part_that_hangs_or_fails_does_not_end_the_report(tests: str, minutes: str, status: str, tmp_path) -> None:
    env = packages(tmp_path / "site", pytest=tests)
    done = run(tmp_path / "out", "--only", "tests, vLLM", "--minutes", minutes, env=env)
    assert done.returncode == 1
    found = parts(tmp_path / "out")
    assert found["tests"]["status"] == status and found["vLLM"]["status"] == "left out"
    if tests is FAILING_TESTS:
        assert found["tests"]["error"] == "RuntimeError: no such device"
        assert "no such device" in (tmp_path / "out" / "gpu-report.md").read_text()


def test_missing_packages_are_all_named_before_it_starts(tmp_path: Path) -> None:
    broken = "raise ImportError('not here')"
    env = packages(tmp_path / "site", pydantic=broken, rich=broken)
    done = run(tmp_path / "out", env=env)
    assert done.returncode == 2 and not list((tmp_path / "out").iterdir())
    assert "missing Python packages: pydantic, rich" in done.stderr and "WHEELS=folder" in done.stderr


@pytest.mark.parametrize("content", [None, b"not a zip"])
def test_a_folder_without_usable_wheels_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "broken-1-py3-none-any.whl").write_bytes(content)
    done = run(tmp_path / "out", "--wheels", str(tmp_path))
    assert done.returncode == 1 and "gpu-report: " in done.stderr and "whl" in done.stderr


ODD = """
def main(arguments, plugins):
    import os, subprocess, sys
    rows = int(sys.argv[sys.argv.index("--rows") + 1])
    os.write(rows, b"\\xff\\xfe no row\\n")
    subprocess.Popen(["sleep", "301.25"], start_new_session=True)
    text = "E  bad \\ud83d | a\\rb " + "x" * 10_000_000
    report = type("Report", (), dict(when="call", outcome="failed", failed=True, nodeid="t", longrepr=text))
    plugins[0].pytest_runtest_logreport(report)
    return 1
"""


def test_what_a_part_writes_and_leaves_behind_harms_nothing(tmp_path: Path) -> None:
    env = packages(tmp_path / "site", pytest=ODD) | {"PYTHONIOENCODING": "ascii"}
    done = run(tmp_path / "out", "--only", "tests", env=env)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (failed, _) = parts(tmp_path / "out")["tests"]["rows"]
    assert failed["message"].startswith("bad ? | a") and len(failed["message"]) < 2100
    assert "bad ? \\| a |" in (tmp_path / "out" / "gpu-report.md").read_text(encoding="utf-8")
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\0301.25" in p.read_bytes()]


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "import os; os.kill(os.getpid(), 11)"])
def test_a_package_that_ends_its_import_leaves_its_part_out(code: str, tmp_path: Path) -> None:
    env = packages(tmp_path / "site", pytest=PASSING_TESTS, vllm=code)
    assert run(tmp_path / "out", "--only", "tests,vLLM", env=env).returncode == 0
    found = parts(tmp_path / "out")
    assert found["tests"]["status"] == "passed" and found["vLLM"]["status"] == "left out" and found["vLLM"]["error"]


def test_sigterm_leaves_no_folder_and_says_how_far_it_was(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    env = packages(tmp_path / "site", pytest=HANGING_TESTS) | {"TMPDIR": str(tmp_path / "tmp")}
    out = tmp_path / "out"
    with begun(out, "tests", "--only", "tests", env=env) as report:
        report.terminate()
        assert report.wait(30) == 143
    assert parts(out)["tests"]["status"] == "interrupted" and "interrupted" in (out / "gpu-report.md").read_text()
    assert not list((tmp_path / "tmp").iterdir())


def test_wheels_give_packages_that_are_not_installed(tmp_path: Path) -> None:
    (wheels := tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(wheels / "vllm-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("vllm.py", "")
        program = zipfile.ZipInfo("vllm_bin/program")
        program.external_attr = 0o755 << 16
        wheel.writestr(program, "")
    done = run(tmp_path / "out", "--only", "vLLM", "--wheels", str(wheels))
    assert done.returncode == 1 and "cannot import name" in parts(tmp_path / "out")["vLLM"]["error"]
    gpu_report.unpack_wheels(wheels, tmp_path / "unpacked")
    assert os.access(tmp_path / "unpacked" / "vllm_bin" / "program", os.X_OK)
