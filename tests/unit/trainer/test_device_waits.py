"""How often a training step waits for the device: a few times a step, whatever it holds.

On a GPU a number that Python asks for (float(x), if x.any(), x.tolist(), values[mask]) stops Python until the device
has computed all that it was given before, and leaves it idle afterwards. Counted on the CPU: each is an operation.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_trainer import trainer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rollover.models import kernels
from rollover.trainer.batch import Batch
from rollover.trainer.objective import Tally, totals_of
from samples import random_samples

# Their results have a size, or are numbers, that Python must know.
_OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal")
_METHODS = ("cpu", "tolist")  # numpy() is refused by a GPU's tensors


class Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple)
        if name in _OPERATIONS or (by_mask and any(x is not None and x.dtype == torch.bool for x in args[1])):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Transfers(TorchFunctionMode):
    """Methods that on the CPU do nothing, or go past the dispatcher."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METHODS and getattr(torch.Tensor, name, None) is func:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def waits(micro_batch_tokens: int, algorithm: dict[str, Any], num_groups: int) -> Counter[str]:
    """Of one training step."""
    made = trainer(algorithm, micro_batch_tokens=micro_batch_tokens, minibatches_per_step=2)
    batch = Batch(random_samples(1, num_groups, 4))
    made.train_step(batch)
    with Waits() as counted, Transfers(counted.found):
        made.train_step(batch)
    return counted.found


ALGORITHMS: dict[str, dict[str, Any]] = {
    "default": {},
    "everything that is per token": {
        "kl_coef": 0.1,
        "entropy_coef": 0.01,
        "correction": "sequence_mask",
        "off_policy_mask_above": 0.5,
        "aggregation": "prompt-mean",
    },
    "gspo": {"loss": "gspo", "aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm"},
    "a critic": {"advantage": "gae"},
    "the step's size by its samples": {"ess_step_scaling": True, "correction": "token_truncate"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_waits_as_often_for_many_micro_batches_as_for_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU: kernels check that they get memory of the CPU.
    monkeypatch.setattr(kernels, "for_device", lambda device_type: None)
    few, many = waits(10_000, ALGORITHMS[name], 2), waits(1, ALGORITHMS[name], 4)
    assert few == many
    # The two updates' gradient norms, the sums of all micro-batches, and each stream of log-probs or values.
    assert sum(few.values()) <= 14, few


def test_sums_come_in_one_transfer_and_add_up_as_python_adds() -> None:
    torch.manual_seed(0)
    parts = [{"sum/a": torch.rand(()) * 1e6, "max/b": torch.randn(()), "count/c": torch.tensor(i)} for i in range(7)]
    tallies = [Tally(), Tally(), Tally()]
    for i, part in enumerate(parts):
        tallies[i % 2].add(part)
    tallies[0].divide("sum/a", 3.0)
    with Waits() as counted, Transfers(counted.found):
        totals = totals_of(tallies)
    assert counted.found == {"tolist": 1}
    even, odd = ([float(p["sum/a"]) for p in parts[i::2]] for i in (0, 1))
    assert totals == {
        "sum/a": sum(even) / 3.0 + sum(odd),
        "max/b": max(float(p["max/b"]) for p in parts),
        "count/c": 21.0,
    }
    assert totals_of(tallies) == totals and totals_of([]) == {} == Tally().totals()
