"""[cluster], and the rules about it: which machines there are, and what a run does about what is lost."""

from typing import Any

from rollover.config.table import OWN, ConfigError, Refused, Rule, Table, option
from rollover.registry import PLUGINS

# The function of a `ClusterSetup` that makes each, loaded when it is called.
CLUSTERS = {"none": "rollover.cluster.protocol:this_machine", "ray": PLUGINS["clusters"]["ray"]}
_RAY = ("cluster.type", "ray")
_NODES = (*_RAY, OWN)
_SPLITS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")


class ClusterConfig(Table):
    """[cluster]: placement of a run's processes on machines, and restarts after failures (docs/cluster.md)."""

    type: str = option(
        "none",
        "none: all processes run on this machine. ray: Ray places servers, ranks and reward pools on nodes"
        " (`rollover train ... --dry-run` prints where). Or a custom function (module:function or path.py:function)"
        " that makes a cluster.",
        entry_points="clusters",
    )
    address: str = option(
        "",
        "Address (host:port) of the head of a Ray cluster; empty = a local Ray cluster that the run starts and stops.",
        only_if=_RAY,
    )
    num_nodes: int = option(1, "Number of nodes, including the one that runs the command.", ge=1, only_if=_NODES)
    gpus_per_node: int = option(0, "GPUs per node; 0 = CPUs only.", ge=0, only_if=_NODES)
    cpus_per_node: int = option(0, "CPU cores per node; 0 = as many as this machine has.", ge=0, only_if=_NODES)
    gpus_per_server: int = option(
        1,
        "GPUs per server (vLLM's --tensor-parallel-size), all on one node.",
        ge=1,
        only_if=[_NODES, ("engine.server", "vllm")],
    )
    colocate: bool = option(
        False,
        "Servers and trainer share GPUs: when a step has its groups, rollouts in flight are interrupted and the"
        " servers sleep (releasing GPU memory) until the step is trained; a weight sync wakes them.",
        only_if=("engine.num_servers",),
    )
    cpus_per_process: int = option(
        0,
        "CPU cores reserved per server or rank without a GPU; 0 = none reserved.",
        ge=0,
        only_if=_NODES,
    )
    reward_nodes: int = option(
        1, "Nodes that score rollouts, each with rewards.num_workers processes.", ge=1, only_if=_NODES
    )
    max_restarts: int = option(
        3,
        "Maximum number of consecutive failures of the trainer's backend without a step in between. The run restarts"
        " from its newest checkpoint and journal with the same engines and reward workers; beyond the limit it ends"
        " and can be resumed. 0 = end at the first failure.",
        ge=0,
    )


def num_ranks(config: Any) -> int:
    """Return the number of ranks; 0 where the controller trains by itself, or a service does."""
    return config.backend.num_ranks if config.backend.type == "ranks" else 0


def planned_devices(config: Any) -> dict[str, tuple[int, str]]:
    """Return the devices that `rollover plan` derives: plan.engines or plan.trainers -> (number, source key).

    Other keys keep their default: one engine, whose device trains, too.
    """
    engine, found = config.engine, {}
    if engine.kind == "remote":
        which = "engine.num_servers" if engine.num_servers else "engine.urls"
        found["plan.engines"] = max(1, engine.num_servers + len(engine.urls)), which
        if config.cluster.colocate:  # which train, too
            return found
    if ranks := num_ranks(config):
        found["plan.trainers"] = ranks, "backend.num_ranks"
    elif engine.kind == "remote" and engine.urls:
        found["plan.trainers"] = 1, "engine.urls"
    elif engine.kind == "remote" and config.cluster.type != "none":
        found["plan.trainers"] = 1, "cluster.type"
    elif engine.device not in ("", config.model.device):
        found["plan.trainers"] = 1, "engine.device"
    return found


def check_can_train(config: Any) -> None:
    """ConfigError for what is planned only."""
    cluster = config.cluster
    if cluster.type != "ray":
        return
    if cluster.num_nodes > 1 and not cluster.address:
        raise ConfigError(
            f"cluster.num_nodes = {cluster.num_nodes} without cluster.address: the Ray that a run starts has this"
            " machine alone. Start one by `ray start --head`, `ray start --address ...` on the other nodes, and set"
            " cluster.address to the head's host:port"
        )


def check_is_here(config: Any) -> None:
    """ConfigError for what has no training: it runs on this machine."""
    if config.cluster.type != "none":
        raise ConfigError(
            f'cluster.type = "{config.cluster.type}" is for training: add --cluster.type none, and what else of'
            " [cluster] is set, to evaluate and sample on this machine"
        )


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`. ValueError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def _is_no_address(address: str) -> bool:
    try:
        host_and_port(address)
    except ValueError:
        return bool(address)
    return False


RULES: tuple[Rule, ...] = (
    Refused(
        ("cluster.address",),
        lambda c: _is_no_address(c.cluster.address),
        lambda c: (
            f"cluster.address = {c.cluster.address!r} is not host:port of a cluster's head, as in 10.0.0.1:6379 (what"
            " `ray start --head` says). Set it to that, or remove it: a Ray of this machine is started then"
        ),
    ),
    Refused(
        ("cluster.type", "engine.vllm_args"),
        lambda c: c.cluster.type != "none" and any(arg.partition("=")[0] in _SPLITS for arg in c.engine.vllm_args),
        lambda c: (
            f'engine.vllm_args with {" or ".join(_SPLITS)}, and cluster.type = "{c.cluster.type}": a server gets as'
            " many GPUs as cluster.gpus_per_server says. Set that, and remove the argument"
        ),
    ),
    Refused(
        ("cluster.colocate", "rollout.overlap"),
        lambda c: c.cluster.colocate and c.rollout.overlap,
        "cluster.colocate with rollout.overlap: servers sleep while the trainer trains. Remove one of the two; with"
        ' rollout.interrupt = "when_enough" unfinished rollouts are continued after the step',
    ),
    Refused(
        ("cluster.colocate", "train.streaming_min_groups"),
        lambda c: c.cluster.colocate and c.train.streaming_min_groups > 0,
        "cluster.colocate with train.streaming_min_groups, which trains while servers generate. Remove one",
    ),
    Refused(
        ("cluster.colocate", "engine.urls"),
        lambda c: c.cluster.colocate and bool(c.engine.urls),
        "cluster.colocate with engine.urls: those servers were started by others, on GPUs of their own. Remove"
        " engine.urls, and set engine.num_servers",
    ),
    Refused(
        ("cluster.num_nodes", "engine.num_servers", "engine.weights_dir"),
        lambda c: c.cluster.num_nodes > 1 and c.engine.num_servers > 0 and not c.engine.weights_dir,
        lambda c: (
            f"cluster.num_nodes = {c.cluster.num_nodes} without engine.weights_dir: new weights reach servers through"
            " a folder. Set it to one that all nodes see under the same path"
        ),
    ),
)
