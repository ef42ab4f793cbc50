"""[workflow]: episodes of several turns, with tools or in a game, and the rules about it."""

from typing import Any, Literal

from rollover.config.table import Inert, Refused, Rule, Table, is_own, option

TOOL_FORMATS = ("hermes", "json")


class WorkflowConfig(Table):
    """[workflow]: what a policy meets over several turns (docs/agents.md)."""

    environment: str = option(
        "",
        "Your own class (module:Class or path.py:Class), of which every rollout has an object: its public methods are"
        " tools that the policy calls, or it has step(message), a game.",
        unless=("run.train_on_recorded",),
    )
    max_turns: int = option(
        16, "Turns of the policy in an episode; after the last one nothing answers.", ge=1,
        only_if=("workflow.environment",),
    )  # fmt: skip
    tool_timeout_s: float = option(
        10.0,
        "Seconds that one call of the environment may take: a tool, step, reset or get_reward.",
        gt=0,
        only_if=("workflow.environment",),
    )
    max_tool_tokens: int = option(
        512,
        "Tokens of what one call answers; the rest is cut off, which the policy is told.",
        ge=1,
        only_if=("workflow.environment",),
    )
    tool_format: str = option(
        "hermes",
        "How the policy writes a call. hermes: JSON between <tool_call> and </tool_call>. json: JSON alone. Or your own"
        " class (module:Class or path.py:Class) with definitions(schemas) and read(text).",
        only_if=("workflow.environment",),
    )
    timeout_s: float = option(
        300.0,
        "Seconds that the environment of a rollout may work, in sum over its turns. Time in which the rollout waits for"
        " the model, for a slot or for weights does not count.",
        gt=0,
    )
    on_timeout: Literal["missing", "score"] = option(
        "missing",
        "What becomes of a rollout whose environment worked for longer. missing: it has no reward and leaves the loss."
        " score: it gets timeout_score, which is right only where the policy can cause it.",
    )
    timeout_score: float = option(0.0, "Its reward.", ge=-1e30, le=1e30, only_if=("workflow.on_timeout", "score"))


def _nothing_answers(config: Any) -> bool:
    return not config.workflow.environment and config.rollout.environment == "single_turn"


RULES: tuple[Rule, ...] = (
    Inert(
        ("workflow.timeout_s", "workflow.on_timeout"),
        ("workflow.environment", "rollout.environment"),
        _nothing_answers,
        "as nothing answers the policy",
        "Set workflow.environment",
    ),
    Inert(
        ("workflow.environment",),
        ("tasks.producer",),
        lambda c: bool(c.tasks.producer),
        "with tasks.producer: the producer generates by itself",
    ),
    Refused(
        ("workflow.environment",),
        lambda c: bool(c.workflow.environment) and not is_own(c.workflow.environment),
        lambda c: (
            f'workflow.environment = "{c.workflow.environment}" is no class: write module:Class or path.py:Class, as'
            ' in "calculator.py:Calculator"'
        ),
    ),
    Refused(
        ("workflow.environment", "rollout.environment"),
        lambda c: bool(c.workflow.environment) and c.rollout.environment != "single_turn",
        lambda c: (
            f'workflow.environment = "{c.workflow.environment}" and rollout.environment ='
            f' "{c.rollout.environment}": a run has one environment. Remove one of them'
        ),
    ),
    Refused(
        ("workflow.environment", "tasks.chat"),
        lambda c: bool(c.workflow.environment) and not c.tasks.chat,
        lambda c: (
            "workflow.environment with tasks.chat = false: the turns of an episode are chat messages. Set tasks.chat ="
            " true"
        ),
    ),
    Refused(
        ("workflow.tool_format",),
        lambda c: c.workflow.tool_format not in TOOL_FORMATS and not is_own(c.workflow.tool_format),
        lambda c: (
            f'workflow.tool_format = "{c.workflow.tool_format}" is none of {", ".join(TOOL_FORMATS)}, and no class'
            " (module:Class or path.py:Class)"
        ),
    ),
)  # fmt: skip
