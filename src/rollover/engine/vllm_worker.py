"""Code that runs inside a vLLM server started by `rollover serve`, in each of its processes.

    rollover serve ──▶ API server (this file's main) ──▶ EngineCore ──▶ Worker     each ends when its parent does
          └── kills the API server when one of them has ended (engine/server/vllm.py)

vLLM calls `register` through the entry point group `vllm.general_plugins`; in servers started otherwise it does
nothing. Owns the loading of weights from a file into vLLM's model. Only this file imports vllm, and only inside
functions: its top imports neither torch nor vllm.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rollover.processes import die_with
from rollover.weights.verifier import Verifier, shapes_of

BACKEND = "rollover"
PARENT = "ROLLOVER_VLLM_PARENT"  # id of the parent process
_API_SERVER = "vllm.entrypoints.openai.api_server"


# Processes


def main(parent: str, *arguments: str) -> None:
    """Run vLLM's API server with these arguments in this process, which dies with `parent`."""
    os.environ[PARENT] = parent
    bind()
    sys.argv = [_API_SERVER, *arguments]
    runpy.run_module(_API_SERVER, run_name="__main__")


def bind() -> None:
    """End this process when its parent does."""
    if (parent := os.environ[PARENT]) == str(os.getpid()):
        return  # bound already
    os.environ[PARENT] = str(os.getpid())  # for its children
    die_with(int(parent))


# Weights


def register() -> None:
    """Register the plugin. vLLM calls it in each of its processes, possibly more than once."""
    if PARENT not in os.environ:
        return
    bind()
    take_expanded_prompts()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]

    with contextlib.suppress(ValueError):  # it is registered
        WeightTransferEngineFactory.register_engine(BACKEND, file_weights())


def take_expanded_prompts() -> None:
    """Make vLLM accept token ids with expanded image placeholders, as a rollout has them.

    vLLM expands one placeholder per image, by rules of each model family. This first looks for expansions, as vLLM's
    Pixtral does, and expands only if some are missing. Clients compare the prompt that vLLM returns: if this patch has
    no effect, they raise an error for images. Refused on a CPU, whose attention is causal: models in which the tokens
    of an image see each other (Gemma 3).
    """
    from vllm.multimodal.processing import BaseMultiModalProcessor  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    expand = getattr(BaseMultiModalProcessor, "_maybe_apply_prompt_updates", None)
    if expand is None or hasattr(expand, "__wrapped__"):  # a newer vLLM; done already
        return

    @functools.wraps(expand)
    def find_or_expand(self: Any, mm_items: Any, mm_res: Any) -> Any:
        found = self._find_mm_placeholders(mm_res.prompt_ids, mm_res.prompt_updates)
        if all(len(found.get(kind, ())) == num for kind, num in mm_items.get_all_counts().items()):
            if current_platform.is_cpu() and self.info.ctx.model_config.is_mm_prefix_lm:
                raise ValueError(
                    "vLLM for the CPU has causal attention only, and in this model the tokens of an image see each"
                    " other: it takes text alone"
                )
            return mm_res.prompt_ids, found
        return expand(self, mm_items, mm_res)

    BaseMultiModalProcessor._maybe_apply_prompt_updates = find_or_expand


class WorkerExtension:
    """Extension of vLLM's workers (`--worker-extension-cls`), for `/collective_rpc`."""

    weight_transfer_engine: Any

    def rollover_verify(self, path: str, sha256: str) -> str:
        """Start to verify a weights file while the engine generates, or return the status: see Verifier.status."""
        return self.weight_transfer_engine.verifier.status(path, sha256)


Shape = tuple[int, ...]


def unfit(
    parameters: Mapping[str, Shape], given: Mapping[str, Shape], packed: Mapping[str, Iterable[str]]
) -> list[str]:
    """Return the errors of the weights `given` for these parameters of vLLM's model: missing ones, wrong shapes.

    `packed`: modules that vLLM fuses, by the name of the fused one (its qkv_proj is q_proj, k_proj and v_proj,
    stacked). A parameter of shape () is not compared.
    """
    wrong = []
    for name, shape in parameters.items():
        path, _, weight = name.rpartition(".")
        parent, dot, module = path.rpartition(".")
        names = [f"{parent}{dot}{part}.{weight}" for part in packed.get(module, (module,))] if path else [name]
        missing = [name for name in names if name not in given]
        wrong += [f"{name} is not there" for name in missing]
        if shape and not missing:
            rows = sum(given[name][0] for name in names if given[name])
            if (rows, *shape[1:]) != shape or any(given[name][1:] != shape[1:] for name in names):
                wrong.append(f"{' + '.join(names)}: {[given[name] for name in names]} does not make {shape}")
    return wrong


class FileWeights:
    """vLLM's weight backend "rollover": loads a safetensors file, by path and SHA-256.

    A damaged file, or one without the whole model, is refused before the model is touched: vLLM would accept a part of
    a fused module silently, and generate garbage. If the load itself fails, the process ends, since half a model must
    not answer. The base class is vLLM's, see `file_weights`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        backend: Any = self  # with the attributes of the base class
        self.model, self.model_config, self.device = backend.model, backend.model_config, backend.device
        # With tensor parallelism a worker has a part of the model only.
        here = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        self.verifier = Verifier(here * backend.parallel_config.world_size)
        self.touched = False  # the model is being replaced
        self.tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        self.parameters = dict(self.shapes(whole=backend.parallel_config.tensor_parallel_size == 1))

    def init_transfer_engine(self, init_info: Any) -> None:
        """Do nothing: a file needs no connection."""

    def start_weight_update(self) -> None:
        """Do nothing: the model is not touched before the file is verified."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the file of `update_info`. Raises ValueError if it is refused, with the old weights in place."""
        from vllm.model_executor.model_loader import reload  # pyright: ignore[reportMissingImports]

        if not isinstance(update_info, dict) or update_info.keys() != {"path", "sha256"}:
            raise ValueError("refused: update_info is not a path and a sha256")
        try:
            self.check(update_info["path"], update_info["sha256"])
        except ValueError as error:
            raise ValueError(f"refused: {error}") from error
        with self.or_end():
            self.touched = True
            reload.initialize_layerwise_reload(self.model)
            self.model.load_weights(self.tensors(update_info["path"]))

    def receive_weights(self, update_info: Any) -> None:
        """Do nothing: `update_weights` does it."""

    def check(self, path: str, sha256: str) -> None:
        """Raise ValueError unless the file is intact and has the whole model."""
        self.verifier.verify(path, sha256)
        packed: dict[str, Iterable[str]] = {}
        for module in reversed(list(self.model.modules())):  # inner modules have their own, as in vision models
            packed |= getattr(module, "packed_modules_mapping", {})
        if wrong := unfit(self.parameters, self.names(path), packed):
            raise ValueError(f"{path} is not the whole model: {'; '.join(wrong[:3])} ({len(wrong)} in all)")

    def shapes(self, whole: bool) -> Iterator[tuple[str, Shape]]:
        """Yield names and shapes of the parameters before packing; () unless this worker has the `whole` model."""
        from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
            ParallelLMHead,
            VocabParallelEmbedding,
        )
        from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore[reportMissingImports]
            get_layerwise_info,
        )

        for path, module in self.model.named_modules():
            before, _ = get_layerwise_info(module).restore_metadata
            for name, parameter in module.named_parameters(recurse=False):
                shape = tuple(before.get(name, parameter).shape)
                if isinstance(module, VocabParallelEmbedding):
                    shape = (module.org_vocab_size, *shape[1:])  # without padding
                if not (self.tied and isinstance(module, ParallelLMHead)):
                    yield f"{path}.{name}" if path else name, shape if whole else ()

    def names(self, path: str) -> dict[str, Shape]:
        """Return the shapes in the file, by vLLM's names of unfused weights."""
        given = {name: shape for name, (_, shape) in shapes_of(path).items()}
        if (mapper := getattr(self.model, "hf_to_vllm_mapper", None)) is None:
            return given
        renamed = type(mapper)(**{**vars(mapper), "orig_to_new_stacked": {}})
        return {new: shape for name, shape in given.items() if (new := renamed.map_name(name)) is not None}

    def tensors(self, path: str) -> Iterator[tuple[str, Any]]:
        """Yield the weights, sorted by name, so that those of a module are adjacent."""
        from safetensors import safe_open

        with safe_open(path, "pt", device=str(self.device)) as file:
            for name in sorted(file.keys()):
                if not (self.tied and name == "lm_head.weight"):
                    yield name, file.get_tensor(name)

    def finish_weight_update(self) -> None:
        """Finish the reload. No effect if the update was refused."""
        import torch
        from vllm.model_executor.model_loader import reload  # pyright: ignore[reportMissingImports]

        if not self.touched:
            return
        with self.or_end():
            reload.finalize_layerwise_reload(self.model, self.model_config)
            if self.tied:
                self.tie_head()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
        self.touched = False

    def tie_head(self) -> None:
        """Prepare the output layer again from its tied embedding: a packed copy would stay old."""
        from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        modules = list(self.model.modules())
        embeddings = [m for m in modules if type(m) is VocabParallelEmbedding]
        for head in (m for m in modules if isinstance(m, ParallelLMHead)):
            head.weight = embeddings[0].weight
            head.quant_method.process_weights_after_loading(head)

    @contextlib.contextmanager
    def or_end(self) -> Iterator[None]:
        """End the process if the block raises."""
        try:
            yield
        except BaseException:
            traceback.print_exc()
            print("rollover: the weights were not loaded, the old ones are gone: this server ends", file=sys.stderr)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""


@functools.cache
def file_weights() -> type:
    """Return FileWeights as a subclass of vLLM's weight transfer engine."""
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    infos = {"init_info_cls": WeightTransferInitInfo, "update_info_cls": WeightTransferUpdateInfo}
    return type("FileWeights", (FileWeights, WeightTransferEngine), infos)


if __name__ == "__main__":
    main(*sys.argv[1:])
elif __name__ == "__mp_main__":  # a process that the API server spawned, at its start
    bind()
