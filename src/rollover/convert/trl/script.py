"""Reads a script that calls TRL's GRPOTrainer, by its syntax tree: nothing of it is run.

Owns what of TRL is understood: `GRPOConfig`, `load_dataset`, `from_pretrained`, `LoraConfig`, and functions that are
defined in the file or imported. What is not is an `Unread` value, which names the expression and its line.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from rollover.convert.mapping import Unread
from rollover.convert.python_source import NotRead, PythonSource, calls, name_of

_FILES = ("json", "csv", "parquet")
_ROW_METHODS = ("map", "filter", "select", "shuffle", "rename_column", "rename_columns", "remove_columns",
                "select_columns", "add_column", "cast_column", "take", "skip", "train_test_split", "cast")  # fmt: skip
_ARGUMENTS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")  # in their order


def calls_grpo_trainer(text: str) -> bool:
    """Whether it is Python in which a GRPOTrainer is made."""
    try:
        return bool(_trainers(ast.parse(text)))
    except SyntaxError:
        return False


def options_of_trl_script(text: str, path: Path) -> dict[str, Any]:
    """The arguments of the one GRPOTrainer, and the fields of its GRPOConfig. ValueError where there is none, or
    several."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"it is no Python: {error.msg} (line {error.lineno})") from error
    found = _trainers(tree)
    if len(found) != 1:
        raise ValueError(f"{len(found) or 'no'} calls of GRPOTrainer are in it; one is read")
    return _Script(tree, path).options(found[0])


class _Script:
    """The script at `path`."""

    def __init__(self, tree: ast.Module, path: Path) -> None:
        self.source, self.path = PythonSource(tree), path
        self.value, self.resolved = self.source.value, self.source.resolved
        training = [name for name, made in self.source.functions.items() if _trainers(made)]
        self.trains_when_imported = not self.source.called_at_import.isdisjoint(["GRPOTrainer", *training])

    def options(self, call: ast.Call) -> dict[str, Any]:
        given: dict[str, ast.expr] = dict(zip(_ARGUMENTS, call.args, strict=False))
        options: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                options["args"] = Unread(str(self.source.not_read(keyword.value)))
            else:
                given[keyword.arg] = keyword.value
        options |= self._config(given.pop("args", None))
        rows = [given.pop(name, None) for name in ("train_dataset", "eval_dataset")]
        readers = {"model": self._model, "reward_funcs": self._rewards, "peft_config": self._lora}
        for name, node in given.items():
            if name == "processing_class" and self._same_model(node, given.get("model")):
                continue
            options[name] = self.source.or_unread(node, readers.get(name, self.value))
        if isinstance(model := options.get("model"), dict):
            options["model_init_kwargs"] = model.pop("further") or options.get("model_init_kwargs")
            options["model"] = model["path"]
        return {name: item for name, item in (options | self._data(*rows)).items() if item is not None}

    # The arguments

    def _config(self, node: ast.expr | None) -> dict[str, Any]:
        """The fields of GRPOConfig(...), and those that are assigned to it afterwards."""
        if node is None:
            return {}
        options: dict[str, Any] = {}
        try:
            made = self.resolved(node)
        except NotRead:
            made = node
        if isinstance(made, ast.Call) and name_of(made) == "GRPOConfig":
            if made.args:
                options["output_dir"] = self.source.or_unread(made.args[0], self.value)
            for keyword in made.keywords:
                if keyword.arg is not None:
                    options[keyword.arg] = self.source.or_unread(keyword.value, self.value)
                    continue
                inner = self.source.or_unread(keyword.value, self.value)
                options |= inner if isinstance(inner, dict) else {"args": inner}
        else:
            options["args"] = Unread(
                f"{self.source.not_read(node)}. If it is read from the command line, convert that: a file with the"
                " command, or TRL's YAML"
            )
        for name, attribute, value in self.source.attributes:
            if isinstance(node, ast.Name) and name == node.id:
                options[attribute] = self.source.or_unread(value, self.value)
        return options

    def _model(self, node: ast.expr) -> Any:
        node = self.resolved(node)
        if isinstance(node, ast.Call) and name_of(node) == "from_pretrained" and node.args:
            further = {k.arg: self.value(k.value) for k in node.keywords if k.arg}
            return {"path": self.value(node.args[0]), "further": further}
        return self.value(node)

    def _same_model(self, node: ast.expr, model: ast.expr | None) -> bool:
        """Whether it is the tokenizer of the model's own folder."""
        try:
            made, path = self.resolved(node), self._model(model) if model else None
            path = path["path"] if isinstance(path, dict) else path
            return isinstance(made, ast.Call) and bool(made.args) and self.value(made.args[0]) == path
        except NotRead:
            return False

    def _lora(self, node: ast.expr) -> dict[str, Any] | None:
        node = self.resolved(node)
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        if not (isinstance(node, ast.Call) and name_of(node) == "LoraConfig") or node.args:
            raise self.source.not_read(node)
        return {k.arg: self.value(k.value) for k in node.keywords if k.arg}

    def _rewards(self, node: ast.expr) -> list[str]:
        try:
            node = self.resolved(node)
        except NotRead:
            pass  # a function
        return [self._reward(one) for one in (node.elts if isinstance(node, ast.List) else [node])]

    def _reward(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        name = node.id if isinstance(node, ast.Name) else ""
        if name in self.source.imported:
            return self.source.imported[name]
        if name not in self.source.functions:
            raise NotRead(
                f"{self.source.not_read(node)}: a reward is a function that is defined in the file or imported, or a"
                " model's name"
            )
        if self.trains_when_imported:
            raise NotRead(
                f"{name} is defined in {self.path.name}, which trains when it is imported: put it into a file of its"
                f" own, or what trains below `if __name__ == '__main__':`"
            )
        return f"{self.path}:{name}"

    # Data

    def _data(self, train: ast.expr | None, held_out: ast.expr | None) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for name, node in (("train_dataset", train), ("eval_dataset", held_out)):
            if node is None or isinstance(node, ast.Constant) and node.value is None:
                continue
            changed: list[ast.Call] = []
            options[name] = self.source.or_unread(node, lambda n, c=changed: self._rows(n, c))
            if changed:
                how = ", ".join(f".{name_of(call)} (line {call.lineno})" for call in reversed(changed))
                options["rows"] = Unread(
                    f"they are made by {how}: write what comes of it to a file and name that, or leave it out where the"
                    " file has these rows and columns already"
                )
            if name == "train_dataset":
                options["prompts"] = self._form_of_prompts(options[name], changed)
        return options

    def _rows(self, node: ast.expr, changed: list[ast.Call]) -> dict[str, Any]:
        node = self.resolved(node)
        if isinstance(node, ast.Subscript):
            return self._rows(node.value, changed) | {"split": self.value(node.slice)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ROW_METHODS:
            changed.append(node)
            return self._rows(node.func.value, changed)
        if not (isinstance(node, ast.Call) and name_of(node) == "load_dataset" and node.args):
            raise NotRead(
                f"{self.source.not_read(node)}: rows are read of load_dataset(...). Write them to a file, and name it"
            )
        given = {k.arg: self.value(k.value) for k in node.keywords if k.arg}
        path, subset = self.value(node.args[0]), given.get("name")
        if len(node.args) > 1:
            subset = self.value(node.args[1])
        found: dict[str, Any] = {"path": path}
        if path in _FILES:
            if not isinstance(given.get("data_files"), str):
                raise self.source.not_read(node)
            found["path"] = given["data_files"]
        elif subset:
            found["subset"] = subset
        split = given.get("split")
        if split and "[" in split:
            changed.append(node)
        if split and path not in _FILES:
            found["split"] = split.partition("[")[0]
        return found | ({"streaming": True} if given.get("streaming") else {})

    def _form_of_prompts(self, source: Any, changed: list[ast.Call]) -> Any:
        """`text` or `messages`: of the function of a .map, else of a local file's first row."""
        for call in changed:
            for node in call.args:
                function = self.source.functions.get(node.id) if isinstance(node, ast.Name) else node
                for made in ast.walk(function) if function is not None else ():
                    if isinstance(made, ast.Dict):
                        for key, value in zip(made.keys, made.values, strict=True):
                            if isinstance(key, ast.Constant) and key.value == "prompt":
                                return self._form(value, function)
        if isinstance(source, dict) and (form := _form_in_file(Path(source["path"]))):
            return form
        return Unread(
            "whether the column prompt holds texts or messages is not known: messages go through the chat template"
            " (--tasks.chat true), texts do not (--tasks.chat false)"
        )

    def _form(self, node: ast.expr, function: ast.AST | None) -> str:
        if isinstance(node, ast.Name) and function is not None:
            for inner in ast.walk(function):
                if isinstance(inner, ast.Assign) and any(ast.unparse(t) == node.id for t in inner.targets):
                    return self._form(inner.value, None)
        return "messages" if isinstance(node, ast.List) else "text"


def _trainers(tree: ast.AST) -> list[ast.Call]:
    return [call for call in calls(tree) if name_of(call) == "GRPOTrainer"]


def _form_in_file(path: Path) -> str:
    """Of the first row of a file of JSON lines; "" where there is none."""
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            prompt = json.loads(file.readline()).get("prompt")
    except (OSError, ValueError, AttributeError):
        return ""
    return {str: "text", list: "messages"}.get(type(prompt), "")
