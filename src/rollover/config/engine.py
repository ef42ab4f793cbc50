from pydantic import Field

from rollover.config.base import Table


class EngineConfig(Table):
    """[engine]: the embedded generation engine."""

    max_running: int = Field(
        default=64, ge=1, description="Sequences decoded in one batch; more wait inside the engine."
    )
    kv_memory_gb: float = Field(
        default=2.0, gt=0, description="Bound on the KV cache, in GB (1e9 bytes). Short of it, rollouts are preempted."
    )
    prefill_chunk_tokens: int = Field(default=2048, ge=1, description="Prompt tokens computed in one forward pass.")
