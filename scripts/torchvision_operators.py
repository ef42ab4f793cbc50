"""Let torchvision be imported beside a CPU build of torch. `make venv` puts this module and a .pth file into .venv.

transformers' image and video processors import torchvision. Its wheel on PyPI is compiled for CUDA: its library does
not load beside a CPU build of torch, and the import then fails as two operators do not exist. They are defined here,
without an implementation, when torchvision is imported. Its models and data sets, which take longest to import and
which nobody needs here, are left out. Nothing is imported at the start of the interpreter.
"""

import importlib.machinery
import sys
import types
from pathlib import Path

_kept = []  # a torch.library.Library removes its operators when it is collected


class _Finder:
    """Finds torchvision as usual; its import defines the operators first."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None and spec.origin is not None:
            origin, exec_module = spec.origin, spec.loader.exec_module

            def define_and_exec(module):
                _define(Path(origin).parent)
                exec_module(module)

            setattr(spec.loader, "exec_module", define_and_exec)  # noqa: B010
        return spec


def _define(package):
    import torch

    for library in package.glob("_C*"):
        try:
            torch.ops.load_library(str(library))
            return  # a build that fits this torch
        except OSError:
            pass
    if not _kept:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
        for name in ("torchvision.datasets", "torchvision.models"):
            sys.modules.setdefault(name, types.ModuleType(name))


sys.meta_path.insert(0, _Finder)
