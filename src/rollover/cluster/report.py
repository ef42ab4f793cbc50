"""Text of a placement: for `rollover train ... --dry-run`, and the nodes of `rollover plan`."""

from __future__ import annotations

from rollover.cluster.plan import Placement, described, many, placement_of
from rollover.config import Config, ConfigError
from rollover.config.cluster import check_can_train


def as_text(config: Config, cores: int) -> str:
    """Describe a run of `config` and the node of each process. `cores`: CPUs of this machine.

    DoesNotFit (a ValueError) if [cluster] has no room for it.
    """
    placement = placement_of(config, cores)
    rollout, train = config.rollout, config.train
    model = config.backend.base_model or config.model.path
    steps = f"{many(train.num_steps, 'step')} of {many(rollout.groups_per_step, 'group')}"
    steps += f" x {rollout.rollouts_per_group} rollouts"
    if config.algorithm.supervised:
        sft = config.sft
        passes = f"sft.epochs = {sft.epochs}, steps" if sft.epochs else many(train.num_steps, "step")
        steps = f"{passes} of {many(sft.batch_examples, 'example')}"
    lines = [
        f"training    {model}: {steps}",
        *node_lines(config, placement),
        "checked     the configuration and the room that its processes need; not the model, the tasks, or what is"
        " installed",
    ]
    try:
        check_can_train(config)
    except ConfigError as error:
        lines.insert(-1, f"refused     without --dry-run: {error}")
    return "\n".join(lines) + "\n"


def node_lines(config: Config, placement: Placement) -> list[str]:
    """Return one line for all nodes, one for each with its roles, and one for each external server."""
    planned = config.cluster.type != "none"
    summary = f"{described(placement.nodes)} (cluster.num_nodes)" if planned else "this machine alone"
    urls = config.engine.urls if config.engine.kind == "remote" else []
    others = {url: "a server that others run (engine.urls)" for url in urls}
    width = max(map(len, [*others, *(node.name for node in placement.nodes)]))
    lines = [f"nodes       {summary}"]
    for node in placement.nodes:
        taken = ""
        if planned:
            counted = [
                (placement.gpus_taken(node.name), node.gpus, "GPU"),
                (placement.cpus_taken(node.name), node.cpus, "CPU"),
            ]
            taken = ", ".join(f"{used} of {many(there, what)}" for used, there, what in counted if used)
        roles = roles_on(config, placement, node.name)
        lines.append(f"  {node.name:<{width}}  {', '.join(roles) or 'nothing'}{taken and f'; {taken}'}")
    return [*lines, *(f"  {url:<{width}}  {what}" for url, what in others.items())]


def summary(placement: Placement) -> str:
    """Describe the placement in one line: number of roles and of nodes for each kind."""
    roles = {"rank": placement.ranks, "server": placement.servers, "reward pool": placement.pools}
    said = [f"{many(len(on), role)} on {len(set(on))}" for role, on in roles.items() if on]
    return f"{described(placement.nodes)} (cluster.num_nodes): {', '.join(['the controller on 1', *said])}"


def roles_on(config: Config, placement: Placement, name: str) -> list[str]:
    """Describe the roles on a node."""
    roles = [_controller(config)] if name == placement.driver else []
    roles += _numbered("rank", [i for i, node in enumerate(placement.ranks) if node == name])
    roles += _numbered(
        f"{config.engine.server} server", [i for i, node in enumerate(placement.servers) if node == name]
    )
    if name in placement.pools:
        (cpus,) = [node.cpus for node in placement.nodes if node.name == name]
        # Unset: room for one worker is required, and the node decides the number.
        some = "up to " if config.cluster.type != "none" and not config.rewards.num_workers else ""
        roles.append(f"reward pool of {some}{many(config.rewards.processes_of(cpus), 'worker')}")
    return roles


def _controller(config: Config) -> str:
    """Describe the controller, with the parts in it or beside it on its node."""
    backend, kind = config.backend.type, config.engine.kind
    if backend == "tinker":
        return "controller (a service trains and samples)"
    inside = []
    if backend != "ranks":
        inside.append("trainer" if backend == "local" else f"trainer ({backend})")
    if kind == "process":
        inside.append("engine in a process of its own")
    elif kind != "remote":
        inside.append("engine" if kind == "embedded" else f"engine ({kind})")
    return f"controller with {' and '.join(inside)}" if inside else "controller"


def _numbered(what: str, numbers: list[int]) -> list[str]:
    """Format `rank 0`, or `ranks 0 to 7`: the numbers on one node are a range."""
    if not numbers:
        return []
    return [f"{what} {numbers[0]}" if len(numbers) == 1 else f"{what}s {numbers[0]} to {numbers[-1]}"]
