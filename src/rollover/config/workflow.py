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
    """A text as the words of a shell; no shell ever sees it."""
    return shlex.split(value) if isinstance(value, str) else value


class RoleConfig(Table):
    """[workflow.roles.NAME]: how the trajectories of one role are trained."""

    trained: bool = option(True, "Whether they are; if not, they leave the loss.")
    advantage: str = option(
        "", "Their advantage estimator, as of algorithm.advantage; empty: that one.", entry_points="advantages"
    )
    weight: float = option(1.0, "What their advantages are multiplied by.", gt=0)


PER_STEP = "per_step"
PER_STEP_IS = (
    'workflow.credit = "per_step" (rLLM) is deprecated and means "broadcast", as in rLLM\'s unified trainer. To compare'
    " the k-th turns of siblings, set workflow.group_by to a function of your own (docs/credit.md); for turn returns,"
    ' set workflow.credit = "turn_returns"'
)


def _without_per_step(value: Any) -> Any:
    if value != PER_STEP:
        return value
    warnings.warn(PER_STEP_IS, DeprecationWarning, stacklevel=2)
    return "broadcast"


class WorkflowConfig(Table):
    """[workflow]: what a policy meets over several turns (docs/agents.md)."""

    environment: str = option(
        "",
        "Your own class (module:Class or path.py:Class), of which every rollout has an object: its public methods are"
        " tools that the policy calls, or it has step(message), a game.",
        entry_points="tool_environments",
    )
    function: str = option(
        "",
        "Your own async function (module:function or path.py:function), of which every rollout of a group is a run: it"
        " asks the policy as often as it wants to and returns a reward. Its parameters are found by their names: task,"
        " episode, client, base_url, api_key, model. A plain def needs workflow.num_processes.",
        entry_points="workflows",
    )
    command: Annotated[list[str], BeforeValidator(_words)] = option(
        [],
        "A program and its arguments, of which every rollout of a group is a run: it finds the policy by"
        " OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, reads its task as JSON from its input, and its last line is"
        ' \'{"reward": 1.0}\' or \'{"answer": "42"}\'. A single text is split into words; no shell reads it.',
    )
    num_processes: int = option(
        0,
        "Worker processes for a workflow.function that is a plain def; or how many programs of workflow.command run at"
        " a time (0 = 64).",
        ge=0,
    )
    memory_gb: float = option(
        0.0, "Memory of such a worker, or of each process of such a program (Linux). 0 = no limit.", ge=0, le=MOST_GB
    )
    env: list[str] = option(
        ["*", "!ROLLOVER_SERVER_TOKEN"],
        "Environment variables that such a worker or program sees: their names, * for any part; ! before one hides it.",
    )
    verifiers: str = option(
        "",
        "Id of a taskset of the package verifiers (0.4), which is installed or can be imported: its tasks are those of"
        " the run, its environment plays every rollout of a group, and its rewards score them.",
    )
    verifiers_args: dict[str, Any] = option(
        {},
        "What the configurations of verifiers have in their table [env]: id, taskset, seats such as agent.harness,"
        " max_concurrent_agents.",
        only_if=("workflow.verifiers",),
    )
    verifiers_eval: dict[str, Any] = option(
        {},
        "What the taskset has otherwise for held-out tasks, such as split, beside workflow.verifiers_args.taskset."
        " Empty: a share of its tasks is held out (tasks.eval_fraction).",
        only_if=("workflow.verifiers",),
    )
    retries: int = option(
        1,
        "So often an agent that failed is run again for the same episode, or an environment that raised is asked again"
        " for the same rollout; then the reward is missing.",
        ge=0,
    )
    resume: Literal["auto", "stateless", "snapshot", "restart"] = option(
        "auto",
        "What becomes of an unfinished episode whose agent, or object of workflow.environment, ended with the process."
        " stateless: the agent is run again, and what it asks again is answered from what was sampled; another object"
        " plays the turns again. snapshot: another object gets what snapshot() of the class returned. restart: it"
        " begins again, and what was sampled is dropped (restarted). auto: what the class says or has, else stateless.",
    )
    port: int = option(
        0,
        "Where this machine, and no other, can ask the policy over HTTP (parameters client, base_url and api_key of"
        " a function; programs; verifiers); 0 = a free port.",
        ge=0,
        le=65535,
    )
    max_turns: int = option(16, "Turns of the policy in an episode; after the last one nothing answers.", ge=1)
    max_tokens: int = option(
        0, "Tokens that the policy may sample in an episode, over all its rollouts; 0 = no limit but theirs.", ge=0
    )
    tool_timeout_s: float = option(
        10.0,
        "Seconds that one call of the environment may take: a tool, step, reset, get_reward, snapshot or restore.",
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
        entry_points="tool_formats",
    )
    timeout_s: float = option(
        300.0,
        "Seconds that the environment of a rollout may work, in sum over its turns. Time in which the rollout waits for"
        " the model, for a slot or for weights does not count. inf = no limit.",
        gt=0,
        unlimited=True,
    )
    on_timeout: Literal["missing", "score"] = option(
        "missing",
        "What becomes of a rollout whose environment worked for longer. missing: it has no reward and leaves the loss."
        " score: it gets timeout_score, which is right only where the policy can cause it.",
    )
    timeout_score: float = option(0.0, "Its reward.", ge=-1e30, le=1e30, only_if=("workflow.on_timeout", "score"))
    credit: Annotated[Literal["broadcast", "turn_returns"], BeforeValidator(_without_per_step)] = option(
        "broadcast",
        "What is compared. broadcast: trajectories, by their scores; all tokens of one get its advantage. turn_returns:"
        " turns, by the discounted sum of the rewards from there on.",
    )
    turn_gamma: float = option(1.0, "Discount of a turn.", ge=0, le=1, only_if=("workflow.credit", "turn_returns"))
    own_advantages: Literal["refuse", "auto"] = option(
        "refuse",
        "Advantages that come with trajectories whose estimator is not precomputed. refuse: the run ends. auto: a group"
        " that is compared takes them if all turns of its scored trajectories bring one; if only some do, a warning is"
        " printed, precomputed/partial_groups counts the group, and the estimator gives all of its advantages.",
    )
    group_by: str = option(
        "",
        "Your own function (module:function or path.py:function) of a group's episodes to the list of TrajectoryGroups,"
        " each of which has a baseline. Empty: those of one role.",
        entry_points="groupings",
    )
    roles: dict[str, RoleConfig] = option(
        {},
        "By the name of a role: trained (true), advantage (algorithm.advantage), weight (1). Empty: every role is"
        " trained; else all are named.",
    )

    @property
    def agent(self) -> str:
        """The option that names who plays whole episodes; "" if nobody does."""
        return next((f"workflow.{name}" for name in ("function", "command", "verifiers") if getattr(self, name)), "")

    def advantage_of(self, role: str, default: str) -> str:
        """The estimator of a role, where `default` is algorithm.advantage."""
        return (role in self.roles and self.roles[role].advantage) or default

    @property
    def untrained(self) -> frozenset[str]:
        """The roles that leave the loss."""
        return frozenset(name for name, role in self.roles.items() if not role.trained)

    def advantages(self, default: str) -> tuple[str, ...]:
        """The estimators that the roles have, where `default` is algorithm.advantage."""
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
    """The roles that no trajectory can have: where nobody names roles all of them are those of the policy."""
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
