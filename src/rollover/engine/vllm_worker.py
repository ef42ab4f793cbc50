"""What runs inside a vLLM server that `rollover serve` started, in each of its processes.

    rollover serve ──▶ API server (this file's main) ──▶ EngineCore ──▶ Worker     each ends when its parent does
          └── kills the API server when one of them has ended (engine/server/vllm.py)

vLLM calls `register` through the entry point group `vllm.general_plugins`; in a server that somebody else started it
does nothing. Owns how new weights get from a file into vLLM's model. This file alone imports vllm, and only where it
runs in vLLM's interpreter: neither torch nor vllm at its top.
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
from rollover.weights.verified import Verifier, shapes_of

BACKEND = "rollover"
PARENT = "ROLLOVER_VLLM_PARENT"  # process id of whoever started this process
_API_SERVER = "vllm.entrypoints.openai.api_server"


# Processes


def main(parent: str, *arguments: str) -> None:
    """vLLM's API server with these arguments, in this process. It dies with `parent`."""
    os.environ[PARENT] = parent
    bind()
    sys.argv = [_API_SERVER, *arguments]
    runpy.run_module(_API_SERVER, run_name="__main__")


def bind() -> None:
    """End this process when its parent does."""
    if (parent := os.environ[PARENT]) == str(os.getpid()):
        return  # it is
    os.environ[PARENT] = str(os.getpid())  # for its children
    die_with(int(parent))


# Weights


def register() -> None:
    """vLLM's plugin. Called in each of its processes, and maybe more than once."""
    if PARENT not in os.environ:
        return
    bind()
    take_expanded_prompts()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]

    with contextlib.suppress(ValueError):  # it is registered
        WeightTransferEngineFactory.register_engine(BACKEND, file_weights())


def take_expanded_prompts() -> None:
    """Let vLLM take token ids in which the placeholders of images are expanded already, as they are in a rollout.

    vLLM expands one placeholder an image, by rules of each model family. This looks for the expansions first, as
    vLLM's Pixtral does, and expands only where they are not all there. Clients compare the prompt that vLLM returns:
    where this has no effect, images are an error of theirs, and texts are served. Refused: on a CPU, whose attention
    is causal, models in which the tokens of an image see each other (Gemma 3).
    """
    from vllm.multimodal.processing import BaseMultiModalProcessor  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    expand = getattr(BaseMultiModalProcessor, "_maybe_apply_prompt_updates", None)
    if expand is None or hasattr(expand, "__wrapped__"):  # a newer vLLM; it was done
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
    """What every worker of vLLM can do besides (`--worker-extension-cls`), for `/collective_rpc`."""

    weight_transfer_engine: Any

    def rollover_verify(self, path: str, sha256: str) -> str:
        """Begin to verify a weights file while the engine generates, or say how far that is: see Verifier.status."""
        return self.weight_transfer_engine.verifier.status(path, sha256)


Shape = tuple[int, ...]


def unfit(
    parameters: Mapping[str, Shape], given: Mapping[str, Shape], packed: Mapping[str, Iterable[str]]
) -> list[str]:
    """What is wrong with the weights `given` for these parameters of vLLM's model: lacking ones, and other shapes.

    `packed`: the modules that vLLM has made one, by the name of that one (q_proj, k_proj and v_proj are its qkv_proj,
    one below the other). A parameter of shape () is not compared.
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
    """What vLLM's weight backend "rollover" does: it takes a safetensors file, by its path and SHA-256.

    It is refused before the model is touched, so that the server goes on with the weights that it has: a damaged file,
    or one that is not the whole model (vLLM would take a part of a fused module without a word, and generate garbage).
    Where the load itself fails the process ends: with half a model it must not answer. The base class is vLLM's own,
    see `file_weights`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        backend: Any = self  # with what the base class gave it
        self.model, self.model_config, self.device = backend.model, backend.model_config, backend.device
        # With tensor parallelism a worker has a part of the model only.
        here = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        self.verifier = Verifier(here * backend.parallel_config.world_size)
        self.touched = False  # the model is being replaced
        self.tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        self.parameters = dict(self.shapes(whole=backend.parallel_config.tensor_parallel_size == 1))

    def init_transfer_engine(self, init_info: Any) -> None:
        """Nothing: a file needs no connection."""

    def start_weight_update(self) -> None:
        """Nothing: the model is touched when the file is verified."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the file that `update_info` names. ValueError if it is refused: the weights are as they were."""
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
        """Nothing: `update_weights` does it."""

    def check(self, path: str, sha256: str) -> None:
        """ValueError unless this is a whole model, undamaged."""
        self.verifier.verify(path, sha256)
        packed: dict[str, Iterable[str]] = {}
        for module in reversed(list(self.model.modules())):  # a language model within one that takes images has its own
            packed |= getattr(module, "packed_modules_mapping", {})
        if wrong := unfit(self.parameters, self.names(path), packed):
            raise ValueError(f"{path} is not the whole model: {'; '.join(wrong[:3])} ({len(wrong)} in all)")

    def shapes(self, whole: bool) -> Iterator[tuple[str, Shape]]:
        """Of the parameters as a checkpoint has them: some were packed since. () unless this worker has the `whole`."""
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
                    shape = (module.org_vocab_size, *shape[1:])  # without what it is padded by
                if not (self.tied and isinstance(module, ParallelLMHead)):
                    yield f"{path}.{name}" if path else name, shape if whole else ()

    def names(self, path: str) -> dict[str, Shape]:
        """The shapes in the file, by names as vLLM has them where a weight stands alone."""
        given = {name: shape for name, (_, shape) in shapes_of(path).items()}
        if (mapper := getattr(self.model, "hf_to_vllm_mapper", None)) is None:
            return given
        renamed = type(mapper)(**{**vars(mapper), "orig_to_new_stacked": {}})
        return {new: shape for name, shape in given.items() if (new := renamed.map_name(name)) is not None}

    def tensors(self, path: str) -> Iterator[tuple[str, Any]]:
        """The weights, a module's one after the other."""
        from safetensors import safe_open

        with safe_open(path, "pt", device=str(self.device)) as file:
            for name in sorted(file.keys()):
                if not (self.tied and name == "lm_head.weight"):
                    yield name, file.get_tensor(name)

    def finish_weight_update(self) -> None:
        """Make the model whole again. Nothing where the update was refused."""
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
        """Prepare the output layer again from the embedding whose weight it has: a packed copy would stay old."""
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
        """What fails in here ends the process."""
        try:
            yield
        except BaseException:
            traceback.print_exc()
            print("rollover: the weights were not loaded, the old ones are gone: this server ends", file=sys.stderr)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def shutdown(self) -> None:
        """Nothing is held."""


@functools.cache
def file_weights() -> type:
    """FileWeights as a subclass of what vLLM wants a weight backend to be."""
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    infos = {"init_info_cls": WeightTransferInitInfo, "update_info_cls": WeightTransferUpdateInfo}
    return type("FileWeights", (FileWeights, WeightTransferEngine), infos)


if __name__ == "__main__":
    main(*sys.argv[1:])
elif __name__ == "__mp_main__":  # a process that the API server started, from its first moment on
    bind()
