"""One whole training step against TRL's GRPOTrainer and verl's actor update: their code, the same weights and samples.

From scored rollouts to the gradient of every weight at every optimizer step, in float32 on the CPU, with SGD so that an
update is its gradient. Behavior log-probs differ from those of the policy, and an environment wrote some tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

import tiny
from local_trainer import build_batch, local_trainer
from rollover.config import AlgorithmConfig, CriticConfig, TrainConfig
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task

trl = pytest.importorskip("trl")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
corr = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
losses = pytest.importorskip("verl.workers.utils.losses")
actor = pytest.importorskip("verl.workers.config.actor")
torch_functional = pytest.importorskip("verl.utils.torch_functional")

Gradients = list[dict[str, torch.Tensor]]
"""Of each optimizer step: name of a weight -> its gradient."""
GROUPS, SIBLINGS = 4, 3
RATE = 0.3
CRITIC_SEED = 3
CAP = 1.2


@dataclass(frozen=True)
class Row:
    """One rollout: what was sampled, and by whom."""

    group: int
    prompt: list[int]
    ids: list[int]
    sampled: list[bool]
    behavior: list[float]
    reward: float


def plain() -> Any:
    """The tiny model as transformers computes it."""
    model = tiny.model()
    model.set_attn_implementation("eager")
    return model


def padded(rows: list[Row], length: int) -> tuple[dict[str, torch.Tensor], int]:
    """A model's inputs, prompts padded from the left and answers from the right (to `length`); the prompts' width."""
    width, length = max(len(r.prompt) for r in rows), length or max(len(r.ids) for r in rows)
    ids = torch.zeros(len(rows), width + length).long()
    attention = torch.zeros_like(ids)
    for i, r in enumerate(rows):
        start = width - len(r.prompt)
        ids[i, start : width + len(r.ids)] = torch.tensor(r.prompt + r.ids)
        attention[i, start : width + len(r.ids)] = 1
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": attention, "position_ids": positions}, width


def logprobs_of(model: Any, rows: list[Row], length: int = 0) -> torch.Tensor:
    """[B, T] by verl's function of logits."""
    inputs, width = padded(rows, length)
    logits = model(**inputs).logits[:, width - 1 : -1]
    return torch_functional.logprobs_from_logits(logits, inputs["input_ids"][:, width:])


def values_of(model: Any, head: torch.nn.Linear, rows: list[Row], length: int) -> torch.Tensor:
    """[B, T]: of the hidden states before each token, at unit mean square."""
    inputs, width = padded(rows, length)
    hidden = model.model(**inputs).last_hidden_state[:, width - 1 : -1]
    return head(hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)).squeeze(-1)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    rng = np.random.default_rng(0)
    out = []
    for g in range(GROUPS):
        prompt = rng.integers(4, 90, int(rng.integers(3, 8))).tolist()
        for i in range(SIBLINGS):
            n = int(rng.integers(4, 8)) + 3 * (g < GROUPS // 2)
            sampled = [True] * n
            if (g + i) % 2:
                sampled[1:3] = [False, False]  # an environment's
            out.append(Row(g, prompt, rng.integers(4, 90, n).tolist(), sampled, [], float(rng.normal())))
    with torch.no_grad():
        start = logprobs_of(plain(), out)
    noise = rng.normal(0, 0.25, start.shape)
    return [
        Row(r.group, r.prompt, r.ids, r.sampled, (start[i].numpy() + noise[i])[: len(r.ids)].tolist(), r.reward)
        for i, r in enumerate(out)
    ]


def gradients_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def begin(head: torch.nn.Linear) -> None:
    """Values that are not all 0."""
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-0.1, 0.1, head.in_features)[None])


def groups_of(rows: list[Row]) -> list[Group]:
    groups = []
    for g in range(GROUPS):
        task = Task(f"t{g}", "test", "reward", prompt="x")
        rollouts = []
        for i, r in enumerate(r for r in rows if r.group == g):
            ends = [0, *(k for k in range(1, len(r.ids)) if r.sampled[k] != r.sampled[k - 1]), len(r.ids)]
            segments = [
                Segment(
                    np.array(r.ids[a:b], np.int32), np.array(r.behavior[a:b], np.float32), 0, SamplingParams(),
                    StopReason.PAUSED, trainable=r.sampled[a],
                )
                for a, b in zip(ends, ends[1:], strict=False)
            ]  # fmt: skip
            rollouts.append(Rollout(g, i, task, segments, RolloutState.READY, StopReason.EOS, Reward(r.reward)))
        prompt = next(tuple(r.prompt) for r in rows if r.group == g)
        groups.append(Group(g, task, Prompt(prompt), rollouts))
    return groups


def ours(rows: list[Row], minibatches: int, **algorithm: Any) -> Gradients:
    return with_critic(rows, minibatches, **algorithm)[0]


def with_critic(rows: list[Row], minibatches: int, **algorithm: Any) -> tuple[Gradients, Gradients]:
    """The gradients of the policy, and those of a critic, which is a model of its own."""
    capped = {} if algorithm.get("correction") == "none" else {"correction_cap": CAP}
    config = AlgorithmConfig.model_validate({**capped, **algorithm})
    train = TrainConfig(
        optimizer="sgd", momentum=0.0, learning_rate=RATE, max_grad_norm=0.0, num_steps=1, micro_batch_tokens=60,
        minibatches_per_step=minibatches, warmup_steps=0,
    )  # fmt: skip
    critic_model = tiny.loaded(seed=CRITIC_SEED) if config.needs_critic else None
    t = local_trainer(
        tiny.loaded(), train, config, dtype=torch.float32, max_new_tokens=16, critic_model=critic_model,
        critic=CriticConfig(model="policy", max_grad_norm=0.0) if config.needs_critic else None,
    )  # fmt: skip
    found: Gradients = []
    of_critic: Gradients = []
    backend = tiny.local(t)
    if backend.critic is not None:
        begin(backend.critic.head)
    step = backend.optim_step

    def spy(*args: Any, **options: Any) -> Any:
        found.append(gradients_of(backend.model))
        if backend.critic is not None and backend.critic.own is not None:
            of_head = {f"head.{name}": g for name, g in gradients_of(backend.critic.head).items()}
            of_critic.append(gradients_of(backend.critic.own.model) | of_head)
        return step(*args, **options)

    backend.optim_step = spy  # type: ignore[method-assign]
    t.train_step(build_batch(groups_of(rows), config))
    return found, of_critic


def assert_same(got: Gradients, peer: Gradients) -> None:
    assert len(got) == len(peer)
    for ours_, theirs in zip(got, peer, strict=True):
        assert ours_.keys() == theirs.keys() and any(g.abs().max() > 1e-3 for g in theirs.values())
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours_[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# TRL


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.found: Gradients = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def trls(rows: list[Row], minibatches: int, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Gradients:
    """`GRPOTrainer.train()` for one generation batch, whose answers are given."""
    path = tiny.save(folder / "model")
    rewards = {tuple(r.ids): r.reward for r in rows}
    prompts = [" ".join(f"p{r.group}" for _ in range(2)) for r in rows]
    importance = options.pop("importance", False)
    args = trl.GRPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to=[], max_steps=minibatches,
        per_device_train_batch_size=len(rows) // minibatches, steps_per_generation=minibatches,
        gradient_accumulation_steps=1, num_generations=SIBLINGS, learning_rate=RATE, lr_scheduler_type="constant",
        max_grad_norm=0.0, optim="sgd", shuffle_dataset=False, save_strategy="no", logging_strategy="no",
        max_completion_length=16, gradient_checkpointing=False, disable_tqdm=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"}, **options,
    )  # fmt: skip
    from datasets import Dataset

    recorder = Recorder()
    trainer = trl.GRPOTrainer(
        model=str(path), args=args, processing_class=tiny.tokenizer(), callbacks=[recorder],
        reward_funcs=lambda completion_ids, **_: [rewards[tuple(ids)] for ids in completion_ids],
        train_dataset=Dataset.from_list([{"prompt": p} for p in dict.fromkeys(prompts)]),
    )  # fmt: skip
    trainer.use_vllm = importance

    def generate(given: list[str]) -> tuple[Any, ...]:
        assert given == prompts
        logps = [r.behavior for r in rows] if importance else None
        masks = [[int(s) for s in r.sampled] for r in rows]
        return [r.prompt for r in rows], [r.ids for r in rows], masks, ["x"] * len(rows), logps, {}, None, None

    monkeypatch.setattr(trainer, "_generate", generate)
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)
    trainer.train()
    return recorder.found


TRL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GRPO": (
        {"aggregation": "seq-mean-token-mean", "correction": "none"},
        {"loss_type": "grpo"},
    ),
    "GRPO, KL": (
        {"aggregation": "seq-mean-token-mean", "correction": "none", "kl_coef": 0.5},
        {"loss_type": "grpo", "beta": 0.5, "use_bias_correction_kl": False},
    ),
    "DAPO, truncated weights": (
        {"clip_high": 0.28, "correction": "token_truncate"},
        {"loss_type": "dapo", "epsilon_high": 0.28, "importance": True,
         "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": CAP},
    ),
    "DAPO, sequences left out": (
        {"clip_high": 0.28, "correction": "sequence_mask", "correction_cap": 1.5, "correction_floor": 0.7},
        {"loss_type": "dapo", "epsilon_high": 0.28, "importance": True,
         "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.5,
         "vllm_importance_sampling_clip_min": 0.7},
    ),
    "GSPO": (
        {"loss": "gspo", "aggregation": "seq-mean-token-mean", "correction": "none", "clip_low": 3e-3,
         "clip_high": 4e-3},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-3, "epsilon_high": 4e-3},
    ),
    "Dr. GRPO": (
        {"advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm", "correction": "none"},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "VESPO": (
        {"loss": "vespo"},
        {"loss_type": "vespo", "importance": True, "vllm_importance_sampling_mode": "token_truncate",
         "vllm_importance_sampling_clip_max": CAP},
    ),
}  # fmt: skip


# Of several minibatches TRL's dapo divides each by the mean of their numbers of tokens: see below.
TRL_CASES = [(name, n) for name in TRL for n in (1, 2) if n == 1 or TRL[name][1]["loss_type"] in ("grpo", "dr_grpo")]


@pytest.mark.parametrize(("name", "minibatches"), TRL_CASES)
def test_a_step_is_that_of_trls_trainer(
    rows: list[Row], name: str, minibatches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, options = TRL[name]
    assert_same(ours(rows, minibatches, **algorithm), trls(rows, minibatches, tmp_path, monkeypatch, **options))


def test_deliberate_a_minibatch_is_divided_by_its_own_tokens_and_trls_by_their_mean_number(
    rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = ours(rows, 2, correction="none")[:1]
    first = trls(rows, 2, tmp_path, monkeypatch, loss_type="dapo")[0]
    tokens = [sum(sum(r.sampled) for r in rows if (r.group >= GROUPS // 2) == half) for half in (False, True)]
    assert tokens[0] != tokens[1]
    assert_same(got, [{name: g * (sum(tokens) / 2 / tokens[0]) for name, g in first.items()}])


# verl


class Told(dict[str, Any]):
    """A batch as verl's loss reads it, already padded."""

    def select(self, *names: str) -> Told:
        return Told({name: self[name] for name in names})

    def to_padded_tensor(self) -> Told:
        return self


def verls(
    rows: list[Row],
    minibatches: int,
    correction: dict[str, Any],
    reference: bool,
    advantages: torch.Tensor | None = None,
    **options: Any,
) -> Gradients:
    """As its trainer: log-probs, correction, rejection, advantages of the whole batch; then its loss by minibatch."""
    model = plain()
    length = max(len(r.ids) for r in rows)
    mask = torch.zeros(len(rows), length)
    behavior, scores = torch.zeros_like(mask), torch.zeros_like(mask)
    for i, r in enumerate(rows):
        mask[i, : len(r.ids)] = torch.tensor(r.sampled).float()
        behavior[i, : len(r.ids)] = torch.tensor(r.behavior)
        scores[i, max(k for k, s in enumerate(r.sampled) if s)] = r.reward
    with torch.no_grad():
        old = logprobs_of(model, rows)
    weights = None
    if correction:
        found, mask, _ = corr.compute_rollout_correction_and_rejection_mask(old, behavior, mask, **correction)
        weights = None if found is None else found.batch["rollout_is_weights"]
    if advantages is None:
        groups = np.array([r.group for r in rows])
        advantages, _ = core_algos.compute_grpo_outcome_advantage(scores, mask, groups, epsilon=1e-4)
    mode = options.pop("loss_mode", "vanilla")
    config = actor.FSDPActorConfig(
        ppo_micro_batch_size_per_gpu=1, rollout_n=1, clip_ratio_c=1e9, use_kl_loss=reference, kl_loss_coef=0.5,
        policy_loss=actor.PolicyLossConfig(loss_mode=mode, dro_beta=0.4 if mode == "dro" else None), **options,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    out: Gradients = []
    for part in torch.arange(len(rows)).chunk(minibatches):
        data = {"response_mask": mask[part], "old_log_probs": old[part], "advantages": advantages[part]}
        if weights is not None:
            data["rollout_is_weights"] = weights[part]
        if reference:
            data["ref_log_prob"] = old[part]
        data["batch_num_tokens"] = mask[part].sum()
        data["global_batch_size"] = (mask[part].sum(-1) > 0).sum()
        output = {"log_probs": logprobs_of(model, [rows[i] for i in part.tolist()], length)}
        loss, _ = losses.ppo_loss(config, output, Told(data, dp_size=1))
        optimizer.zero_grad()
        loss.backward()
        out.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return out


VERL: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "GRPO": ({"correction": "none"}, {}, {}),
    "GRPO by rows": (
        {"correction": "none", "aggregation": "seq-mean-token-mean"}, {}, {"loss_agg_mode": "seq-mean-token-mean"},
    ),
    "DAPO, truncated weights": (
        {"clip_high": 0.28}, {"rollout_is": "token", "rollout_is_threshold": CAP}, {"clip_ratio_high": 0.28},
    ),
    "DAPO, normalized weights": (
        {"clip_high": 0.28, "correction_normalize": True},
        {"rollout_is": "token", "rollout_is_threshold": CAP, "rollout_is_batch_normalize": True},
        {"clip_ratio_high": 0.28},
    ),
    "GSPO": (
        {"correction": "none", "loss": "gspo", "aggregation": "seq-mean-token-mean", "clip_low": 3e-3,
         "clip_high": 4e-3},
        {},
        {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 3e-3,
         "clip_ratio_high": 4e-3},
    ),
    "rejected tokens": (
        {"rejection": {"token_k2": 0.06}}, {"rollout_is": "token", "rollout_is_threshold": CAP,
         "rollout_rs": "token_k2", "rollout_rs_threshold": "0.06"}, {},
    ),
    "rejected by two bounds": (
        {"rejection": {"token_k1": [-0.5, 0.4], "sequence_mean_k3": 0.04}, "correction": "none"},
        {"rollout_rs": "token_k1,seq_mean_k3",
         "rollout_rs_threshold": f"{math.exp(-0.5)!r}_{math.exp(0.4)!r},0.04"},
        {},
    ),
    "DRO": ({"correction": "none", "loss": "dro", "loss_options": {"beta": 0.4}}, {}, {"loss_mode": "dro"}),
}  # fmt: skip


@pytest.mark.parametrize("kl", [False, True], ids=["plain", "KL"])
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("name", VERL)
def test_a_step_is_that_of_verls_actor(
    rows: list[Row], name: str, minibatches: int, kl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the policy of the start: its KL has a gradient from the second update on."""
    algorithm, correction, options = VERL[name]
    monkeypatch.setattr(losses, "no_padding_2_padding", lambda values, _: values)
    got = ours(rows, minibatches, **algorithm, **({"kl_coef": 0.5} if kl else {}))
    assert_same(got, verls(rows, minibatches, correction, kl, **options))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_of_ppo_is_that_of_verls_actor_and_critic(
    rows: list[Row], minibatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The critic is a model of its own. Its second update follows AdamW's first, so its first gradient is compared."""
    monkeypatch.setattr(losses, "no_padding_2_padding", lambda values, _: values)
    got, of_critic = with_critic(rows, minibatches, advantage="gae", gamma=0.95, gae_lambda=0.9, correction="none")
    critic = tiny.model(seed=CRITIC_SEED)
    critic.set_attn_implementation("eager")
    head = torch.nn.Linear(64, 1)
    torch.nn.init.zeros_(head.bias)
    begin(head)
    length = max(len(r.ids) for r in rows)
    mask, scores = torch.zeros(len(rows), length), torch.zeros(len(rows), length)
    for i, r in enumerate(rows):
        mask[i, : len(r.ids)] = torch.tensor(r.sampled).float()
        scores[i, max(k for k, s in enumerate(r.sampled) if s)] = r.reward
    with torch.no_grad():
        values = values_of(critic, head, rows, length)
    advantages, returns = core_algos.compute_gae_advantage_return(scores, values, mask, 0.95, 0.9)
    # The deviation that advantages are divided by has 1e-4 added to it here, in verl 1e-8 to its square.
    std = (returns - values)[mask.bool()].std()
    advantages = advantages * torch.sqrt(std**2 + 1e-8) / (std + 1e-4)
    assert_same(got, verls(rows, minibatches, {}, False, advantages=advantages))
    part = torch.arange(len(rows)).chunk(minibatches)[0]
    told = {"values": values[part], "returns": returns[part], "response_mask": mask[part]}
    told |= {"batch_num_tokens": mask[part].sum(), "global_batch_size": len(part)}
    config = SimpleNamespace(cliprange_value=0.2, loss_agg_mode="token-mean", loss_scale_factor=None)
    new_values = values_of(critic, head, [rows[i] for i in part.tolist()], length)
    losses.value_loss(config, {"values": new_values}, Told(told, dp_size=1))[0].backward()
    of_head = {f"head.{name}": g for name, g in gradients_of(head).items()}
    assert_same(of_critic[:1], [gradients_of(critic) | of_head])
