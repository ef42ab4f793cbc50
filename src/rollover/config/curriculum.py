"""[tasks.curriculum]: how often a task is given, by the pass rates of its earlier visits; and the rules about it."""

from typing import Any

from rollover.config.table import OWN, Inert, Refused, Rule, Table, option

CURRICULA = ("buckets", "variance")
_KIND = "tasks.curriculum.kind"
_BUCKETS = (_KIND, "buckets")
_ANY = (_KIND, *CURRICULA, OWN)


class CurriculumConfig(Table):
    """[tasks.curriculum]: sampling of tasks by the pass rates of earlier visits (docs/tasks.md)."""

    kind: str = option(
        "",
        "buckets: easy and hard tasks are sampled less often. variance: tasks are sampled in proportion to p (1 -"
        " p), where p is the pass rate. Or a custom class (module:Class or path.py:Class), constructed with the"
        " Config. Empty: no curriculum.",
        entry_points="curricula",
    )
    by: str = option(
        "task",
        "Unit of the pass rate: task, source, or a column of the data (extra_info.level for a nested one).",
        only_if=_ANY,
    )
    prior_column: str = option("", "Column with the pass rate (0 to 1) of a task before its first visit.", only_if=_ANY)
    decay: float = option(
        0.0,
        "Weight of the earlier pass rate in the moving average after each visit; 0 = only the last visit counts.",
        ge=0,
        lt=1,
        only_if=(_KIND, "variance", OWN),
    )
    min_weight: float = option(
        0.1,
        "variance: lower bound of the probability of accepting a task; at p = 0.5 the probability is 1.",
        ge=0,
        le=1,
        only_if=(_KIND, "variance"),
    )
    easy_from: float = option(1.0, "buckets: lowest pass rate of an easy task.", gt=0, le=1, only_if=_BUCKETS)
    hard_to: float = option(0.0, "buckets: highest pass rate of a hard task.", ge=0, lt=1, only_if=_BUCKETS)
    easy_weight: float = option(
        0.1,
        "buckets: probability of accepting an easy task; 0 = never again.",
        ge=0,
        le=1,
        only_if=_BUCKETS,
    )
    hard_weight: float = option(
        0.1, "buckets: probability of accepting a hard task; 0 = never again.", ge=0, le=1, only_if=_BUCKETS
    )
    visits_in_row: int = option(
        1, "buckets: consecutive easy (or hard) visits before a task counts as easy (or hard).", ge=1, only_if=_BUCKETS
    )


def _on(config: Any) -> bool:
    return bool(config.tasks.curriculum.kind)


def _groups_are_given(config: Any) -> bool:
    return bool(config.run.train_on_recorded or config.tasks.producer)


def _never_twice(config: Any) -> bool:
    """Whether no task of any source comes a second time."""
    return config.tasks.epochs == 1 or all(s.about.generates for s in config.tasks.sources if s.weight)


def _is_blind(config: Any) -> bool:
    """Whether a built-in curriculum would know no pass rate of any task that comes."""
    curriculum = config.tasks.curriculum
    by_visits = curriculum.by == "task" and not curriculum.prior_column
    return curriculum.kind in CURRICULA and by_visits and bool(config.tasks.sources) and _never_twice(config)


RULES: tuple[Rule, ...] = (
    Inert(
        (_KIND,),
        ("run.train_on_recorded", "tasks.producer"),
        _groups_are_given,
        "with run.train_on_recorded or tasks.producer: no task is chosen there",
    ),
    Refused(
        (_KIND, "tasks.curriculum.by", "tasks.epochs", "tasks.sources"),
        _is_blind,
        lambda c: (
            f'{_KIND} with tasks.curriculum.by = "task", where no task comes twice (generators are endless, and'
            ' tasks.epochs may be 1): set tasks.curriculum.by = "source", with several sources, or to a column of the'
            " data; or tasks.curriculum.prior_column; or let data sets come again (tasks.epochs)"
        ),
    ),
    Refused(
        ("tasks.curriculum.by", "tasks.sources"),
        lambda c: _on(c) and c.tasks.curriculum.by == "source" and sum(bool(s.weight) for s in c.tasks.sources) == 1,
        'tasks.curriculum.by = "source" with one source that is trained: there is nothing to choose. Add another'
        " [[tasks.sources]], one for each difficulty, say",
    ),
    Refused(
        ("tasks.curriculum.by", "tasks.curriculum.prior_column"),
        lambda c: c.tasks.curriculum.by == "source" and bool(c.tasks.curriculum.prior_column),
        'tasks.curriculum.prior_column with tasks.curriculum.by = "source": a source has no columns. Remove it, or'
        ' set by = "task"',
    ),
    Refused(
        ("tasks.curriculum.easy_from", "tasks.curriculum.hard_to"),
        lambda c: c.tasks.curriculum.hard_to >= c.tasks.curriculum.easy_from,
        lambda c: (
            f"tasks.curriculum.hard_to = {c.tasks.curriculum.hard_to:g} is not below tasks.curriculum.easy_from ="
            f" {c.tasks.curriculum.easy_from:g}: a task would be both. Lower it"
        ),
    ),
    Refused(
        ("tasks.curriculum.easy_weight", "tasks.curriculum.hard_weight"),
        lambda c: (
            c.tasks.curriculum.kind == "buckets"
            and c.tasks.curriculum.easy_weight == c.tasks.curriculum.hard_weight == 1
        ),
        lambda c: (
            f'{_KIND} = "buckets" with easy_weight = hard_weight = 1: every task is given alike. Lower one of them'
        ),
    ),
    Refused(
        ("tasks.curriculum.min_weight",),
        lambda c: c.tasks.curriculum.kind == "variance" and c.tasks.curriculum.min_weight == 1,
        lambda c: f'{_KIND} = "variance" with min_weight = 1: every task is given alike. Lower it',
    ),
)
