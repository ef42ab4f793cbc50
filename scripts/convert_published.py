"""Converts the published files of other systems as `rollover convert` does: what resolves, and what is asked about.

    python scripts/convert_published.py CLONES

CLONES holds git clones (bare ones, too) under their names, OWNER/NAME: git clone --bare https://github.com/OWNER/NAME
(of LightRFT also its pull request: git -C opendilab/LightRFT fetch origin pull/29/head). A line for each file:
"resolves", or what is asked about, and whether it resolves when all of that is left out (--train.num_steps 100
--accept '*'), or what is missing then. Exit code 1 where a file cannot be read. Of a page, `#2` is its second block of
YAML.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rollover.plugins.convert.conversion import convert_file, read_options
from rollover.plugins.convert.mapping import convert

VERL = "verl-project/verl@1dda039"
RECIPE = "verl-project/verl-recipe@48ea0a7"
AXOLOTL = "axolotl-ai-cloud/axolotl@067b021"
LIGHTRFT = "opendilab/LightRFT@49e62cb"
FILES = [
    f"{RECIPE}:dapo/run_dapo_qwen2.5_32b.sh",
    f"{RECIPE}:dapo/run_dapo_early_qwen2.5_32b.sh",
    f"{RECIPE}:dapo/run_dapo_wo_ds_qwen2.5_32b.sh",
    f"{RECIPE}:dapo/run_dapo_qwen2.5_32b_rollout_corr.sh",
    f"{RECIPE}:dapo/test_dapo_7b_math.sh",
    f"{RECIPE}:dapo/test_dapo_7b_math_lora.sh",
    f"{VERL}:examples/grpo_trainer/run_qwen3_4b_fsdp.sh",
    f"{VERL}:examples/grpo_trainer/run_qwen3_8b_fsdp.sh",
    f"{VERL}:examples/grpo_trainer/run_qwen3_8b_megatron.sh",
    f"{VERL}:examples/gspo_trainer/run_qwen3_8b_fsdp.sh",
    f"{VERL}:examples/ppo_trainer/run_qwen3_8b_fsdp.sh",
    f"{VERL}:examples/remax_trainer/run_qwen3_8b_fsdp.sh",
    f"{VERL}:examples/rloo_trainer/run_qwen3_8b_fsdp.sh",
    f"{VERL}:examples/rollout_correction/run_qwen2_5_7b_fsdp.sh",
    "volcengine/verl@b178a3c:examples/grpo_trainer/run_qwen2-7b_math.sh",
    "volcengine/verl@b178a3c:examples/ppo_trainer/run_deepseek7b_llm.sh",
    f"{AXOLOTL}:docs/grpo.qmd#1",
    f"{AXOLOTL}:src/axolotl/integrations/nemo_gym/README.md#2",
    f"{AXOLOTL}:src/axolotl/integrations/nemo_gym/examples/nemo_gym_sudoku.yaml",
    f"{AXOLOTL}:src/axolotl/integrations/nemo_gym/examples/nemo_gym_multi_turn.yaml",
    "axolotl-ai-cloud/grpo_code@148ea79:r1_acecode.yaml",
    f"{LIGHTRFT}:examples/gsm8k_geo3k/run_grpo_gsm8k_qwen2.5_0.5b.sh",
    f"{LIGHTRFT}:examples/gsm8k_geo3k/run_ppo_geo3k_qwen2.5_vl_7b.sh",
    "opendilab/LightRFT@6f3c161:examples/gsm8k_geo3k/run_grpo_gsm8k_qwen2.5_0.5b.sh --use_partial",
]
STEPS = [("train.num_steps", "100")]


def content(clones: Path, name: str) -> tuple[str, str]:
    """The text of a file as it is listed, and the ending of its name."""
    at, _, place = name.partition(":")
    repository, _, commit = at.partition("@")
    path, _, flags = place.partition(" ")
    path, _, number = path.partition("#")
    shown = subprocess.run(
        ["git", "-C", str(clones / repository), "show", f"{commit}:{path}"], capture_output=True, text=True, check=True
    ).stdout
    if number:
        return re.findall(r"^```yaml\n(.*?)^```", shown, re.S | re.M)[int(number) - 1], ".yaml"
    if flags:  # the pull request has flags, and no script that sets them
        shown = shown.replace("--text_only", f"--text_only {flags}")
    return shown, Path(path).suffix


def tried(path: Path) -> str:
    """A line about a file. ValueError where it cannot be read."""
    system, options = read_options(path)
    asked = list(convert(system, options).questions)
    try:
        text, _ = convert_file(path, STEPS, ["*"])
    except ValueError as error:
        missing = " ".join(str(error).partition("to change it:")[2].split())
        return f"asks about {', '.join(asked) or 'nothing'}; missing then: {missing or error}"
    left = f"asks about {', '.join(asked)}; resolves without" if asked else "resolves"
    return f"{left} ({len(text.splitlines())} lines)"


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert published files of verl, Axolotl and LightRFT.")
    parser.add_argument("clones", type=Path, help="folder of git clones, OWNER/NAME")
    clones = parser.parse_args().clones
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            try:
                text, suffix = content(clones, name)
                path = Path(folder) / f"file{suffix}"
                path.write_text(text, encoding="utf-8")
                line = tried(path)
            except (ValueError, subprocess.CalledProcessError, IndexError) as error:
                failed, line = failed + 1, f"not read: {error}"
            print(f"{name}: {line}".replace(folder, "."), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
