"""How a vLLM server is started (engine/server/vllm.py), and what binds its processes (engine/vllm_worker.py).

There is no vLLM here: tests/vllm_server/ runs the real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from rollover.config import Config
from rollover.config.cluster import ClusterConfig
from rollover.engine.remote.vllm import takes_no_images
from rollover.engine.server import vllm
from rollover.engine.vllm_worker import PARENT, register, take_expanded_prompts, unfit
from rollover.process_tree import descendants


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a model folder in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    (tmp_path / "model" / "model.safetensors").touch()
    return tmp_path


def config(**engine: Any) -> Config:
    values = {"path": "./model", "dtype": "float32"}
    return Config.model_validate({"model": values, "run": {"seed": 7}, "engine": {"max_running": 9, **engine}})


def python_that_has(folder: Path, version: str, has_plugin: bool = True, for_cpu: bool = False) -> str:
    """An interpreter, as far as we ask it."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{json.dumps([version, for_cpu, has_plugin])}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("version", "has_plugin", "problem"),
    [
        ("", False, "has no vLLM. Run `make vllm`"),
        ("0.31.4", True, "has vLLM 0.31.4, and 0.32 is the oldest that works"),
        ("0.33.1", False, "pip install --no-deps rollover"),
    ],
)
def test_an_interpreter_that_will_not_do(folder: Path, version: str, has_plugin: bool, problem: str) -> None:
    named = config(vllm_python=python_that_has(folder, version, has_plugin))
    with pytest.raises(ValueError, match=r"engine\.vllm_python") as raised:
        vllm.find_vllm(named)
    assert problem in str(raised.value)


def test_no_such_interpreter(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"engine\.vllm_python = '/no/python' is no Python interpreter that runs"):
        vllm.find_vllm(config(vllm_python="/no/python"))


def test_which_interpreter(folder: Path) -> None:
    """The one named, else what `make vllm` has finished, else this one."""
    with pytest.raises(ValueError, match=sys.executable):
        vllm.find_vllm(config())
    built = folder / ".venv-vllm" / "bin"
    built.mkdir(parents=True)
    made = python_that_has(built, "0.32.0", for_cpu=True)
    with pytest.raises(ValueError, match=sys.executable):
        vllm.find_vllm(config())
    (folder / ".venv-vllm" / ".stamp").touch()
    assert vllm.find_vllm(config()) == vllm.Vllm(Path(made), for_cpu=True)
    named = config(vllm_python=python_that_has(folder, "1.0"))
    assert vllm.find_vllm(named) == vllm.Vllm(folder / "python", for_cpu=False)


def test_the_command_line_says_what_the_configuration_does(folder: Path) -> None:
    args = vllm.vllm_arguments(config(kv_memory_gb=0.5, vllm_args=["--seed", "8"]), "127.0.0.1", 4000, for_cpu=False)
    said = dict(zip(args, args[1:], strict=False))
    assert said["--model"] == str(Path("model").absolute()) and said["--dtype"] == "float32"
    assert said["--host"] == "127.0.0.1" and said["--port"] == "4000"
    assert said["--max-num-seqs"] == "9" and said["--kv-cache-memory-bytes"] == "500000000"
    assert said["--logprobs-mode"] == "processed_logprobs" and "--enable-scale-out" in args
    assert json.loads(said["--weight-transfer-config"]) == {"backend": "rollover"}
    assert said["--worker-extension-cls"] == "rollover.engine.vllm_worker.WorkerExtension"
    assert said["--allowed-media-domains"] == "none.invalid" and "--mm-processor-kwargs" not in said
    assert args[-2:] == ["--seed", "8"] and args[args.index("--seed") + 1] == "7", "the user's come last"
    assert "--no-enable-chunked-prefill" not in args


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_server_s_gpus_are_those_that_it_splits_its_model_over(folder: Path, gpus: int) -> None:
    ray = ClusterConfig(type="ray", gpus_per_server=gpus)
    args = vllm.vllm_arguments(config().model_copy(update={"cluster": ray}), "127.0.0.1", 4000, for_cpu=False)
    said = dict(zip(args, args[1:], strict=False))
    assert said.get("--tensor-parallel-size") == (None if gpus == 1 else "4")


@pytest.mark.parametrize("token", ["", "secret"])
def test_vllm_server_is_behind_the_guard(token: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token too: its guard then refuses web pages."""
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", token)
    args = vllm.vllm_arguments(config(), "0.0.0.0", 4000, for_cpu=True)
    assert "--no-enable-chunked-prefill" in args
    assert args[args.index("--middleware") + 1] == "rollover.http_guard.Guard"
    assert "secret" not in args, "every user of the machine sees a command line"


def test_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/trainer")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "1")
    found = vllm.vllm_environment()
    assert found["VLLM_SERVER_DEV_MODE"] == "1" and found["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "1", "the user's"
    assert found["PYTHONPATH"] == str(Path(vllm.__file__).parents[3]), "the same files as here, and nothing else"


def test_a_server_that_does_not_start_is_exit_code_1(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages are in the log."""
    named = config(vllm_python=python_that_has(folder, "0.32.0"))
    urls: list[str] = []
    code = vllm.run_vllm(named, host="127.0.0.1", port=0, ready=urls.append, log=folder / "log")
    assert code == 1 and urls == []
    assert f"its messages are in {folder / 'log'}" in capsys.readouterr().err
    assert (folder / "log").read_text().strip() == '["0.32.0", false, true]'


def test_a_vllm_of_somebody_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT, raising=False)
    register()
    assert "vllm" not in sys.modules and PARENT not in os.environ


PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
PARAMETERS = {
    "embed.weight": (9, 4),
    "layers.0.qkv_proj.weight": (8, 4),
    "layers.0.qkv_proj.bias": (8,),
    "scale": (),
}
WHOLE = {
    "embed.weight": (9, 4),
    **{f"layers.0.{part}_proj.weight": (rows, 4) for part, rows in (("q", 4), ("k", 2), ("v", 2))},
    **{f"layers.0.{part}_proj.bias": (rows,) for part, rows in (("q", 4), ("k", 2), ("v", 2))},
    "scale": (1,),
}


def test_weights_that_are_the_whole_model() -> None:
    assert unfit(PARAMETERS, WHOLE, PACKED) == []
    assert unfit(PARAMETERS, WHOLE | {"lm_head.weight": (9, 4)}, PACKED) == []
    assert unfit({"qkv_proj.weight": (3, 4)}, {f"{p}_proj.weight": (1, 4) for p in "qkv"}, PACKED) == []


@pytest.mark.parametrize("name", WHOLE)
def test_weights_that_are_not(name: str) -> None:
    assert unfit(PARAMETERS, {n: s for n, s in WHOLE.items() if n != name}, PACKED) == [f"{name} is not there"]
    if name != "scale":
        for shape in ((WHOLE[name][0] - 1, *WHOLE[name][1:]), (*WHOLE[name], 1)):
            (problem,) = unfit(PARAMETERS, WHOLE | {name: shape}, PACKED)
            assert name in problem and str(shape) in problem


TREE = """
import multiprocessing, os, sys, time
from rollover.engine.vllm_worker import bind

def report(name):
    bind()
    print(name, os.getpid(), flush=True)

def leaf():
    report("worker")
    time.sleep(100)

def middle():
    report("core")
    multiprocessing.Process(target=leaf).start()
    time.sleep(100)

if __name__ == "__main__":
    os.environ["ROLLOVER_VLLM_PARENT"] = str(os.getppid())
    multiprocessing.set_start_method("spawn")
    report("api")
    multiprocessing.Process(target=middle).start()
    time.sleep(100)
"""


@pytest.mark.parametrize("victim", ["api", "parent"])
def test_no_process_outlives_its_parent(tmp_path: Path, victim: str) -> None:
    (tmp_path / "tree.py").write_text(TREE)
    starter = "import subprocess, sys; subprocess.run([sys.executable, sys.argv[1]])"
    parent = subprocess.Popen([sys.executable, "-c", starter, tmp_path / "tree.py"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as output:
        pids = {"parent": parent.pid, **{name: int(pid) for name, pid in (output.readline().split() for _ in range(3))}}
        os.kill(pids[victim], signal.SIGKILL)
        assert output.read() == "", "all who could write have ended"
    parent.wait()


SERVER = """#!/bin/sh
case "$2" in -c) echo '["0.32.0", true, true]';; *) exec "{python}" {script} "$@";; esac
"""
SCRIPT = """
import http.server, os, pathlib, subprocess, sys, threading, time
pathlib.Path(os.environ["VLLM_RPC_BASE_PATH"], "socket").touch()
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
port = int(sys.argv[sys.argv.index("--port") + 1])
threading.Thread(target=http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever).start()
time.sleep(100)
"""


@pytest.mark.parametrize("what", ["one of its processes dies", "it is told to end", "it ends"])
def test_a_server_runs_until_one_of_its_processes_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """In place of vLLM: a program that answers when it has started another one, which does nothing. Sockets that it
    leaves are removed."""
    sockets = folder / "sockets"
    sockets.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(sockets))
    (folder / "server.py").write_text(SCRIPT)
    python = folder / "python"
    python.write_text(SERVER.format(python=sys.executable, script=folder / "server.py"))
    python.chmod(0o755)
    if what == "it ends":
        (folder / "server.py").write_text("raise SystemExit(0)")  # as vLLM's API server does after its engine's death
    urls: list[str] = []

    def ready(url: str) -> None:
        urls.append(url)
        assert [*sockets.glob("*/socket")]
        (server,) = servers()
        (child,) = descendants(server.pid)
        # When what belongs to the start is over.
        end = {
            "one of its processes dies": (child.pid, signal.SIGKILL),
            "it is told to end": (os.getpid(), signal.SIGTERM),
        }
        threading.Timer(3.0, os.kill, end[what]).start()

    code = vllm.run_vllm(config(vllm_python=str(python)), host="127.0.0.1", port=0, ready=ready)
    assert code == (0 if what == "it is told to end" else 1)
    assert bool(urls) == (what != "it ends")
    assert not servers()
    assert not [*sockets.iterdir()]
    assert ("vLLM's server ended" in capsys.readouterr().err) == (code == 1)


def servers() -> list[psutil.Process]:
    return [p for p in descendants(os.getpid()) if any("server.py" in word for word in p.cmdline())]


def test_who_was_told_of_a_dead_parent_ends() -> None:
    code = textwrap.dedent("""
        import time
        from rollover.engine.vllm_worker import bind
        bind()
        time.sleep(100)
    """)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    started = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, PARENT: str(dead.pid)})
    assert child.wait() == -signal.SIGKILL and time.monotonic() - started < 90


class FakeProcessor:
    """vLLM's BaseMultiModalProcessor: the expansion of an image is 7, 7."""

    def __init__(self, together: bool = False) -> None:
        self.info = SimpleNamespace(ctx=SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=together)))

    def _find_mm_placeholders(self, prompt: list[int], updates: Any) -> dict[str, list[int]]:
        found = [i for i in range(len(prompt) - 1) if prompt[i : i + 2] == [7, 7]]
        return {"image": found} if found else {}

    def _maybe_apply_prompt_updates(self, mm_items: Any, mm_res: Any) -> tuple[list[int], dict[str, list[int]]]:
        ids = [token for i in mm_res.prompt_ids for token in ([7, 7] if i == 7 else [i])]
        return ids, self._find_mm_placeholders(ids, None)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> type[FakeProcessor]:
    made = type("Processor", (FakeProcessor,), dict(vars(FakeProcessor)))
    processing, platforms = ModuleType("vllm.multimodal.processing"), ModuleType("vllm.platforms")
    processing.BaseMultiModalProcessor = made  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: True)  # type: ignore[attr-defined]
    for module in (ModuleType("vllm"), ModuleType("vllm.multimodal"), processing, platforms):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    take_expanded_prompts()
    take_expanded_prompts()
    return made


@pytest.mark.parametrize(("ids", "num"), [([1, 7, 7, 2], 1), ([1, 7, 2], 1), ([7, 7, 3, 7, 7], 2), ([7, 3, 7], 2)])
def test_expanded_and_unexpanded_prompts_are_taken(hooked: type[FakeProcessor], ids: list[int], num: int) -> None:
    items = SimpleNamespace(get_all_counts=lambda: {"image": num})
    out, found = hooked()._maybe_apply_prompt_updates(items, SimpleNamespace(prompt_ids=ids, prompt_updates=None))
    assert out == ([1, 7, 7, 2] if num == 1 else [7, 7, 3, 7, 7])
    assert len(found["image"]) == num


def test_images_that_a_cpu_would_compute_wrongly_are_refused(hooked: type[FakeProcessor]) -> None:
    items = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    with pytest.raises(ValueError, match="causal attention only") as refusal:
        hooked(together=True)._maybe_apply_prompt_updates(
            items, SimpleNamespace(prompt_ids=[1, 7, 7, 2], prompt_updates=None)
        )
    assert takes_no_images(str(refusal.value)), "clients end their run"
