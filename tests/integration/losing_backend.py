"""A trainer's backend that is lost where a file says: each line of `losses.txt` beside this file is good for one loss.

    forward_backward 3           the call at policy version 3 raises BackendLost, and so does every one after it
    forward_backward 3 kill      it ends the run at once, as a kill does, with what is on the disk by then

A line `weights 3` means the second of the tensors that are published; `make 0` the function that makes a backend.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rollover.trainer.backend import BackendLost, BackendSetup, TrainerBackend
from rollover.trainer.local_backend import make_local


class Losing:
    def __init__(self, backend: TrainerBackend, losses: Path) -> None:
        self.backend, self.losses, self.lost = backend, losses, False

    def __getattr__(self, name: str) -> Any:
        if name == "flops" and self.lost:
            raise BackendLost("so is what it has counted")
        found = getattr(self.backend, name)
        if not callable(found) or name == "publish":
            return found

        def called(*args: Any, **options: Any) -> Any:
            self._look(name)
            return found(*args, **options)

        return called

    async def publish(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._look("publish")
        return self._weights(await self.backend.publish())

    def _weights(self, tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for index, tensor in enumerate(tensors):
            if index == 1:
                self._look("weights")
            yield tensor

    def _look(self, verb: str) -> None:
        if self.lost:
            raise BackendLost(f"{verb} was asked of a backend that is lost")
        look(self.losses, verb, self.backend.policy_version, self)

    def close(self) -> None:
        with self.losses.with_name("closed.txt").open("a") as file:
            file.write(f"{self.backend.policy_version} {'lost' if self.lost else 'whole'}\n")


def look(losses: Path, verb: str, version: int, backend: Losing | None = None) -> None:
    lines = losses.read_text().splitlines() if losses.exists() else []
    for line in lines:
        if line.split()[:2] == [verb, str(version)]:
            lines.remove(line)
            losses.write_text("\n".join(lines))
            if line.endswith("kill"):
                raise KeyboardInterrupt
            if backend is not None:
                backend.lost = True
            raise BackendLost(f"its process ended in {verb} at version {version}")


def make(setup: BackendSetup) -> Losing:
    """Where `held.txt` is there already, a line in it says how many that are lost somebody holds still."""
    losses = Path(__file__).with_name("losses.txt")
    if (held := losses.with_name("held.txt")).exists():
        gc.collect()
        with held.open("a") as file:
            print(sum(type(one) is Losing and one.lost for one in gc.get_objects()), file=file)
    look(losses, "make", 0)
    return Losing(make_local(setup), losses)
