"""[workflow]: episodes of several turns, with tools or in a game, and the rules about it."""

import json
import shlex
import warnings
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from rollover.config.table import MOST_GB, Inert, Refused, Rule, Table, memory_rules, option, value_of, wrong
from rollover.config.traits import estimator
from rollover.registry import why_unknown

TOOL_FORMATS = ("hermes", "json")


def _words(value: Any) -> Any:
    """Split a text into words as a shell does; no shell runs."""
    return shlex.split(value) if isinstance(value, str) else value


class RoleConfig(Table):
    """[workflow.roles.NAME]: training of the trajectories of one role."""

    trained: bool = option(True, "Train the trajectories of this role; otherwise they leave the loss.")
    advantage: str = option(
        "", "Advantage estimator of this role; empty = algorithm.advantage.", entry_points="advantages"
    )
    weight: float = option(1.0, "Factor of the advantages of this role.", gt=0)


PER_STEP = "per_step"
PER_STEP_IS = (
    'workflow.credit = "per_step" (rLLM) is deprecated and means "broadcast", as in rLLM\'s unified trainer. To compare'
    " the k-th turns of siblings, set workflow.group_by to a custom function (docs/credit.md); for turn returns,"
    ' set workflow.credit = "turn_returns"'
)


def _without_per_step(value: Any) -> Any:
    if value != PER_STEP:
        return value
    warnings.warn(PER_STEP_IS, DeprecationWarning, stacklevel=2)
    return "broadcast"


class WorkflowConfig(Table):
    """[workflow]: environments and agents with several turns (docs/agents.md)."""

    environment: str = option(
        "",
        "Custom class (module:Class or path.py:Class), instantiated per rollout. Its public methods are tools that"
        " the policy calls; or it has step(message), as a game.",
        entry_points="tool_environments",
    )
    function: str = option(
        "",
        "Custom async function (module:function or path.py:function), called once per rollout of a group. It calls"
        " the policy any number of times and returns a reward. Parameters by name: task, episode, client, base_url,"
        " api_key, model. A plain def needs workflow.num_processes.",
        entry_points="workflows",
    )
    command: Annotated[list[str], BeforeValidator(_words)] = option(
        [],
        "Program and arguments, started once per rollout of a group. It reaches the policy through OPENAI_BASE_URL,"
        " OPENAI_API_KEY and OPENAI_MODEL, reads its task as JSON from standard input, and prints '{\"reward\": 1.0}'"
        ' or \'{"answer": "42"}\' as its last line. A single string is split into words, without a shell.',
    )
    num_processes: int = option(
        0,
        "Worker processes for a workflow.function that is a plain def, or programs of workflow.command that run at"
        " once (0 = 64).",
        ge=0,
    )
    memory_gb: float = option(
        0.0, "Memory limit of each worker, or of each process of the program (Linux). 0 = no limit.", ge=0, le=MOST_GB
    )
    env: list[str] = option(
        ["*", "!ROLLOVER_SERVER_TOKEN"],
        "Environment variables that workers and programs receive: names, with * as a wildcard; a leading ! excludes.",
    )
    verifiers: str = option(
        "",
        "Id of a taskset of the package verifiers (0.4), installed or importable. It provides the tasks, the"
        " environment of every rollout, and the rewards.",
    )
    verifiers_args: dict[str, Any] = option(
        {},
        "Entries of the table [env] in a verifiers configuration: id, taskset, seats such as agent.harness,"
        " max_concurrent_agents.",
        only_if=("workflow.verifiers",),
    )
    verifiers_eval: dict[str, Any] = option(
        {},
        "Parameters of the taskset that differ for held-out tasks, such as split. Empty: hold out a share of its"
        " tasks (tasks.eval_fraction).",
        only_if=("workflow.verifiers",),
    )
    retries: int = option(
        1,
        "Maximum number of retries of a failed agent per episode, or of a failed environment call per rollout. After"
        " that, the reward is missing.",
        ge=0,
    )
    resume: Literal["auto", "stateless", "snapshot", "restart"] = option(
        "auto",
        "Handling of unfinished episodes after a restart of the process. stateless: run the agent again and answer"
        " repeated calls from what was sampled; an environment object replays the turns. snapshot: restore the"
        " object from snapshot(). restart: begin again, and drop what was sampled (counted as restarted). auto: as"
        " the class declares, else stateless.",
    )
    port: int = option(
        0,
        "Port of the policy's HTTP endpoint on this machine (for the parameters client, base_url and api_key, for"
        " programs and for verifiers); 0 = a free port.",
        ge=0,
        le=65535,
    )
    max_turns: int = option(16, "Maximum number of turns of the policy in an episode.", ge=1)
    max_tokens: int = option(
        0,
        "Limit of sampled tokens in an episode, over all its rollouts; 0 = no limit beyond those of the rollouts.",
        ge=0,
    )
    tool_timeout_s: float = option(
        10.0,
        "Time limit in seconds of one environment call: a tool, step, reset, get_reward, snapshot or restore.",
        gt=0,
        only_if=("workflow.environment",),
    )
    max_tool_tokens: int = option(
        512,
        "Limit of the tokens of one tool result. Longer results are truncated, with a note to the policy.",
        ge=1,
        only_if=("workflow.environment",),
    )
    tool_format: str = option(
        "hermes",
        "Format of tool calls. hermes: JSON between <tool_call> and </tool_call>. json: JSON alone. Or a custom"
        " class (module:Class or path.py:Class) with definitions(schemas) and read(text).",
        only_if=("workflow.environment",),
        entry_points="tool_formats",
    )
    timeout_s: float = option(
        300.0,
        "Time limit in seconds of a rollout's environment, summed over its turns. Waits for the model, a slot or"
        " weights do not count. inf = no limit.",
        gt=0,
        unlimited=True,
    )
    on_timeout: Literal["missing", "score"] = option(
        "missing",
        "Handling of rollouts whose environment exceeds timeout_s. missing: no reward; the rollout leaves the loss."
        " score: reward timeout_score, for timeouts that the policy can cause.",
    )
    timeout_score: float = option(
        0.0,
        "Reward of rollouts whose environment exceeds timeout_s.",
        ge=-1e30,
        le=1e30,
        only_if=("workflow.on_timeout", "score"),
    )
    credit: Annotated[Literal["broadcast", "turn_returns"], BeforeValidator(_without_per_step)] = option(
        "broadcast",
        "Unit of comparison. broadcast: trajectories, by their scores; all tokens of a trajectory get its advantage."
        " turn_returns: turns, by their discounted returns.",
    )
    turn_gamma: float = option(1.0, "Discount per turn.", ge=0, le=1, only_if=("workflow.credit", "turn_returns"))
    own_advantages: Literal["refuse", "auto"] = option(
        "refuse",
        "Handling of advantages that come with trajectories although the estimator is not precomputed. refuse: end"
        " the run. auto: use them if all turns of a group's scored trajectories have one; otherwise the estimator"
        " computes all of them, with a warning and the counter precomputed/partial_groups.",
    )
    group_by: str = option(
        "",
        "Custom function (module:function or path.py:function) from a group's episodes to a list of"
        " TrajectoryGroups, each with its own baseline. Empty: one per role.",
        entry_points="groupings",
    )
    roles: dict[str, RoleConfig] = option(
        {},
        "Roles by name: trained (true), advantage (algorithm.advantage), weight (1). Empty: all roles are trained;"
        " otherwise list every role.",
    )

    @property
    def agent(self) -> str:
        """The option that names the agent of whole episodes; "" without an agent."""
        return next((f"workflow.{name}" for name in ("function", "command", "verifiers") if getattr(self, name)), "")

    def advantage_of(self, role: str, default: str) -> str:
        """Return the estimator of a role, where `default` is algorithm.advantage."""
        return (role in self.roles and self.roles[role].advantage) or default

    @property
    def untrained(self) -> frozenset[str]:
        """The roles that leave the loss."""
        return frozenset(name for name, role in self.roles.items() if not role.trained)

    def advantages(self, default: str) -> tuple[str, ...]:
        """Return the estimators that the roles have, where `default` is algorithm.advantage."""
        named = [role.advantage or default for role in self.roles.values() if role.trained]
        return tuple(dict.fromkeys(named or [default]))


def _nothing_answers(config: Any) -> bool:
    """Whether no rollout has more than one turn."""
    workflow = config.workflow
    return config.rollout.environment == "single_turn" and not (workflow.environment or workflow.agent)


def _unknown(config: Any) -> str:
    """Return which roles have an unknown estimator, a line each; "" if none."""
    named = {name: role.advantage for name, role in config.workflow.roles.items() if role.advantage}
    lines = {name: (of, why_unknown("advantages", of)) for name, of in named.items()}
    return "\n".join(f'workflow.roles.{name}.advantage = "{of}" {why}' for name, (of, why) in lines.items() if why)


def _impossible(config: Any) -> list[str]:
    """Return the roles that no trajectory can have: without an agent, all trajectories have the role policy."""
    named = config.workflow.agent or config.tasks.producer or config.run.train_on_recorded
    return [] if named else sorted(config.workflow.roles.keys() - {"policy"})


def _advantages(config: Any) -> tuple[str, ...]:
    return config.workflow.advantages(config.algorithm.advantage)


def _other(config: Any) -> set[str]:
    """Roles with an estimator other than algorithm.advantage."""
    roles = config.workflow.roles.items()
    return {name for name, role in roles if role.advantage not in ("", config.algorithm.advantage)}


def _over_tokens(name: str) -> bool:
    return estimator(name).over_tokens


def _players(config: Any) -> list[str]:
    """Return "key = value" of every option that names an environment or an agent."""
    named = {key: value_of(config, key) for key in (*_AGENTS, "workflow.environment", "rollout.environment")}
    return [f"{key} = {json.dumps(value)}" for key, value in named.items() if value and value != "single_turn"]


def _other_sources(config: Any) -> bool:
    """Whether tasks are wanted that are not those of the taskset of workflow.verifiers."""
    return bool(config.workflow.verifiers) and any(s.kind != "verifiers" for s in config.tasks.sources)


_AGENTS = ("workflow.function", "workflow.command", "workflow.verifiers")
_OR = " and ".join(_AGENTS)
_ONE = "Set one of them"
_OF_AGENTS = 'Set it to "stateless" (episode.once keeps what is decided or done once) or "restart"'
_TURNS = ("workflow.credit",)
_BY_TURNS = 'workflow.credit = "turn_returns"'

RULES: tuple[Rule, ...] = (
    wrong(("workflow.roles",), _unknown),
    Refused(
        ("workflow.roles",),
        lambda c: bool(_impossible(c)),
        lambda c: (
            f"workflow.roles.{_impossible(c)[0]}: no trajectory can have this role, as agents alone name roles: without"
            " one all trajectories have the role policy. Set workflow.function, or remove"
            f" [workflow.roles.{_impossible(c)[0]}]"
        ),
    ),
    Refused(
        ("workflow.roles",),
        lambda c: bool(c.workflow.roles) and not any(role.trained for role in c.workflow.roles.values()),
        "workflow.roles: no role is trained. Set trained = true for one",
    ),
    Refused(
        ("workflow.roles", "algorithm.advantage"),
        lambda c: (
            bool(_other(c)) and any(map(_over_tokens, (*_advantages(c), c.algorithm.advantage)))
        ),
        lambda c: (
            f'workflow.roles.{min(_other(c))}.advantage beside algorithm.advantage = "{c.algorithm.advantage}":'
            " advantages over tokens cannot be mixed with others. Give all roles one estimator"
        ),
    ),
    Refused(
        ("workflow.roles", "rollout.greedy_baseline"),
        lambda c: (
            any(estimator(name).greedy for name in _advantages(c))
            and bool(_other(c)) and not c.rollout.greedy_baseline
        ),
        'workflow.roles with advantage = "remax" without rollout.greedy_baseline: there is no greedy rollout to'
        " compare with. Set rollout.greedy_baseline = true",
    ),
    Inert(
        ("workflow.own_advantages",),
        ("algorithm.advantage", "workflow.roles"),
        lambda c: set(_advantages(c)) == {"precomputed"},
        'with algorithm.advantage = "precomputed": every trajectory has to bring its advantages',
    ),
    Refused(
        ("workflow.own_advantages", "algorithm.advantage", "workflow.roles"),
        lambda c: c.workflow.own_advantages == "auto" and any(map(_over_tokens, _advantages(c))),
        'workflow.own_advantages = "auto" with an estimator over tokens: its samples hold rewards until the step,'
        " and cannot hold advantages beside them. Use another algorithm.advantage, such as grpo",
    ),
    Refused(
        ("algorithm.after_scoring", "algorithm.advantage", "workflow.roles", "workflow.own_advantages"),
        lambda c: (
            bool(c.algorithm.after_scoring)
            and ("precomputed" in _advantages(c) or c.workflow.own_advantages == "auto")
        ),
        "algorithm.after_scoring changes one advantage a rollout, and precomputed ones may be one a token. Remove"
        " it",
    ),
    *(
        Refused(
            (*_TURNS, key),
            lambda c, when=when: c.workflow.credit == "turn_returns" and when(c),
            lambda _, key=key, why=why: f"{_BY_TURNS} with {key}: {why}",
        )
        for key, when, why in (
            (
                "algorithm.after_scoring",
                lambda c: bool(c.algorithm.after_scoring),
                "it changes one advantage a rollout, and there is one a turn. Remove it",
            ),
            (
                "algorithm.reward_weights",
                lambda c: bool(c.algorithm.reward_weights),
                "a turn has one reward (Reward.turns). Remove it",
            ),
            (
                "algorithm.advantage",
                lambda c: any(estimator(name).greedy or _over_tokens(name) for name in _advantages(c)),
                "remax compares whole rollouts, and gae and others over tokens begin with their rewards. Use another",
            ),
        )
    ),
    Inert(
        ("workflow.timeout_s", "workflow.on_timeout", "workflow.retries"),
        ("workflow.environment", "rollout.environment"),
        _nothing_answers,
        "as nothing answers the policy",
        f"Set workflow.environment, {_OR}",
    ),
    Inert(
        ("workflow.max_turns", "workflow.resume"),
        ("workflow.environment", *_AGENTS),
        lambda c: not (c.workflow.environment or c.workflow.agent),
        f"without workflow.environment, {_OR}",
        _ONE,
    ),
    Refused(
        ("workflow.resume", *_AGENTS),
        lambda c: bool(c.workflow.agent) and c.workflow.resume == "snapshot",
        lambda c: f'workflow.resume = "snapshot" with {c.workflow.agent}: an agent has no state to keep. {_OF_AGENTS}',
    ),
    Inert(
        ("workflow.port", "workflow.max_tokens"), _AGENTS, lambda c: not c.workflow.agent, f"without {_OR}", _ONE
    ),
    Inert(
        ("workflow.num_processes",),
        ("workflow.function", "workflow.command"),
        lambda c: not (c.workflow.function or c.workflow.command),
        "without workflow.function and workflow.command",
        _ONE,
    ),
    Inert(
        ("workflow.memory_gb", "workflow.env"),
        ("workflow.command", "workflow.num_processes"),
        lambda c: not (c.workflow.command or c.workflow.num_processes),
        "without workflow.num_processes and workflow.command",
        _ONE,
    ),
    *memory_rules("workflow.memory_gb"),
    Inert(
        (*_AGENTS, "workflow.environment"),
        ("tasks.producer",),
        lambda c: bool(c.tasks.producer),
        "with tasks.producer: the producer generates by itself",
    ),
    Refused(
        (*_AGENTS, "workflow.environment", "rollout.environment"),
        lambda c: len(_players(c)) > 1,
        lambda c: f"{' with '.join(_players(c))}: a run has one of them. Remove one",
    ),
    Inert(
        ("tasks.sources",),
        ("workflow.verifiers",),
        _other_sources,
        "with workflow.verifiers: the tasks are those of its taskset",
    ),
    Inert(
        ("tasks.system_prompt", "tasks.instruction", "tasks.chat", "rewards.function", "rewards.eval_function"),
        ("workflow.verifiers",),
        lambda c: bool(c.workflow.verifiers),
        "with workflow.verifiers: its taskset has the messages and the rewards",
    ),
    Refused(
        ("tasks.sources", "workflow.verifiers"),
        lambda c: any(s.kind == "verifiers" and s.name != c.workflow.verifiers for s in c.tasks.sources),
        'tasks.sources.kind = "verifiers" is what workflow.verifiers makes by itself: set workflow.verifiers, and'
        " remove the source",
    ),
    Refused(
        ("workflow.environment", "tasks.chat"),
        lambda c: bool(c.workflow.environment) and not c.tasks.chat,
        "workflow.environment with tasks.chat = false: the turns of an episode are chat messages. Set tasks.chat ="
        " true",
    ),
)  # fmt: skip
