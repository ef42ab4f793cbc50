"""vLLM as a peer of benchmarks/engine.py, in the environment that `make vllm` builds.

That environment has neither Rollover nor our versions of torch and transformers, so this file is both ends: imported
here it starts itself with the other environment's Python and talks to it in lines of JSON. Only the standard library
is imported at its top.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

ENVIRONMENT = Path(".venv-vllm")
SETTING = "LLM.generate in process, torch.compile, log-probs on"


def python() -> Path | None:
    """The other environment's interpreter, if `make vllm` built it in the current folder."""
    path = ENVIRONMENT / "bin" / "python"
    return path.absolute() if (ENVIRONMENT / ".stamp").exists() and path.exists() else None


class VllmPeer:
    """A running vLLM (benchmarks/engine.py: Peer). Use as a context manager: leaving it ends the process."""

    name, setting, cases = "vllm_cpu", SETTING, (64,)

    def __init__(self, interpreter: Path, model: str, dtype: str, threads: int) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        self.process = subprocess.Popen(
            [interpreter, "-P", __file__, model, dtype],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = str(self._answer()["version"])

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Generate exactly new_tokens after each prompt (token ids)."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self.process.stdin.flush()
        assert self._answer()["tokens"] == len(prompts) * new_tokens

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with exit code {self.process.wait()}; its messages are above")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def _serve(model: str, dtype: str) -> None:
    """The other end: one line of JSON in, one line out, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes its log to standard output
    import vllm  # pyright: ignore[reportMissingImports]

    engine = vllm.LLM(model=model, dtype=dtype, max_model_len=1024, max_num_seqs=256, enable_prefix_caching=False)
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        new = request["new_tokens"]
        sampling = vllm.SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        print(json.dumps({"tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
