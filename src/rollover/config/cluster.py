"""[cluster], and the rules about it: what a run does about processes and machines that are lost."""

from rollover.config.table import Rule, Table, option


class ClusterConfig(Table):
    """[cluster]: what a run does about processes that are lost (docs/cluster.md)."""

    max_restarts: int = option(
        3,
        "Where the trainer's backend is lost, the run goes on from its newest checkpoint and journal, with the same"
        " engines and reward workers; so often without a step in between, then it ends, and --resume goes on. 0 ="
        " the first loss ends it.",
        ge=0,
    )


RULES: tuple[Rule, ...] = ()
