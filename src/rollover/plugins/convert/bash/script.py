"""Reads the commands of a script, with the values of names at each. Runs nothing.

Assignments under a condition are in doubt. The output of a command is unknown, except for commands whose
arguments determine it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollover.plugins.convert.bash.programs import Script, declare, output_of, run_command
from rollover.plugins.convert.bash.state import BLANKS, State
from rollover.plugins.convert.bash.text import Text, plain, unknown
from rollover.plugins.convert.bash.words import Budget, WordExpansion, find_closing

# Setup commands are assumed to succeed, so that the command behind their `&&` is not in doubt.
_SETTING_UP = ("cd", "pushd", "popd", "mkdir", "set", "source", ".", "echo", "printf", "rm", "cp", "ulimit", "module",
               "conda", "pip", "pip3", "touch", "chmod", "true", ":", "unset", "shopt", "sleep")  # fmt: skip
_MOST_DEPTH = 40  # of calls and of scripts within scripts
_MOST_ROUNDS = 64  # of a loop
_DEFAULT = re.compile(r"\$\{\w+:?[-=+?]")
_HIDDEN = {ord(mark): 0xE000 + ord(mark) for mark in "'\"()[]{}$ \\`,;|&<>"}
_SHOWN = {hidden: mark for mark, hidden in _HIDDEN.items()}


def read_script(text: str, path: str = "", environment: Mapping[str, str] = os.environ) -> Script:
    """Read the script of the file `path`. ValueError for invalid bash; ImportError without tree-sitter."""
    names = {name: plain(value) for name, value in {"HOME": "~", **environment, "PWD": ".", "IFS": BLANKS}.items()}
    script = Script()
    Interpreter(text, State(environment, dict(names), exported=names.keys() - {"IFS"}), script, Budget(), path).run()
    return script


def _parsed(text: str, first_line: int) -> tuple[Any, bytes]:
    """Return the syntax tree, and the parsed text as bytes."""
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise ImportError(f"reading bash needs the package {error.name}: pip install 'rollover[convert]'") from error
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    source = text.encode()
    root = parser.parse(source).root_node
    if root.has_error:  # tree-sitter rejects some defaults, and a continued last line
        source = re.sub(r"\\\s*\Z", "", _without_defaults(text)).encode()
        root = parser.parse(source).root_node
    if root.has_error:
        node = root
        while inner := next((child for child in node.children if child.has_error), None):
            node = inner
        shown = " ".join(source[node.start_byte :][:60].decode(errors="ignore").translate(_SHOWN).split())
        raise ValueError(f"line {first_line + node.start_point.row}: bash that cannot be parsed: {shown}")
    return root, source


def _without_defaults(text: str) -> str:
    """Replace special characters in the defaults of `${NAME:-default}`."""
    found, at = "", 0
    while match := _DEFAULT.search(text, at):
        end = find_closing(text, match.end(), "}", '"')
        found += text[at : match.end()] + text[match.end() : end].translate(_HIDDEN)
        at = end
    return found + text[at:]


class Interpreter:
    """Evaluation of one text in a state. line: the text's first line in the file."""

    def __init__(
        self, text: str, state: State, script: Script, budget: Budget, path: str, line: int = 1, depth: int = 0
    ) -> None:
        if depth > _MOST_DEPTH:
            raise ValueError("its scripts are nested too deeply")
        if depth:
            budget.spend(steps=10, chars=len(text))  # parsing it is work, too
        self.state, self.script, self.budget = state, script, budget
        self.path, self._line, self._depth = path, line, depth
        self._root, self._text = _parsed(text, line)
        self.words = WordExpansion(state, budget, self._substitute, path)

    def run(self) -> None:
        """Evaluate all statements."""
        self._each(self._root.children)

    def run_text(self, text: Text, state: State, line: int, path: str = "") -> None:
        """Evaluate another text; its unknown parts stay unknown. path: its file, if another."""
        source = ""
        for piece in text.pieces:
            if piece.why:
                name = f"__unknown_{len(state.names)}"
                state.names[name] = Text((piece,))
            source += f"${{{name}}}" if piece.why else piece.text
        state.names.setdefault("PWD", plain("."))
        run = Interpreter(source, state, self.script, self.budget, path or self.path, line, self._depth + 1)
        running = self.script.running
        running.append(self.path)
        try:
            run.run()
        finally:
            running.pop()

    # Statements

    def _source(self, node: Any) -> str:
        """Return the source text of a node."""
        return self._text[node.start_byte : node.end_byte].decode().translate(_SHOWN)

    def _line_of(self, node: Any) -> int:
        return self._line + node.start_point.row

    def _each(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            if self.state.ended:
                return
            if node.is_named:
                self._statement(node)

    def _statement(  # noqa: C901 - one case for each kind of node
        self, node: Any, heredoc: Text | None = None, target: tuple[str, bool] | None = None
    ) -> None:
        self.budget.spend(steps=1)
        kind = node.type
        if kind == "command":
            self._command(node, heredoc, target)
        elif kind == "variable_assignment":
            self._assign(node)
        elif kind in ("declaration_command", "unset_command"):
            self._declare(node, node.children[0].type)
        elif kind == "redirected_statement":
            self._redirected(node)
        elif kind == "list":
            left, operator, right = node.children[0], node.children[1].type, node.children[-1]
            self._statement(left)
            if self.state.ended:
                return
            if operator == "&&" and self._succeeds(left):
                self._each([right])
            else:
                self._alternatives([[right]], node, may_skip=True)
        elif kind == "if_statement":
            others = [child for child in node.children if child.type in ("elif_clause", "else_clause")]
            first = [child for child in node.children if child.is_named and child not in others]
            has_else = any(child.type == "else_clause" for child in others)
            self._alternatives([first, *(child.named_children for child in others)], node, may_skip=not has_else)
        elif kind == "case_statement":
            items = [child for child in node.children if child.type == "case_item"]
            bodies = [item.children[[c.type for c in item.children].index(")") + 1 :] for item in items]
            has_else = any(self._source(item).lstrip("( ").startswith("*)") for item in items)
            self._alternatives(bodies, node, may_skip=not has_else)
        elif kind in ("for_statement", "c_style_for_statement", "while_statement"):
            self._loop(node)
        elif kind == "function_definition":
            body = node.child_by_field_name("body")
            self.state.functions[self._source(node.child_by_field_name("name"))] = (
                self._source(body), self._line_of(body))  # fmt: skip
        elif kind in ("pipeline", "subshell"):
            self._in_state(self.state.copy(), node.named_children)
        elif kind == "compound_statement" and node.children[0].type == "((":
            self.state.set_counted_unknown(self._source(node))
        elif kind not in ("comment", "test_command"):
            self._each(node.children)

    def _in_state(self, state: State, nodes: Sequence[Any]) -> State:
        """Evaluate nodes in another state, and return it."""
        before = self.state
        self.state = self.words.state = state
        try:
            self._each(nodes)
        finally:
            self.state = self.words.state = before
        return state

    def _alternatives(self, bodies: Sequence[Sequence[Any]], node: Any, *, may_skip: bool) -> None:
        """Evaluate the branches of a condition. may_skip: possibly none runs."""
        states = [self.state.copy()] if may_skip else []
        states += [self._in_state(self.state.copy(), body) for body in bodies]
        self.state.merge(states, self._line_of(node))

    def _loop(self, node: Any) -> None:
        variable, nodes, items = node.child_by_field_name("variable"), node.named_children, None
        if node.type != "while_statement":
            nodes = [child for child in node.children if child.type in ("do_group", "compound_statement")]
        if node.type == "for_statement":
            items = self._items(node)
        if node.type == "c_style_for_statement":
            self.state.set_counted_unknown(self._source(node).partition("\n")[0].partition("do")[0])
        exact = items is not None and not re.search(r"\b(?:break|continue)\b", self._source(node))
        if items is None or len(items) > _MOST_ROUNDS:
            items, exact = [unknown("$", f"the loop of line {self._line_of(node)} gives it its values")], False
        state = self.state if exact else self.state.copy()
        for item in items:
            if variable is not None:
                state.assign(self._source(variable), item)
            self._in_state(state, nodes)
        if not exact:
            self.state.merge([self.state.copy(), state], self._line_of(node))

    def _items(self, node: Any) -> list[Text] | None:
        """Return the values of a loop's variable; None if one is unknown."""
        if "in" not in [child.type for child in node.children]:
            return self.state.arguments
        items: list[Text] = []
        for child in node.children_by_field_name("value"):
            if found := re.fullmatch(r"\{(\d{1,4})\.\.(\d{1,4})\}", self._source(child)):
                items += [plain(str(i)) for i in range(int(found[1]), int(found[2]) + 1)]
            else:
                items += self.words.fields(self._source(child))
        return items if all(item.known or item.in_doubt for item in items) else None

    def _succeeds(self, node: Any) -> bool:
        """Return whether a statement is assumed to succeed."""
        if node.type == "redirected_statement":
            return self._succeeds(node.children[0])
        if node.type == "list":
            parts = [self._succeeds(node.children[0]), self._succeeds(node.children[-1])]
            return all(parts) if node.children[1].type == "&&" else any(parts)
        if node.type == "command":
            name = node.child_by_field_name("name")
            return name is not None and self._source(name) in _SETTING_UP
        assigns = node.type in ("variable_assignment", "variable_assignments", "declaration_command")
        return assigns and not re.search(r"\$\([^(]|`", self._source(node))

    # Names

    def _assign(self, node: Any) -> None:
        """Evaluate `NAME=VALUE`, `NAME+=VALUE` and arrays."""
        state, value = self.state, node.child_by_field_name("value")
        name, bracket, _ = self._source(node.child_by_field_name("name")).partition("[")
        before = state.array(name) if any(child.type == "+=" for child in node.children) else []
        if bracket:
            state.assign(name, [unknown(f"${name}", f"an item of {name} is set by its index")])
        elif value is not None and value.type == "array":
            of = [child for child in value.named_children if child.type != "comment"]
            items = [item for child in of for item in self.words.fields(self._source(child))]
            self.budget.spend(steps=(len(before) + len(items)) // 20)
            state.assign(name, [*before, *items])
        else:
            text = self.words.value(self._source(value)) if value is not None else Text()
            text = before[0] + text if before else text
            state.assign(name, [text, *before[1:]] if before and isinstance(state.names[name], list) else text)

    def _declare(self, node: Any, program: str) -> None:
        """Evaluate `export NAME=VALUE` and its siblings, and `unset`."""
        options = [source for child in node.children[1:] if (source := self._source(child))[:1] in ("-", "+")]
        for child in node.named_children:
            if child.type == "variable_assignment":
                name = self._source(child.child_by_field_name("name")).partition("[")[0]
                make = partial(self._assign, child)
                declare(self.state, program, options, plain(f"{name}="), self._line_of(node), make)
            elif child.type != "comment" and self._source(child) not in options:
                for word in self.words.fields(self._source(child)):
                    declare(self.state, program, options, word, self._line_of(node))

    # Commands

    def _redirected(self, node: Any) -> None:
        heredoc: Text | None = None
        behind: list[Any] = []
        for child in node.children:
            if child.type == "heredoc_redirect":
                heredoc = self._heredoc(child)
                # What stands behind `<<EOF` on its line: another redirection, or the rest of a pipeline.
                behind += [inner for inner in child.named_children if not inner.type.startswith("heredoc")]
            elif child.type == "herestring_redirect":
                heredoc = self.words.value(self._source(child.named_children[-1]))
            elif child.type == "file_redirect":
                behind.append(child)
        targets = [target for child in behind if (target := self._target(child)) is not None]
        body = node.child_by_field_name("body")
        is_command = body is not None and body.type == "command"
        if body is not None:
            self._statement(body, heredoc, targets[0] if targets and is_command else None)
        for target in targets[1:] if is_command else targets:
            self.script.write(self.state, target, None if body is not None else Text())
        self._in_state(self.state.copy(), [child for child in behind if child.type != "file_redirect"])

    def _heredoc(self, node: Any) -> Text:
        marker = next(child for child in node.children if child.type == "heredoc_start")
        body = next((self._source(child) for child in node.children if child.type == "heredoc_body"), "")
        quoted = self._source(marker)[:1] in "'\"\\"
        return plain(body) if quoted else self.words.value(body, "")

    def _target(self, node: Any) -> tuple[str, bool] | None:
        """Return the file of an output redirection, and whether it appends."""
        operator = next((c.type for c in node.children if not c.is_named), "")
        descriptor = next((self._source(c) for c in node.children if c.type == "file_descriptor"), "1")
        if node.type != "file_redirect" or operator not in (">", ">>", ">|", "&>", "&>>") or descriptor != "1":
            return None
        return self.words.value(self._source(node.named_children[-1])).text, operator.endswith(">>")

    def _command(self, node: Any, heredoc: Text | None, target: tuple[str, bool] | None) -> None:
        words: list[Text] = []
        before: dict[str, Any] = {}
        last: Any = None
        for child in node.children:
            if last is not None and not words and self._text[last.end_byte : child.start_byte].count(b"\n"):
                before = {}  # tree-sitter takes assignments of the lines before for a part of this command
            if child.type == "variable_assignment":
                name = self._source(child.child_by_field_name("name"))
                before.setdefault(name, self.state.names.get(name))
                self._assign(child)
            elif child.type == "herestring_redirect":
                heredoc = self.words.value(self._source(child.named_children[-1]))
            elif child.type == "heredoc_redirect":
                heredoc = self._heredoc(child)
            elif child.type not in ("file_redirect", "comment"):
                words += self.words.fields(self._source(child))
            last = child
        replaces = False
        while words and words[0].text in ("!", "time", "exec", "command", "builtin"):
            replaces |= words.pop(0).text == "exec"
        if not words:
            return
        exported = before.keys() - self.state.exported
        self.state.exported |= exported
        run_command(self, words, self._line_of(node), heredoc, target)
        if replaces:
            self.state.ended = "exit"
        self.state.exported -= exported
        for name, value in before.items():
            self.state.names.pop(name, None)
            self.state.names |= {name: value} if value is not None else {}

    def call(self, name: str, arguments: list[Text]) -> None:
        """Evaluate a call of a function."""
        if self._depth >= _MOST_DEPTH:
            raise ValueError("its functions call each other without an end")
        body, line = self.state.functions[name]
        state = self.state
        outer = state.arguments, state.returned, state.local
        state.arguments, state.returned, state.local = arguments, None, {}
        self.run_text(plain(body), state, line)
        state.leave(line, outer[2])
        state.arguments, state.returned = outer[:2]

    def _substitute(self, inner: str, source: str) -> Text:
        """Return the output of a command substitution if its arguments determine it."""
        why = f"{' '.join(source.split())[:80]}: what a command prints is not known. Write the value in its place"
        try:
            script = Script(files=self.script.files)
            run = Interpreter(inner, self.state.copy(), script, self.budget, self.path, self._line, self._depth + 1)
        except ValueError:
            return unknown(source, why)
        found = run.output()
        return unknown(source, why) if found is None else found

    def output(self) -> Text | None:
        """Return the output if the text is one command whose arguments determine it."""
        statements = self._root.named_children
        last = statements[0] if len(statements) == 1 else None
        if last is not None and last.type == "redirected_statement":
            heredoc = next((child for child in last.children if child.type == "heredoc_redirect"), None)
            last = last.child_by_field_name("body")
            if heredoc is not None and last is not None:
                return _stripped(self._heredoc(heredoc)) if self._source(last).strip() == "cat" else None
        if last is not None and last.type == "list" and last.children[1].type == "&&":
            self._each(last.children[:1])
            last = last.children[-1]
        if last is None or last.type != "command":
            return None
        if any(child.type == "variable_assignment" for child in last.children):
            return None
        words = [child for child in last.children if child.type != "file_redirect"]
        return output_of([word for child in words for word in self.words.fields(self._source(child))], self.state)


def _stripped(text: Text) -> Text:
    """Remove trailing newlines."""
    pieces = list(text.pieces)
    while pieces and not pieces[-1].why and not pieces[-1].text.rstrip("\n"):
        pieces.pop()
    if pieces:
        pieces[-1] = replace(pieces[-1], text=pieces[-1].text.rstrip("\n"))
    return Text(tuple(pieces))
