"""Every process of a vLLM server ends when one of them does, or who started it, and nothing is left.

Here EngineCore, which is slowest to die, and a server with half a model: test_vllm_runs.py kills the others in runs.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_server.serving import VllmServer, alive, descendants, memory_files, wait_until, write_weights

pytestmark = pytest.mark.vllm

PROMPT = list(range(5, 25))


@pytest.mark.parametrize("victim", ["core", "half a model"])
def test_no_process_is_left(model_folder: Path, new: Any, tmp_path: Path, victim: str) -> None:
    server = VllmServer(model_folder, tmp_path)
    try:
        pids = {"serve": server.process.pid, **server.processes()}
        everyone = {*descendants(server.process.pid), server.process.pid}
        files = memory_files(everyone)
        assert files
        stream = server.generate(PROMPT, max_tokens=900).wait(5)
        started = time.monotonic()
        if victim == "half a model":  # trap 6 without its remedy: a file that turns out bad when the model is touched
            server.call("leave_out", "check")
            file = write_weights(new, tmp_path, lambda name: False)
            os.truncate(file["path"], 4)
            server.json("POST", "/pause?mode=keep&clear_cache=true")
            server.json("POST", "/start_weight_update")
            with pytest.raises((OSError, AssertionError)):
                server.json("POST", "/update_weights", {"update_info": file})
        else:
            os.kill(pids[victim], signal.SIGKILL)
        gone: dict[int, float] = {}

        def all_gone() -> bool:
            for pid in everyone - alive(everyone):
                gone.setdefault(pid, time.monotonic() - started)
            return gone.keys() == everyone

        wait_until(all_gone)
        print(f"\n{victim} killed, others gone after", {name: round(gone[pid], 1) for name, pid in pids.items()})
        wait_until(lambda: not any(file.exists() for file in files))
        assert server.process.wait() == 1
        wait_until(lambda: stream.ended)
        assert stream.finish_reason is None and len(stream.tokens) < 900
    finally:
        server.close()
