"""[eval] and [[eval.settings]], and the rules about them."""

import re
from collections.abc import Iterator
from typing import Any

from rollover.config.rewards import shaping_terms
from rollover.config.table import Inert, Refused, Rule, Table, option, wrong

_POWERS = (1, 2, 4, 8, 16, 32, 64)
_MOST_VOTES = 16  # of which subsets are counted exactly (track/statistics.py)
_NAME = re.compile(r"[\w.+-]+")
_PART = re.compile(r"(sources|data_sources|roles)/.+/")


class EvalSettingConfig(Table):
    """[[eval.settings]]: further sampling settings for the held-out tasks."""

    name: str = option("", "Name in eval.jsonl (settings.NAME), answers and eval.metric.")
    samples_per_task: int = option(1, "As eval.samples_per_task.", ge=1)
    temperature: float = option(1.0, "As eval.temperature.", ge=0)
    top_p: float = option(1.0, "As eval.top_p.", gt=0, le=1)
    max_new_tokens: int = option(0, "As eval.max_new_tokens; 0 = its value.", ge=0)

    @property
    def pass_ks(self) -> list[int]:
        """The k of pass@k: powers of two below samples_per_task, and that."""
        return [k for k in _POWERS if k < self.samples_per_task] + [self.samples_per_task]

    @property
    def majority_ks(self) -> list[int]:
        """The k of maj@k: one sample, and two, whose tie is broken by lot, are pass@1."""
        return [k for k in self.pass_ks if k > 2 and (k <= _MOST_VOTES or k == self.samples_per_task)]


class EvalConfig(Table):
    """[eval]: evaluation on held-out tasks, before, during and after training."""

    only_if = ("eval.num_tasks",)

    num_tasks: int = option(0, "Number of held-out tasks; 0 = no evaluation.", ge=0)
    samples_per_task: int = option(
        1,
        "Rollouts per held-out task; pass@k up to this k.",
        ge=1,
        only_if=("eval.temperature",),
    )
    every_steps: int = option(0, "Steps between evaluations; 0 = only before (at_start) and after training.", ge=0)
    at_start: bool = option(True, "Evaluate before the first step.")
    temperature: float = option(1.0, "Sampling temperature of evaluation; 0 = greedy.", ge=0)
    top_p: float = option(
        1.0,
        "Nucleus sampling of evaluation; 1 = off.",
        gt=0,
        le=1,
        only_if=("eval.temperature",),
    )
    max_new_tokens: int = option(0, "Limit of an answer's tokens; 0 = rollout.max_new_tokens.", ge=0)
    settings: list[EvalSettingConfig] = option([], "Further sampling settings, evaluated on the same held-out tasks.")
    majority: bool = option(False, "Also compute maj@k, majority voting over k answers, parsed by tasks.answer_rule.")
    pass_threshold: float = option(1.0, "Lowest score of a passing rollout.")
    shaped: bool = option(
        False,
        "Add the shaping terms of [rewards] (overlong, repetition, shaping = true) to evaluation scores, as verl's"
        " DAPO manager does. pass@k and maj@k still use the task's score.",
    )
    metric: str = option(
        "mean",
        "Metric that selects the best evaluation: a value of eval.jsonl (mean, pass@4, maj@8), or its path there"
        " (settings/greedy/mean, sources/math500/pass@1).",
    )
    patience: int = option(
        0,
        "End training after this many consecutive evaluations without an improvement; 0 = off.",
        ge=0,
        only_if=("eval.every_steps",),
    )
    min_improvement: float = option(
        0.0,
        "Minimum increase over the best evaluation that counts as an improvement for eval.patience.",
        ge=0,
        only_if=("eval.patience",),
    )
    seed: int = option(1_000_003, "Seed of the selection and sampling of held-out tasks.")

    @property
    def every_setting(self) -> list[EvalSettingConfig]:
        """The setting of [eval] itself, whose name is "", and the further ones."""
        names = ("samples_per_task", "temperature", "top_p", "max_new_tokens")
        main = EvalSettingConfig.model_construct(name="", **{name: getattr(self, name) for name in names})
        return [main, *self.settings]

    def tokens_of(self, setting: EvalSettingConfig, most: int) -> int:
        """How many tokens an answer of this setting may have. `most`: rollout.max_new_tokens."""
        return setting.max_new_tokens or self.max_new_tokens or most


def _wrong_settings(config: Any) -> Iterator[str]:
    """Return the error of the first invalid row of [[eval.settings]]; "" if all are valid."""
    names: set[str] = set()
    for i, setting in enumerate(config.eval.settings):
        key = f"eval.settings.{i}"
        if not _NAME.fullmatch(setting.name):
            yield (
                f"{key}.name = {setting.name!r}: expected a name of letters, digits and . _ + -, under which its"
                " figures are written"
            )
        if setting.name in names:
            yield f"{key}.name = {setting.name!r}: another of the settings has this name. Give it another one"
        names.add(setting.name)
        if setting.temperature == 0 and (setting.samples_per_task > 1 or setting.top_p < 1):
            what = "samples_per_task" if setting.samples_per_task > 1 else "top_p"
            yield (f"{key}.{what} has no effect with {key}.temperature = 0: greedy answers are alike. Remove either")
        if setting.max_new_tokens and config.workflow.agent:
            yield (
                f"{key}.max_new_tokens has no effect with {config.workflow.agent}, whose agents rollout.max_new_tokens"
                " limits. Remove it"
            )


def _wrong_metric(config: Any) -> str:
    """Why no row of eval.jsonl has eval.metric; "" if one may. What sources there are is known later."""
    cfg, metric = config.eval, config.eval.metric
    by_name = {f"settings/{setting.name}/": setting for setting in cfg.settings}
    start = next((start for start in by_name if metric.startswith(start)), "")
    if metric.startswith("settings/") and not start:
        names = ", ".join(setting.name for setting in cfg.settings) or "none"
        return f"no setting of [[eval.settings]] has this name (there is {names})"
    setting = by_name[start] if start else cfg.every_setting[0]
    figure = _PART.sub("", metric.removeprefix(start))
    figures = ["mean", *(f"pass@{k}" for k in setting.pass_ks)]
    figures += [f"maj@{k}" for k in setting.majority_ks] if cfg.majority else []
    if figure in figures:
        return ""
    why = "; maj@k needs eval.majority" if figure.startswith("maj@") and not cfg.majority else ""
    return f"the figures are {', '.join(start + name for name in figures)}{why}"


RULES: tuple[Rule, ...] = (
    Inert(
        ("eval.max_new_tokens",),
        ("workflow.function", "workflow.command", "workflow.verifiers"),
        lambda c: bool(c.workflow.agent),
        lambda c: f"with {c.workflow.agent}, whose agents rollout.max_new_tokens limits",
    ),
    Inert(
        ("eval.metric",),
        ("checkpoint.keep_best", "checkpoint.save_best_model", "eval.patience"),
        lambda c: not (c.checkpoint.keep_best or c.checkpoint.save_best_model or c.eval.patience),
        "without checkpoint.keep_best, checkpoint.save_best_model or eval.patience: nothing looks at it",
        "Set checkpoint.keep_best = true",
    ),
    Inert(
        ("eval.shaped",),
        ("rewards.overlong_buffer_tokens", "rewards.repetition_penalty", "rewards.functions"),
        lambda c: not shaping_terms(c),
        "as no shaping term is set",
        "Set rewards.overlong_buffer_tokens",
    ),
    Inert(
        ("eval.majority",),
        ("eval.samples_per_task", "eval.settings"),
        lambda c: all(not setting.majority_ks for setting in c.eval.every_setting),
        "as no setting has 3 samples or more for each task",
        "Set eval.samples_per_task",
    ),
    wrong(("eval.settings",), lambda c: next(_wrong_settings(c), "")),
    Refused(
        ("eval.metric", "eval.settings", "eval.samples_per_task"),
        lambda c: c.eval.num_tasks > 0 and bool(_wrong_metric(c)),
        lambda c: f"eval.metric = {c.eval.metric!r}: {_wrong_metric(c)}. Change it",
    ),
    Refused(
        ("checkpoint.save_best_model", "backend.type"),
        lambda c: c.checkpoint.save_best_model and c.backend.type == "tinker",
        'checkpoint.save_best_model with backend.type = "tinker": the service has the weights, and keeps those of'
        " a checkpoint. Set checkpoint.keep_best = true in its place",
    ),
)
