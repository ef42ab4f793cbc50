"""Ranks of a gloo group, for tests of what they do together: forked from one process, which imports torch only once.

`python forked_ranks.py MODULE` reads a call from each line of its standard input, forks the ranks, and answers with a
line: what each of them returned, or failed with. `Ranks` is the other end of it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any


class RankError(Exception):
    """What a rank failed with, where it is no OSError; or that it was killed."""


class Ranks:
    """`with Ranks("unit.trainer.shard_jobs") as ranks: ranks(2, "save", folder)`: [what each of 2 ranks returned].

    The functions of the module take JSON, and return it. An OSError of a rank is raised as one.
    """

    def __init__(self, module: str) -> None:
        path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._host = subprocess.Popen(
            [sys.executable, __file__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._host.stdin is not None and self._host.stdout is not None
        self._host.kill()  # it waits for the next call
        self._host.wait()
        self._host.stdin.close()
        self._host.stdout.close()

    def __call__(self, world: int, function: str, *arguments: Any) -> list[Any]:
        assert self._host.stdin is not None and self._host.stdout is not None
        print(json.dumps([world, function, arguments]), file=self._host.stdin, flush=True)
        line = self._host.stdout.readline()
        assert line, "the process of the ranks has ended"
        answers = json.loads(line)
        for answer in answers:
            if "errno" in answer:
                raise OSError(answer["errno"], answer["error"])
        failed = [f"rank {i}: {answer['error']}" for i, answer in enumerate(answers) if "error" in answer]
        if failed:
            raise RankError("; ".join(failed))
        return [answer["result"] for answer in answers]


def _rank(rank: int, world: int, folder: str, module: Any, function: str, arguments: list[Any]) -> None:
    """One rank, to its end."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    answer: dict[str, Any] = {}
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=120)
        )
        answer["result"] = getattr(module, function)(*arguments)
    except OSError as error:
        answer |= {"error": error.strerror, "errno": error.errno}
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    Path(folder, str(rank)).write_text(json.dumps(answer))
    os._exit(0)  # what the process that it was forked from has open is not its own


def _serve(module_name: str) -> None:
    from rollover.processes import die_with

    die_with(os.getppid())
    module = importlib.import_module(module_name)
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            world, function, arguments = json.loads(line)
            with tempfile.TemporaryDirectory() as folder:
                children = []
                for rank in range(world):
                    child = os.fork()
                    if child == 0:
                        _rank(rank, world, folder, module, function, arguments)
                    children.append(child)
                statuses = [os.waitpid(child, 0)[1] for child in children]
                answers = [
                    json.loads(Path(folder, str(rank)).read_text())
                    if status == 0
                    else {"error": f"killed by {os.WTERMSIG(status)}"}
                    for rank, status in enumerate(statuses)
                ]
            print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
