from pydantic import Field

from rollover.config.base import Table

ENGINES = ("embedded", "process")  # of rollover.engine.build, which config may not import; a test compares them


class EngineConfig(Table):
    """[engine]: what generates."""

    kind: str = Field(
        default="embedded",
        description="embedded: in the trainer's process. process: the same in a process of its own, beside the trainer"
        " (for rollout.overlap). Or your own function (module:function or path.py:function), which makes an engine.",
    )
    max_running: int = Field(
        default=64, ge=1, description="Sequences decoded in one batch; more wait inside the engine."
    )
    kv_memory_gb: float = Field(
        default=2.0, gt=0, description="Bound on the KV cache, in GB (1e9 bytes). Short of it, rollouts are preempted."
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads while the trainer trains, with rollout.overlap; 0 = half of them all, at least 1."
        " The trainer then has the rest; while it waits, the engine has all.",
    )
    prefill_chunk_tokens: int = Field(default=2048, ge=1, description="Prompt tokens computed in one forward pass.")
    device: str = Field(
        default="",
        description='Where it generates: "auto", "cpu", "cuda", "cuda:1" or "mps"; empty = model.device.',
    )
