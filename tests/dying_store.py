"""An object store (a folder behind a file system of its own, without rename) whose user dies at a place of choice.

For programs in a process of their own (scripted.py): `Objects.left = n` in a fork, and it gets SIGKILL before change
number n of the store, or in the middle of that upload.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem


class Objects(AbstractFileSystem):
    """objects://FOLDER. `left`: changes until the end; None: it does not come."""

    protocol, cachable = "objects", False
    files: ClassVar[Any] = LocalFileSystem()
    left: ClassVar[int | None] = None

    def _change(self, name: str, *args: Any, **kwargs: Any) -> None:
        if Objects.left is not None:
            if Objects.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            Objects.left -= 1
        getattr(self.files, name)(*args, **kwargs)

    def _upload(self, path: str, content: bytes) -> None:
        self._change("pipe_file", path, content[: len(content) // 2])
        self._change("pipe_file", path, content)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("objects://")

    def info(self, path: str, **kwargs: Any) -> Any:
        return self.files.info(path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return self.files.ls(path, detail=detail)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return self.files.cat_file(path)

    def get_file(self, rpath: str, lpath: str, *args: Any, **kwargs: Any) -> Any:
        return self.files.get_file(rpath, lpath)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._change("makedirs", path, exist_ok=exist_ok)

    def pipe_file(self, path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
        """Parts of a file that grows, which have an @, take their time; everything else is small, and whole at once."""
        if "@" in path:
            self._upload(path, value)
        else:
            self._change("pipe_file", path, value)

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        self._upload(rpath, Path(lpath).read_bytes())

    def rm_file(self, path: str) -> None:
        self._change("rm_file", path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        for file in self.files.find(path):
            self._change("rm_file", file)
        self._change("rm", path, recursive=True)


fsspec.register_implementation("objects", Objects)
