"""Makes a tiny random model of every family below and writes how Rollover runs it into docs/models.md.

    .venv/bin/python experiments/models_table.py     about a minute on two CPU cores

Which families there are is this list; how each is run is what the code says of it. The table is between two markers in
docs/models.md; the text around it is written by hand. Importing this file loads no torch.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

DOC = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: experiments/models_table.py -->", "<!-- end of table -->"
HEADER = ("family (`model_type`)", "how it is run")
FAST, MODULES = "fast path", "transformers' modules"

VOCABULARY = 102
_SMALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=None, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
_OLD = dict(num_key_value_heads=None, head_dim=None)  # families whose configuration has no such key
_EXPERTS = dict(
    num_experts=4, n_routed_experts=4, num_local_experts=4, num_experts_per_tok=2, n_shared_experts=1,
    moe_intermediate_size=32, shared_expert_intermediate_size=32, n_group=1, topk_group=1,
)  # fmt: skip
_LATENT = dict(
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    head_dim=8,
) | _EXPERTS  # fmt: skip
_WINDOW = dict(num_hidden_layers=4, sliding_window=8)

# What each family's configuration needs beyond _SMALL; None takes a key away.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "internlm3": {},
    "afmoe": _EXPERTS,
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": _WINDOW,
    "cohere2_moe": _EXPERTS,
    "doge": {},
    "dots1": _EXPERTS,
    "ernie4_5": {},
    "ernie4_5_moe": _EXPERTS,
    "exaone4": _WINDOW,
    "exaone_moe": _EXPERTS,
    "flex_olmo": _EXPERTS,
    "gemma": {},
    "gemma2": _WINDOW | {"query_pre_attn_scalar": 16},
    "gemma3_text": _WINDOW | {"query_pre_attn_scalar": 16},
    "gemma3n_text": dict(
        num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8, altup_num_inputs=2, laurel_rank=4, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    "glm": {},
    "glm4": {},
    "glm4_moe": _EXPERTS,
    "gpt2": _OLD,
    "gpt_bigcode": _OLD,
    "gpt_neox": _OLD,
    "granite": {},
    "granitemoe": _EXPERTS,
    "granitemoeshared": _EXPERTS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": _EXPERTS | {"moe_topk": 2},
    "hyperclovax": {},
    "jais2": {},
    "jetmoe": _EXPERTS,
    "minimax_m2": _EXPERTS,
    "ministral": _WINDOW,
    "ministral3": {},
    "mixtral": _EXPERTS,
    "nanochat": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmoe": _EXPERTS,
    "opt": _OLD | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": _OLD,
    "phi": {},
    "phi3": {},
    "phimoe": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "solar_open": _EXPERTS,
    "starcoder2": {},
    "vaultgemma": _WINDOW | {"query_pre_attn_scalar": 16},
    "axk1": _LATENT,
    "deepseek_v2": _LATENT | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "longcat_flash": _LATENT,
    "minicpm3": _LATENT,
    "youtu": _LATENT,
    "gemma4_text": {},
    "gpt_oss": _EXPERTS | {"layer_types": ["full_attention"] * 2},
    "nemotron": {},
    "stablelm": {},
    "llama4_text": _EXPERTS,
    "bamba": {},
    "falcon_h1": {},
    "granitemoehybrid": _EXPERTS,
    "jamba": {},
    "kimi_linear": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {},
    "mamba2": {"head_dim": 16, "num_heads": 8, "n_groups": 1},
    "minimax": _EXPERTS,
    "nemotron_h": {},
    "olmo_hybrid": {},
    "qwen3_5_text": {},
    "qwen3_next": _EXPERTS,
    "recurrent_gemma": {},
    "bloom": {"n_head": 4, "n_layer": 2},
    "codegen": {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8},
    "falcon": _OLD,
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8},
    "xglm": {},
}  # fmt: skip


def build(family: str, *, seed: int = 0, attention: str | None = None) -> Any:
    """A random causal LM of the family in float32, with Rollover's attention or another one of transformers.

    ValueError where transformers cannot give it Rollover's.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollover.models.attention import IMPLEMENTATION, refusal_of_lookup

    values = {key: value for key, value in (_SMALL | FAMILIES[family]).items() if value is not None or "_id" in key}
    config = AutoConfig.for_model(family, **values)
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention or IMPLEMENTATION, dtype=torch.float32
        )
    except KeyError as error:
        raise ValueError(refusal_of_lookup(family, error)) from error
    with torch.no_grad():  # new models are nearly uniform: in sharper ones wrong attention is seen
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in name:
                parameter.mul_(4.0)
            if "correct_output_scale" in name:  # gemma3n's, new ones are 0: what is behind them would be in no output
                parameter.fill_(1.0)
    return model.eval()


def verdict(family: str) -> str:
    """FAST, MODULES, or "refused: ..." with the reason that a user is told."""
    try:
        return verdict_of(build(family))
    except ValueError as error:
        reason = str(error).partition(" is not supported: ")[2].rpartition(". Use a decoder")[0]
        assert reason, f"{family} is refused in other words: {error}"
        return f"refused: {reason}"


def verdict_of(model: Any) -> str:
    """FAST or MODULES. ValueError as `check_model`, which is what loading calls."""
    from rollover.models.attention import check_model
    from rollover.models.inference import InferenceDecoder

    check_model(model)
    return FAST if InferenceDecoder.supported(model) else MODULES


def table(verdicts: dict[str, str]) -> str:
    """The text between the markers: families that run first, in the order of FAMILIES."""
    order = sorted(verdicts, key=lambda family: verdicts[family].startswith("refused"))
    rows = [HEADER, ("---", "---"), *((f"`{family}`", verdicts[family]) for family in order)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def read_table(text: str) -> dict[str, str]:
    """Family -> verdict, as the page has them."""
    lines = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {family.strip("`"): how for family, how in cells}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    text = DOC.read_text()
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    verdicts = {}
    for family in FAMILIES:
        verdicts[family] = verdict(family)
        print(f"{family:20} {verdicts[family]}", flush=True)
    DOC.write_text(f"{head}{BEGIN}\n{table(verdicts)}\n{END}{tail}")


if __name__ == "__main__":
    main()
