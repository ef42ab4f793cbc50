"""Reads a Python script that calls TRL's GRPOTrainer, by its syntax tree. Runs nothing in it.

Supports `GRPOConfig`, `load_dataset`, `from_pretrained`, `LoraConfig`, and functions that the file defines or imports.
Other expressions become `Unknown` values, with the expression and its line.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from rollover.plugins.convert.files import MOST_BYTES
from rollover.plugins.convert.mapping import Unknown
from rollover.plugins.convert.python_definitions import EVERY, calls, name_of
from rollover.plugins.convert.python_source import NotEvaluated, PythonSource, parse_python

_TRAINER, _CONFIG = "GRPOTrainer", "GRPOConfig"
_FILES = ("json", "csv", "parquet")
_ROW_METHODS = ("map", "filter", "select", "shuffle", "rename_column", "rename_columns", "remove_columns",
                "select_columns", "add_column", "cast_column", "take", "skip", "train_test_split", "cast")  # fmt: skip
_ARGUMENTS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")  # in their order


def calls_grpo_trainer(text: str) -> bool:
    """Return whether a text is Python that creates a GRPOTrainer."""
    try:
        return bool(_trainers(parse_python(text)))
    except ValueError:  # options_of_trl_script reports it
        return _TRAINER in text


def options_of_trl_script(text: str, path: Path) -> dict[str, Any]:
    """Read the arguments of the GRPOTrainer and the fields of its GRPOConfig. ValueError unless there is one call."""
    tree = parse_python(text)
    found = _trainers(tree)
    if len(found) != 1:
        raise ValueError(f"{len(found) or 'no'} calls of GRPOTrainer are in it; one is read")
    return _Script(tree, path).options(found[0])


class _Script:
    """The script at `path`."""

    def __init__(self, tree: ast.Module, path: Path) -> None:
        self.source, self.path = PythonSource(tree), path
        self.defaults = self.source.defaults
        self.value, self.resolve = self.source.value, self.source.resolve
        training = [name for name, made in self.source.functions.items() if _trainers(made)]
        self.trains_when_imported = not self.source.called_at_import.isdisjoint([*_derived(tree, _TRAINER), *training])

    def options(self, call: ast.Call) -> dict[str, Any]:
        given: dict[str, ast.expr] = dict(zip(_ARGUMENTS, call.args, strict=False))
        options: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                options["args"] = Unknown(str(self.source.not_evaluated(keyword.value)))
            else:
                given[keyword.arg] = keyword.value
        options |= self._config(given.pop("args", None))
        rows = [given.pop(name, None) for name in ("train_dataset", "eval_dataset")]
        readers = {"model": self._model, "reward_funcs": self._rewards, "peft_config": self._lora}
        for name, node in given.items():
            if name == "processing_class" and self._same_model(node, given.get("model")):
                continue
            options[name] = self.source.or_unknown(node, readers.get(name, self.value))
        if isinstance(model := options.get("model"), dict):
            options["model_init_kwargs"] = model.pop("further") or options.get("model_init_kwargs")
            options["model"] = model["path"]
        options |= self._changes(call)
        return {name: item for name, item in (options | self._data(*rows)).items() if item is not None}

    def _changes(self, call: ast.Call) -> dict[str, Any]:
        """Return possible changes by a subclass, or by later code, as unknown options."""
        options: dict[str, Any] = {}
        name = name_of(call)
        if name != _TRAINER:
            options[name] = Unknown(f"what {name} (line {call.lineno}) changes of {_TRAINER} cannot be seen")
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Assign) and node.value is call:
                names = set().union(*(self.source.aliases.names(ast.unparse(target)) for target in node.targets))
                for one in [one for one in self.source.attributes if one.name in names]:
                    options[f"{one.name}.{one.attribute}"] = Unknown(f"the trainer is changed in line {one.line}")
        for other in calls(self.source.tree):
            if name_of(other) == "add_callback":
                options["callbacks"] = Unknown(str(self.source.not_evaluated(other)))
        return options

    # The arguments

    def _config(self, node: ast.expr | None) -> dict[str, Any]:
        """Return the fields of GRPOConfig(...), and later assignments to it."""
        if node is None:
            return {}
        options: dict[str, Any] = {}
        try:
            made = self.resolve(node)
        except NotEvaluated:
            made = node
        name = name_of(made) if isinstance(made, ast.Call) else self.defaults.parsed_name(made)
        derived = _derived(self.source.tree, _CONFIG)
        if name in derived and name != _CONFIG:
            options |= self._own_config(self.source.classes[name])
        if isinstance(made, ast.Call) and name in derived:
            if made.args:
                options["output_dir"] = self.source.or_unknown(made.args[0], self.value)
            if len(made.args) > 1:
                options["args"] = Unknown(f"line {made.lineno}: {name} is given arguments without their names")
            for keyword in made.keywords:
                if keyword.arg is not None:
                    options[keyword.arg] = self.source.or_unknown(keyword.value, self.value)
                    continue
                inner = self.source.or_unknown(keyword.value, self.value)
                options |= inner if isinstance(inner, dict) else {"args": inner}
        else:
            options["args"] = Unknown(
                f"{self.source.not_evaluated(node)}. If it is read from the command line, convert that: a file with the"
                " command, or TRL's YAML"
            )
        return options | (self._assigned(node) if isinstance(node, ast.Name) else {})

    def _assigned(self, node: ast.Name) -> dict[str, Any]:
        """Return the fields that are assigned to a named configuration; `args` if others may change."""
        options: dict[str, Any] = {}
        names, scopes = self.source.aliases.names(node.id), self.source.scopes(node)
        for one in [one for one in self.source.attributes if one.name in names]:
            name = "args" if one.attribute == EVERY else one.attribute
            if one.location.block is not None:
                options[name] = Unknown(f"line {one.line} depends on the condition of line {one.location.block.line}")
            elif one.value is None or one.name != node.id or one.location.scope not in scopes:
                options[name] = Unknown(f"line {one.line} may change `{node.id}`: it is not evaluated")
            else:
                options[name] = self.source.or_unknown(one.value, self.value)
        if why := self.source.aliases.changes(node.id):
            options["args"] = Unknown(why)
        return options

    def _own_config(self, made: ast.ClassDef) -> dict[str, Any]:
        """Return the defaults of a subclass of GRPOConfig."""
        options = {
            name: self.source.or_unknown(value, self.value) for name, value in self.defaults.fields(made).items()
        }
        if methods := [part.name for part in made.body if isinstance(part, ast.FunctionDef)]:
            what = f"what its {', '.join(methods)} changes of {_CONFIG} cannot be seen (line {made.lineno})"
            options[made.name] = Unknown(what)
        return options

    def _model(self, node: ast.expr) -> Any:
        node = self.resolve(node)
        if isinstance(node, ast.Call) and name_of(node) == "from_pretrained" and node.args:
            further = {k.arg: self.value(k.value) for k in node.keywords if k.arg}
            return {"path": self.value(node.args[0]), "further": further}
        return self.value(node)

    def _same_model(self, node: ast.expr, model: ast.expr | None) -> bool:
        """Return whether it is the tokenizer of the model's folder."""
        try:
            made, path = self.resolve(node), self._model(model) if model else None
            path = path["path"] if isinstance(path, dict) else path
            return isinstance(made, ast.Call) and bool(made.args) and self.value(made.args[0]) == path
        except NotEvaluated:
            return False

    def _lora(self, node: ast.expr) -> dict[str, Any] | None:
        node = self.resolve(node)
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        if not (isinstance(node, ast.Call) and name_of(node) == "LoraConfig") or node.args:
            raise self.source.not_evaluated(node)
        return {k.arg: self.value(k.value) for k in node.keywords if k.arg}

    def _rewards(self, node: ast.expr) -> list[str]:
        try:
            node = self.resolve(node)
        except NotEvaluated:
            pass  # a function
        return [self._reward(one) for one in (node.elts if isinstance(node, ast.List) else [node])]

    def _reward(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        name = node.id if isinstance(node, ast.Name) else ""
        if name in self.source.imported:
            return self.source.imported[name]
        if name not in self.source.functions:
            raise NotEvaluated(
                f"{self.source.not_evaluated(node)}: a reward is a function that is defined in the file or imported, or"
                " a model's name"
            )
        if self.trains_when_imported:
            raise NotEvaluated(
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
            row_calls: list[ast.Call] = []
            options[name] = self.source.or_unknown(node, lambda n, c=row_calls: self._rows(n, c))
            if row_calls:
                how = ", ".join(f".{name_of(call)} (line {call.lineno})" for call in reversed(row_calls))
                options["rows"] = Unknown(
                    f"they are made by {how}: write what comes of it to a file and name that, or leave it out where the"
                    " file has these rows and columns already"
                )
            if name == "train_dataset":
                options["prompts"] = self._form_of_prompts(options[name], row_calls)
        return options

    def _rows(self, node: ast.expr, row_calls: list[ast.Call], index: int | None = None) -> dict[str, Any]:
        """Return a data set. row_calls: collects the calls that change rows. index: the split of a list of splits."""
        node = self.resolve(node)
        if isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
                return self._rows(node.value, row_calls, node.slice.value)
            return self._rows(node.value, row_calls) | {"split": self.value(node.slice)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ROW_METHODS:
            row_calls.append(node)
            return self._rows(node.func.value, row_calls)
        if not (isinstance(node, ast.Call) and name_of(node) == "load_dataset" and node.args):
            raise NotEvaluated(
                f"{self.source.not_evaluated(node)}: rows are read of load_dataset(...). Write them to a"
                " file, and name it"
            )
        return self._loaded(node, row_calls, index)

    def _loaded(self, node: ast.Call, row_calls: list[ast.Call], index: int | None) -> dict[str, Any]:
        given = {k.arg: self.value(k.value) for k in node.keywords if k.arg}
        path, subset = self.value(node.args[0]), given.get("name")
        if len(node.args) > 1:
            subset = self.value(node.args[1])
        found: dict[str, Any] = {"path": path}
        if path in _FILES:
            if not isinstance(given.get("data_files"), str):
                raise self.source.not_evaluated(node)
            found["path"] = given["data_files"]
        elif subset:
            found["subset"] = subset
        split = given.get("split")
        if isinstance(split, list) or index is not None:
            if index is None or not isinstance(split, list) or not -len(split) <= index < len(split):
                raise self.source.not_evaluated(node)
            split = split[index]
        if split and "[" in split:
            row_calls.append(node)
        if split and path not in _FILES:
            found["split"] = split.partition("[")[0]
        return found | ({"streaming": True} if given.get("streaming") else {})

    def _form_of_prompts(self, source: Any, row_calls: list[ast.Call]) -> Any:
        """Return "text" or "messages", from the function of a .map, else from a local file's first row."""
        for call in row_calls:
            for node in call.args:
                function = self.source.functions.get(node.id) if isinstance(node, ast.Name) else node
                for made in ast.walk(function) if function is not None else ():
                    if isinstance(made, ast.Dict):
                        for key, value in zip(made.keys, made.values, strict=True):
                            if isinstance(key, ast.Constant) and key.value == "prompt":
                                return self._form(value, function)
        if isinstance(source, dict) and (form := _form_in_file(Path(source["path"]))):
            return form
        return Unknown(
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
    """Return the calls of GRPOTrainer, its subclasses, and classes whose name ends so."""
    derived = _derived(tree, _TRAINER)
    return [call for call in calls(tree) if name_of(call) in derived or name_of(call).endswith(_TRAINER)]


def _derived(tree: ast.AST, name: str) -> set[str]:
    """Return a class and its subclasses in the file."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found, num = {name}, 0
    while len(found) != num:
        num = len(found)
        found |= {c.name for c in classes if {ast.unparse(base).rpartition(".")[2] for base in c.bases} & found}
    return found


def _form_in_file(path: Path) -> str:
    """Return the prompt form in the first row of a file of JSON lines; "" if there is none."""
    try:
        if not path.expanduser().is_file():
            return ""
        with path.expanduser().open(encoding="utf-8") as file:
            prompt = json.loads(file.readline(MOST_BYTES)).get("prompt")
    except (OSError, ValueError, AttributeError, RuntimeError):  # RuntimeError: ~ of an unknown user
        return ""
    return {str: "text", list: "messages"}.get(type(prompt), "")
