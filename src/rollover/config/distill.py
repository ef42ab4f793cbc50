"""[distill]: a teacher scores the tokens that the policy sampled; and the rules about it (docs/distillation.md)."""

from typing import Any, Literal

from rollover.config.table import Inert, Refused, Rule, Table, option


class DistillConfig(Table):
    """[distill]: on-policy distillation from a teacher, which gives every sampled token an advantage."""

    only_if = ("distill.teacher",)

    teacher: str = option(
        "",
        "initial: the initial weights of the run. policy: the policy itself, updated every refresh_steps. Or another"
        " model (as model.path), with the policy's vocabulary. Empty = off.",
    )
    privileged: str = option(
        "",
        "Custom function (module:function or path.py:function) from a task and its messages to the messages that the"
        " teacher reads instead, for example with the answer. With tasks.chat = false: from and to a text.",
        entry_points="privileged",
    )
    coef: float = option(1.0, "Weight of the teacher's advantages.", gt=0)
    discount: float = option(
        0.0,
        "Discount of the log(teacher/policy) of later tokens in a token's advantage, per loss token; 0 = the token"
        " alone.",
        ge=0,
        le=1,
    )
    clip: float = option(10.0, "Bound of a token's absolute log(teacher/policy); 0 = none.", ge=0)
    refresh_steps: int = option(
        0,
        "Steps between updates of the teacher from the policy; 0 or 1 = always the current policy.",
        ge=0,
        only_if=("distill.teacher", "policy"),
    )
    mix: Literal["replace", "add"] = option(
        "replace",
        "replace: use the teacher's advantages alone; no reward is needed. add: add them to those of"
        " algorithm.advantage.",
    )

    roles: list[str] = option([], "Roles that the teacher trains; others are trained by rewards alone. Empty: all.")

    def teaches(self, role: str) -> bool:
        """Whether the tokens of this role get advantages of a teacher."""
        return bool(self.teacher) and (not self.roles or role in self.roles)

    def replaces_for(self, role: str) -> bool:
        """Whether rewards have no part in the training of this role."""
        return self.mix == "replace" and self.teaches(role)

    @property
    def replaces(self) -> bool:
        """Whether rewards have no part in the training of any role."""
        return bool(self.teacher) and self.mix == "replace" and not self.roles

    @property
    def is_current(self) -> bool:
        """Whether the teacher has the weights of the policy as they are."""
        return self.teacher == "policy" and self.refresh_steps <= 1

    @property
    def keeps_weights(self) -> bool:
        """Whether the teacher has earlier weights of the policy, updated every `refresh_steps`."""
        return self.teacher == "policy" and self.refresh_steps > 1

    @property
    def model_path(self) -> str:
        """The model that the teacher is, as model.path names one; "" if it is the policy of some version."""
        return "" if self.teacher in ("initial", "policy") else self.teacher


def _teaches_nothing(config: Any) -> str:
    """Why the teacher's log-probs can never differ from the policy's; "" if they can."""
    distill = config.distill
    if distill.privileged:
        return ""
    if distill.is_current:
        return "it reads what the policy reads, with the same weights"
    if distill.teacher == "initial" and distill.replaces:
        return "it is the model that the run begins with, and there are no rewards to depart from it for"
    if distill.keeps_weights and distill.replaces:
        return "it is the model that the run begins with, and stays so, as nothing else moves the policy"
    return ""


def _unknown_roles(config: Any) -> list[str]:
    """Those of distill.roles that [workflow.roles] does not train, where it names any."""
    roles = config.workflow.roles
    return [name for name in config.distill.roles if roles and not (name in roles and roles[name].trained)]


def _without_effect(config: Any) -> list[tuple[str, str]]:
    """(option of a role that has no effect, why)."""
    found: list[tuple[str, str]] = []
    for name, role in config.workflow.roles.items():
        why = "" if role.trained else "as the role is not trained"
        if config.distill.replaces_for(name):
            why = 'with distill.mix = "replace": its advantages are the teacher\'s, whose weight is distill.coef'
        set_to = {"advantage": role.advantage != "", "weight": role.weight != 1}
        found += [(f"workflow.roles.{name}.{key}", why) for key, is_set in set_to.items() if is_set and why]
    return found


RULES: tuple[Rule, ...] = (
    Refused(
        ("workflow.roles", "distill.mix", "distill.roles"),
        lambda c: bool(_without_effect(c)),
        lambda c: "\n".join(f"{key} has no effect {why}. Remove {key}" for key, why in _without_effect(c)),
    ),
    Refused(
        ("distill.roles", "workflow.roles"),
        lambda c: bool(_unknown_roles(c)),
        lambda c: (
            f'distill.roles names "{_unknown_roles(c)[0]}", which [workflow.roles] does not train: it trains'
            f" {', '.join(name for name, role in c.workflow.roles.items() if role.trained)}"
        ),
    ),
    Inert(
        (
            "algorithm.advantage",
            "algorithm.advantage_std",
            "algorithm.passk",
            "algorithm.reward_weights",
            "algorithm.after_scoring",
            "rewards.min_valid",
            "rewards.repetition_penalty",
            "rewards.overlong_buffer_tokens",
            "rewards.running_norm",
            "rewards.clip_range",
            "rollout.greedy_baseline",
            "filters.mask_in_baseline",
            "workflow.credit",
        ),
        ("distill.teacher", "distill.mix", "distill.roles"),
        lambda c: c.distill.replaces,
        'with distill.mix = "replace": the advantages are the teacher\'s, and rewards are only reported',
        'Set distill.mix = "add"',
    ),
    Inert(
        ("filters.zero_variance", "filters.pass_rate_above", "filters.pass_rate_below"),
        ("distill.teacher",),
        lambda c: bool(c.distill.teacher),
        "with distill.teacher: a group of equal scores has the teacher's signal, and is not dropped for them",
    ),
    Refused(
        ("distill.teacher", "distill.privileged", "distill.refresh_steps", "distill.mix", "distill.roles"),
        lambda c: bool(c.distill.teacher) and bool(_teaches_nothing(c)),
        lambda c: (
            f'distill.teacher = "{c.distill.teacher}" teaches nothing: {_teaches_nothing(c)}. Set distill.privileged,'
            " or name another model as the teacher"
        ),
    ),
    Refused(
        ("distill.teacher", "distill.mix", "algorithm.advantage"),
        lambda c: bool(c.distill.teacher) and c.distill.mix == "replace" and c.algorithm.needs_critic,
        'algorithm.advantage = "gae" with distill.mix = "replace": a critic would learn from rewards that have no'
        ' part in the training. Set distill.mix = "add", or another algorithm.advantage',
    ),
    Refused(
        ("distill.teacher", "algorithm.loss"),
        lambda c: bool(c.distill.teacher) and c.algorithm.loss_traits.by_row,
        lambda c: (
            f'algorithm.loss = "{c.algorithm.loss}" with distill.teacher: it has one advantage for all tokens of a'
            ' rollout, and a teacher gives one for each. Set algorithm.loss = "clip"'
        ),
    ),
    Refused(
        ("distill.teacher", "replay.size"),
        lambda c: bool(c.distill.teacher) and c.replay.size > 0,
        "replay.size with distill.teacher: the teacher has a signal for every group, so that none is replaced."
        " Remove replay.size",
    ),
)
