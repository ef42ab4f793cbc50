"""A vLLM server for tests: started as `rollover serve` would, asked over HTTP by the standard library alone."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from safetensors.torch import save_file

from rollover import process_tree

# vLLM's attention for the CPU knows no smaller heads.
SHAPE = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
FAULTS = Path(__file__).parent / "faults"
PATIENCE_S = 60.0
_numbers = itertools.count()


def wait_until(true: Callable[[], Any], limit_s: float = PATIENCE_S, state: Callable[[], str] = str) -> Any:
    """What `true` returns as soon as that is true. AssertionError, with `state`, if it is not in time."""
    deadline = time.monotonic() + limit_s
    while not (found := true()):
        assert time.monotonic() < deadline, f"{true} is not true after {limit_s:.0f} s\n{state()}"
        time.sleep(0.05)
    return found


def write_weights(model: Any, folder: Path, only: Callable[[str], bool] = lambda name: True) -> dict[str, str]:
    """A weights file of a model, a tied head once; what /update_weights is told of it."""
    path = folder / f"{next(_numbers)}.safetensors"
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.named_parameters() if only(name)}
    save_file(tensors, path)
    return {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


class Stream:
    """One request of /inference/v1/generate, read by a thread of its own."""

    def __init__(self, server: VllmServer, prompt: list[int], request_id: str = "", **sampling: Any) -> None:
        self.id = request_id or f"r{next(_numbers)}"
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[dict[str, Any]] | None = None
        self.finish_reason: str | None = None
        self.error: Any = None
        self._body = {
            "request_id": self.id,
            "token_ids": prompt,
            "stream": True,
            "sampling_params": {"max_tokens": 16, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, **sampling},
        }
        self._server = server
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with self._server.ask("POST", "/inference/v1/generate", self._body) as answer:
                assert answer.status == 200, answer.read()
                while line := answer.readline():
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        self._take(json.loads(line.removeprefix(b"data: ")))
        except Exception as error:
            self.error = error

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]
        for choice in chunk.get("choices", ()):
            if choice.get("token_ids"):
                self.logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
                self.tokens += choice["token_ids"]
            self.spans = choice.get("weight_versions") or self.spans
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, num: int = 0, limit_s: float = PATIENCE_S) -> Stream:
        """Until it has so many tokens; 0: until it has ended, without an error."""
        wait_until(lambda: self.ended or (num and len(self.tokens) >= num), limit_s)
        assert self.error is None, self.error
        return self


class VllmServer:
    """A running server; `process` is the one that a `rollover serve` would be, or its caller."""

    def __init__(
        self, model: Path, folder: Path, token: str = "", processor_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.token, self.model = token, model
        self.log = folder / "server.log"
        # This wrapper is the interpreter in which the remedies can be taken out.
        python = Path(".venv-vllm/bin/python").absolute()
        wrapper = folder / "python"
        wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{FAULTS}" exec {shlex.quote(str(python))} "$@"\n')
        wrapper.chmod(0o755)
        args = ["--enforce-eager", "--max-model-len", "1024", "--worker-extension-cls", "vllm_faults.Faults"]
        config = folder / "server.toml"
        kwargs = json.dumps(processor_kwargs or {}, separators=(", ", " = "))  # TOML
        config.write_text(
            f'[model]\npath = "{model}"\ndtype = "float32"\nprocessor_kwargs = {kwargs}\n'
            f'[engine]\nmax_running = 32\nkv_memory_gb = 0.2\nvllm_python = "{wrapper}"\n'
            f"vllm_args = {json.dumps(args)}\n"
        )
        command = [sys.executable, "-P", "-m", "rollover", "serve", str(config), "--engine", "vllm", "--port", "0"]
        variables = {**os.environ, "ROLLOVER_SERVER_TOKEN": token}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables)
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        assert first, self.log.read_text()[-3000:]
        self.url = json.loads(first)["url"]

    @contextlib.contextmanager
    def ask(
        self, method: str, path: str, body: Any = None, limit_s: float = PATIENCE_S
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=limit_s)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
            connection.request(method, path, json.dumps(body), headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def status(self, method: str, path: str, body: Any = None, limit_s: float = PATIENCE_S) -> int:
        with self.ask(method, path, body, limit_s) as answer:
            return answer.status

    def json(self, method: str, path: str, body: Any = None) -> Any:
        with self.ask(method, path, body) as answer:
            text = answer.read()
            assert answer.status == 200, text
            return json.loads(text) if text else None

    def call(self, name: str, *args: str) -> str:
        """What a method of the worker answers."""
        (result,) = self.json("POST", "/collective_rpc", {"method": name, "args": args})["results"]
        return result

    @property
    def label(self) -> str:
        return self.json("GET", "/weight_info")["weight_version"]

    def generate(self, prompt: list[int], request_id: str = "", **sampling: Any) -> Stream:
        return Stream(self, prompt, request_id, **sampling)

    def abort(self, full_id: str) -> None:
        self.json("POST", "/abort_requests", {"request_ids": [full_id]})

    def update(
        self, file: dict[str, str], label: str, then: Callable[[], None] = lambda: None, clear: bool = True
    ) -> int:
        """New weights in flight, as a client gives them. Returns the status of /update_weights; `then` is called before
        the server is resumed."""
        self.json("POST", f"/pause?mode=keep&clear_cache={str(clear).lower()}")
        self.json("POST", "/start_weight_update")
        status = self.status("POST", "/update_weights", {"update_info": file})
        if status == 200:
            self.json("POST", "/finish_weight_update", {"weight_version": label})
        then()
        self.json("POST", "/resume")
        return status

    @contextlib.contextmanager
    def without(self, remedy: str) -> Iterator[None]:
        self.call("leave_out", remedy)
        try:
            yield
        finally:
            self.call("put_back", remedy)

    def processes(self) -> dict[str, int]:
        """Process ids of those that make the server, by what they are."""
        return named(self.process.pid)

    def close(self) -> None:
        left = {*descendants(self.process.pid), self.process.pid}
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()
            for pid in left:  # none, if all is well
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def named(root: int) -> dict[str, int]:
    """The processes of vLLM's server below `root`, by what they are."""
    titles = {pid: command(pid) for pid in descendants(root)}
    words = {"api": "vllm_worker", "core": "EngineCore", "worker": "Worker"}
    return {name: min(pid for pid, title in titles.items() if word in title) for name, word in words.items()}


def command(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join([*psutil.Process(pid).cmdline(), ""])
    return ""


def descendants(root: int) -> set[int]:
    return {process.pid for process in process_tree.descendants(root)}


def alive(pids: set[int]) -> set[int]:
    """Those of these processes that run; one that only waits for its parent to look (a zombie) does not."""
    return {pid for pid in pids if not process_tree.has_ended(pid)}


def memory_files(pids: set[int]) -> set[Path]:
    """The files in shared memory that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {Path(line.split()[-1]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
    return found


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
