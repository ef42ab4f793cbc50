"""What train.optimizer names: each against a loop over torch's own, its state, and which weights it is for."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

import tiny
from local_trainer import local_trainer
from rollover.config import AlgorithmConfig, TrainConfig
from rollover.trainer.batch import Batch
from rollover.trainer.optimizer import Optimizer, UpdateRule, table_names
from samples import random_samples

SAMPLES = random_samples(1)
KINDS = ["adamw", "muon", "sgd", "adamw_8bit"]


def options(kind: str, **values: Any) -> TrainConfig:
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes", minversion="0.50")
    return TrainConfig.model_validate({"optimizer": kind, "learning_rate": 1e-2, "max_grad_norm": 0.0, **values})


class Net(torch.nn.Module):
    """A table, a matrix that 8 bits are for (4096 numbers or more), its bias, a matrix of one row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(8, 64)
        self.hidden = torch.nn.Linear(64, 64)
        self.out = torch.nn.Linear(64, 1)

    def forward(self, step: int) -> torch.Tensor:
        ids = torch.randint(8, (5,), generator=torch.Generator().manual_seed(step))
        return self.out(self.hidden(self.table(ids)).relu()).square().sum()


def run(net: Net, optimizer: Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = net(step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def by_hand(net: Net, rules: list[torch.optim.Optimizer], steps: int) -> None:
    for step in range(steps):
        net(step).backward()
        for rule in rules:
            rule.step()
            rule.zero_grad()


def adamw(**groups: list[torch.Tensor]) -> torch.optim.AdamW:
    decays = [{"params": groups["decayed"], "weight_decay": 0.1}, {"params": groups["plain"], "weight_decay": 0.0}]
    return torch.optim.AdamW(decays, lr=1e-2, betas=(0.9, 0.99), fused=True)


def assert_equal(ours: Net, theirs: Net) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_muon_updates_hidden_matrices_and_adamw_the_rest() -> None:
    ours, theirs = Net(), Net()
    run(ours, Optimizer(ours, options("muon", weight_decay=0.1, momentum=0.9), 10, torch.float32), range(4))
    muon = torch.optim.Muon(
        [theirs.hidden.weight], lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    rest = adamw(decayed=[theirs.table.weight, theirs.out.weight], plain=[theirs.hidden.bias, theirs.out.bias])
    by_hand(theirs, [muon, rest], 4)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (48, 48)])
def test_muons_updates_have_the_root_mean_square_of_adamws(shape: tuple[int, int]) -> None:
    """0.2 of the learning rate, which is what AdamW's are found to have (Liu et al. 2025)."""
    torch.manual_seed(0)
    weight = torch.zeros(shape, requires_grad=True)
    weight.grad = torch.randn(shape)
    UpdateRule({"weight": weight}, options("muon")).step(1e-2)
    assert 0.7 * 0.2e-2 < float(weight.detach().square().mean().sqrt()) < 1.2 * 0.2e-2


def test_sgd_is_torchs_with_momentum_for_all_weights() -> None:
    ours, theirs = Net(), Net()
    run(ours, Optimizer(ours, options("sgd", weight_decay=0.1, momentum=0.8), 10, torch.float32), range(4))
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    sgd = torch.optim.SGD(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2, momentum=0.8
    )
    by_hand(theirs, [sgd], 4)
    assert_equal(ours, theirs)


def test_adamw_8bit_is_for_large_matrices() -> None:
    ours, theirs = Net(), Net()
    optimizer = Optimizer(ours, options("adamw_8bit"), 10, torch.float32)
    run(ours, optimizer, range(4))
    run(theirs, Optimizer(theirs, options("adamw"), 10, torch.float32), range(4))
    tensors, _ = optimizer.state()
    kept = {name: tensor.dtype for name, tensor in tensors.items() if not name.startswith(("master/", "absmax"))}
    assert {name for name, dtype in kept.items() if dtype == torch.uint8} == {
        "state1/hidden.weight", "state2/hidden.weight",
    }  # fmt: skip
    assert kept["state1/out.weight"] == torch.float32 and "exp_avg/table.weight" in kept
    with torch.no_grad():
        for mine, other, start in zip(ours.parameters(), theirs.parameters(), Net().parameters(), strict=True):
            assert float((mine - other).norm()) < 0.1 * float((other - start).norm())


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_each_goes_on_bit_for_bit(kind: str) -> None:
    net = Net()
    optimizer = Optimizer(net, options(kind), 10, torch.float32)
    run(net, optimizer, range(3))
    tensors, meta = optimizer.state()
    saved, meta = {k: v.clone() for k, v in tensors.items()}, json.loads(json.dumps(meta))
    assert len({t.data_ptr() for t in tensors.values()}) == len(tensors), "what shares memory cannot be written"
    expected = run(net, optimizer, range(3, 6))
    other = Net()
    resumed = Optimizer(other, options(kind), 10, torch.float32)
    run(other, resumed, range(7, 9))  # whatever it did before is forgotten
    resumed.load_state(saved, meta)
    assert run(other, resumed, range(3, 6)) == expected
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    found, again = optimizer.state()[0], resumed.state()[0]
    assert found.keys() == again.keys() == saved.keys() and all(torch.equal(found[k], again[k]) for k in found)


def test_what_another_rule_keeps_is_refused() -> None:
    net = Net()
    optimizer = Optimizer(net, options("muon"), 10, torch.float32)
    run(net, optimizer, range(1))
    with pytest.raises(ValueError, match="what train.optimizer = 'muon' keeps, and not 'sgd'. Set it back"):
        Optimizer(Net(), options("sgd"), 10, torch.float32).load_state(*optimizer.state())


def test_the_missing_package_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    with pytest.raises(ValueError, match='train.optimizer = "adamw_8bit" needs .* pip install "bitsandbytes>=0.50"'):
        UpdateRule({"a": torch.ones(2, 2)}, TrainConfig(optimizer="adamw_8bit"))


@pytest.mark.parametrize("tied", [True, False])
def test_table_names_are_embeddings_and_output_layer(tied: bool) -> None:
    names = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert table_names(tiny.model(tie_word_embeddings=tied)) == names


@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, torch.bfloat16) for kind in KINDS] + [("adamw", torch.float32)], ids=str
)
def test_steps_of_each_improve_the_objective_and_resume(kind: str, dtype: torch.dtype) -> None:
    train = options(kind, learning_rate=1e-3, num_steps=10, minibatches_per_step=2)
    t, resumed = (
        local_trainer(tiny.loaded(), train, AlgorithmConfig(), dtype=dtype, max_new_tokens=16) for _ in range(2)
    )
    start = t.backend.compute_logprobs(SAMPLES)
    for _ in range(3):
        metrics = t.train_step(Batch(SAMPLES))
        assert metrics["grad_norm"] > 0 and metrics["train/skipped_steps"] == 0
    after = t.backend.compute_logprobs(SAMPLES)
    gain = sum(float(s.advantages[0]) * float((after[s.rollout_id] - start[s.rollout_id]).sum()) for s in SAMPLES)
    assert gain > 0
    tensors, meta = t.backend.save_state()
    resumed.backend.load_state({k: v.clone() for k, v in tensors.items()}, json.loads(json.dumps(meta)))
    assert resumed.train_step(Batch(SAMPLES)) == t.train_step(Batch(SAMPLES))
