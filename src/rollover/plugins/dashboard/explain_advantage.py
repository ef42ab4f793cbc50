"""Explanation of a rollout's advantage, from its score to its tokens in the loss, in sentences.

    score + terms ──▶ trained reward ──▶ comparison with siblings ──▶ the estimator's rule ──▶ the loss: excluded
    tokens, importance weights, bounds

Uses the records (docs/running.md) and the run's configuration. It computes only advantages that depend on one group, to
show the calculation. The formulas are those of algorithms/advantage.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollover.config.traits import estimator
from rollover.track.records import TRAINED
from rollover.track.token_stats import by_token
from rollover.types import DropReason

_EPS = 1e-4  # of every division by a standard deviation
_DIVIDED = {
    "none": "",
    "sample": ", divided by their standard deviation",
    "population": ", divided by their standard deviation",
    "batch": ", divided by the standard deviation of the whole step",
}


@dataclass(frozen=True)
class _Compared:
    """`rewards`: trained rewards of the compared trajectories, None if missing; `own`: this one's; `greedy`: of the
    greedy baseline."""

    rewards: Sequence[float | None]
    own: float | None
    greedy: float | None

    @property
    def valid(self) -> list[float]:
        return [reward for reward in self.rewards if reward is not None]


def explain_advantage(
    record: Mapping[str, Any], group: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[dict[str, str]]:
    """Return sentences {"about", "text"}, in order, about a record. `group`: all records of its group, without tokens.
    `config`: the run's configuration, {} if unknown."""
    sentences = [("score", _score(record, config))]
    credit = record.get("credit")
    if _is_greedy(record):
        return _sentences([*sentences, *_of_greedy(record, config)])
    if record["outcome"] == f"dropped:{DropReason.ABANDONED.value}":
        text = "Its agent gave up a call of it, so none of its tokens is trained, though its group was."
        return _sentences([*sentences, ("outcome", text)])
    if record["outcome"] != TRAINED:
        reason = record["outcome"].partition(":")[2]
        text = f"Its group was dropped ({reason}) before a step trained it: no advantage was made."
        return _sentences([*sentences, ("outcome", text)])
    if credit is None:
        return _sentences([*sentences, ("outcome", _in_no_batch(record))])
    sentences += _reward(record, credit, config)
    name = _estimator(record["role"], config)
    if credit["compared"] is not None:
        compared = _compared(record, group)
        sentences += _siblings(compared, name, config.get("algorithm", {}))
        sentences += _rule(record, compared, name, config)
    if credit["left_out"]:
        sentences.append(("left out", f"None of its tokens is in the loss: {credit['left_out']}."))
    sentences += _in_the_loss(record, config)
    return _sentences(sentences)


def _sentences(sentences: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"about": about, "text": text} for about, text in sentences if text]


def _score(record: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    if record["score"] is None:
        return f"It has no score: {record['error'] or 'it was not scored'}."
    parts = [f"{name} {_n(value)}" for name, value in (record["extras"] or {}).items()]
    of, function = _n(record["score"]), record["reward"] or "of the run"
    text = f"The reward function {function} gave it {of}"
    if _plays(config):
        text = f"It was scored {of} by its agent or environment, or where these score nothing by the reward function"
        text = f"{text} {function}"
    return text + (f" ({', '.join(parts)})." if parts else ".")


def _plays(config: Mapping[str, Any]) -> bool:
    """Return whether an agent or an environment may give scores."""
    workflow = config.get("workflow", {})
    others = any(workflow.get(name) for name in ("environment", "function", "command", "verifiers"))
    return others or config.get("rollout", {}).get("environment", "single_turn") != "single_turn"


def _in_no_batch(record: Mapping[str, Any]) -> str:
    if "credit" not in record:
        return "It was recorded by an earlier version, which did not write down what its advantage was made of."
    return (
        "It was in no batch: its group had no signal, as all its advantages were 0, and a group that was kept for"
        " replay was trained in its place."
    )


def _of_greedy(record: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    credit = record.get("credit")
    shaped = [] if credit is None else _reward(record, credit, config)
    text = "It is the greedy answer that the others are compared with: it is never trained itself."
    return [*shaped, ("outcome", text)]


def _reward(record: Mapping[str, Any], credit: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    sentences: list[tuple[str, str]] = []
    rewards = config.get("rewards", {})
    if credit["reward"] is None:
        counts = record["score"] is not None and credit["compared"] is not None  # otherwise its role is not trained
        return [("reward", "Its reward counts as missing.")] if counts else []
    terms = {name: value for name, value in (credit["terms"] or {}).items() if value}
    steps = [f"{name} adds {_n(value)}" for name, value in terms.items()]
    if (norm := rewards.get("running_norm", "none")) != "none":
        less = "the running mean is taken off, and " if norm == "whiten" else ""
        steps.append(f"{less}it is divided by the running deviation")
    if bounds := rewards.get("clip_range"):
        steps.append(f"it is bounded to [{_n(bounds[0])}, {_n(bounds[1])}]")
    if steps or not _same(credit["reward"], record["score"]):
        how = "; ".join(steps) or "it is that of its whole trajectory"
        sentences.append(("shaping", f"Then {how}: the reward that is trained is {_n(credit['reward'])}."))
    if credit["kl_penalty"] is not None:
        sentences.append(("KL", f"The KL to the reference policy takes {_n(credit['kl_penalty'])} off it."))
    return sentences


def _compared(record: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> _Compared:
    # By trajectory: its contexts share one reward.
    number, rewards = record["credit"]["compared"], dict[tuple[int, int], float | None]()
    baselines = [_greedy_reward(of) for of in group if _is_greedy(of) and of["role"] == record["role"]]
    for of in group:
        credit = of.get("credit")
        if credit is not None and credit["compared"] == number:
            rewards[of["sibling"], of["trajectory"]] = _trained_reward(credit)
    return _Compared(list(rewards.values()), _trained_reward(record["credit"]), baselines[0] if baselines else None)


def _trained_reward(credit: Mapping[str, Any]) -> float | None:
    return None if credit["reward"] is None else credit["reward"] - (credit["kl_penalty"] or 0.0)


def _greedy_reward(record: Mapping[str, Any]) -> float | None:
    # Records of earlier versions have no credit: then the score.
    return (record.get("credit") or {"reward": record["score"]})["reward"]


def _siblings(compared: _Compared, name: str, algorithm: Mapping[str, Any]) -> list[tuple[str, str]]:
    valid, weights = compared.valid, algorithm.get("reward_weights", {})
    if estimator(name).greedy:
        of = "has no reward" if compared.greedy is None else f"has {_n(compared.greedy)}"
        return [("siblings", f"The greedy answer to its task {of}.")]
    if len(valid) < 2:
        return [("siblings", f"{len(valid)} of the {len(compared.rewards)} compared have a reward.")]
    shown = ", ".join("none" if reward is None else _n(reward) for reward in compared.rewards)
    text = (
        f"Compared with its siblings, the rewards are {shown}: mean {_n(statistics.fmean(valid))}, standard deviation"
        f" {_n(statistics.stdev(valid))}."
    )
    if "weights_R" in estimator(name).reads and weights.keys() - {"score"}:
        counted = ", ".join(f"{of} by {weight}" for of, weight in weights.items())
        text = f"{text.replace('the rewards are', 'the scores are')} What counts is {counted}."
    return [("siblings", text)]


def _rule(
    record: Mapping[str, Any], compared: _Compared, name: str, config: Mapping[str, Any]
) -> list[tuple[str, str]]:
    workflow, algorithm = config.get("workflow", {}), config.get("algorithm", {})
    sentences: list[tuple[str, str]] = []
    std = algorithm.get("passk_std", "none") if name == "grpo_passk" else algorithm.get("advantage_std", "sample")
    rule = estimator(name).about.replace("{divided}", _DIVIDED.get(std, ""))
    distill = config.get("distill", {})
    if distill.get("teacher") and record["role"] in (distill.get("roles") or [record["role"]]):
        taught = "By token: log teacher/policy, times distill.coef"
        if distill.get("mix") == "replace":
            return [("rule", f"{taught}. Rewards are only reported.")]
        sentences.append(("teacher", f"{taught}, is added to what follows."))
    by_turns = workflow.get("credit") == "turn_returns"
    found = None if by_turns else calculation(name, compared.valid, compared.own, compared.greedy, algorithm)
    text = f"{name}: {rule}"
    if by_turns:
        text += ", over the returns of all turns (workflow.credit = turn_returns)"
    sentences.append(("rule", f"{text}{'' if found is None else f': {found[0]}'}."))
    if workflow.get("own_advantages") == "auto":
        sentences.append(("own", "A group whose trajectories all bring advantages of their own has those instead."))
    weight = workflow.get("roles", {}).get(record["role"], {}).get("weight", 1.0)
    if weight != 1.0:
        sentences.append(("role", f"Its role {record['role']} has the weight {_n(weight)}."))
    if own := algorithm.get("after_scoring"):
        sentences.append(("after_scoring", f"Then {own} may have changed it."))
    advantage = record["advantage"]
    if advantage is not None:
        taught = any(about == "teacher" for about, _ in sentences)
        by_token_only = by_turns or name == "precomputed"
        of_tokens = set(_numbers(by_token(record) or {}, "advantages"))
        one = not taught and (len(of_tokens) == 1 or not (of_tokens or by_token_only))
        how = _sign(advantage) if one else f" {'by its reward' if taught else 'in the mean of its tokens'}."
        sentences.append(("advantage", f"Its advantage is {_n(advantage)}{how}"))
    return sentences


def _sign(advantage: float) -> str:
    if advantage == 0:
        return ": its reward asks for neither more of it nor less."
    return f": its reward asks for {'more' if advantage > 0 else 'less'} of it."


def calculation(
    name: str, rewards: Sequence[float], own: float | None, greedy: float | None, algorithm: Mapping[str, Any]
) -> tuple[str, float] | None:
    """Return the calculation as text, and its result, for estimators over a single group; None for others.

    `rewards`: trained rewards of the compared ones; `own`: of this rollout, None if missing."""
    if own is None:
        return None
    if estimator(name).greedy:
        return None if greedy is None else (f"{_n(own)} - {_n(greedy)} = {_n(own - greedy)}", own - greedy)
    if len(rewards) < 2:
        return "it has nothing to be compared with, so it is 0", 0.0
    mean, low, rounding = statistics.fmean(rewards), min(rewards), 1e-6 * (max(rewards) - min(rewards))
    above = [reward - low for reward in rewards]  # so that equal rewards give exactly 0
    centred, difference = f"{_n(own)} - {_n(mean)}", _beyond(own - low - statistics.fmean(above), rounding)
    std = algorithm.get("advantage_std", "sample")
    if name == "dr_grpo" or (name == "grpo" and std == "none"):
        return f"{centred} = {_n(difference)}", difference
    if name == "grpo" and std in ("sample", "population"):
        deviation = statistics.stdev(rewards) if std == "sample" else statistics.pstdev(rewards)
        value = difference / (deviation + _EPS)
        return f"({centred}) / ({_n(deviation)} + {_EPS}) = {_n(value)}", value
    if name == "rloo":
        others = (math.fsum(above) - (own - low)) / (len(rewards) - 1)
        difference = _beyond(own - low - others, rounding)
        return f"{_n(own)} - {_n(low + others)} = {_n(difference)}", difference
    if name == "max_rl":
        least = min(low, 0.0)
        scale = mean - least
        value = difference / scale if scale else 0.0
        return f"({centred}) / {_n(scale)} = {_n(value)}", value
    return None


def _in_the_loss(record: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    algorithm, tokens = config.get("algorithm", {}), by_token(record)
    if tokens is None:
        return []
    num, of = sum(tokens["mask"]), record["num_tokens"]
    sentences = [("tokens", f"{num} of its {of} tokens came to the loss.")]
    if num < of:
        sentences[0] = ("tokens", f"{sentences[0][1][:-1]}; the others are an environment's, or too old for it.")
    advantages = _numbers(tokens, "advantages")
    if advantages and min(advantages) < max(advantages):
        sentences.append(("by token", f"Their advantages are {_n(min(advantages))} to {_n(max(advantages))}."))
    if rejected := sum(tokens["rejected"]):
        bounds = " and ".join(f"{name} within {bound}" for name, bound in algorithm.get("rejection", {}).items())
        sentences.append(("rejection", f"{rejected} of these were rejected (algorithm.rejection: {bounds})."))
    if ratios := _numbers(tokens, "importance_weights"):
        text = (
            f"Importance weights (now / as sampled) are {_n(min(ratios))} to {_n(max(ratios))}, in the mean"
            f" {_n(statistics.fmean(ratios))}."
        )
        sentences.append(("importance", text))
    weights = zip(tokens.get("loss_weights", ()), tokens["rejected"], strict=False)
    kept = [weight for weight, rejects in weights if weight is not None and not rejects]
    if kept:
        nothing = sum(weight == 0 for weight in kept)
        correction = algorithm.get("correction", "none")
        text = f"In the loss their advantages are multiplied by {_n(min(kept))} to {_n(max(kept))}"
        sentences.append(("weight", f"{text} (algorithm.loss = {algorithm.get('loss')}, correction = {correction})."))
        if nothing:
            sentences.append(("clipped", f"{nothing} of them have no gradient: a clip or a mask of the loss took it."))
    elif not rejected and not ratios:
        sentences.append(("not computed", _not_computed(any(advantages), config)))
    return sentences


def _not_computed(has_signal: bool, config: Mapping[str, Any]) -> str:
    if not has_signal:
        return "No pass was made over it, as all its advantages are 0 (train.skip_zero_advantage)."
    if config.get("train", {}).get("max_kl"):
        return "It changed no weight: the KL to the step's start passed train.max_kl before its minibatch was trained."
    return "The backend did not report per-token values of the loss."


def _numbers(tokens: Mapping[str, Sequence[Any]], name: str) -> list[float]:
    return [value for value in tokens.get(name, ()) if value is not None]


def _estimator(role: str, config: Mapping[str, Any]) -> str:
    roles, default = config.get("workflow", {}).get("roles", {}), config.get("algorithm", {}).get("advantage", "grpo")
    return roles.get(role, {}).get("advantage") or default


def _is_greedy(record: Mapping[str, Any]) -> bool:
    # A baseline of an earlier version has the outcome of its group, and no credit.
    if record["outcome"] != TRAINED:
        return record["outcome"] == f"dropped:{DropReason.BASELINE.value}"
    sampled = [of for of in record["segments"] if of["trainable"]]
    return record.get("credit") is None and any(of["sampling"]["temperature"] == 0 for of in sampled)


def _beyond(difference: float, rounding: float) -> float:
    return 0.0 if abs(difference) <= rounding else difference


def _same(a: float, b: float | None) -> bool:
    return b is not None and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def _n(value: float) -> str:
    return f"{value:.4g}"
