"""Reads the commands of a script, with what its names stand for at each. Runs nothing.

What is assigned under a condition is in doubt. What a command prints is unknown, except for a few commands that depend
on their arguments only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollover.plugins.convert.bash.assignments import assign, declare, loop_items, remove
from rollover.plugins.convert.bash.programs import printed, start
from rollover.plugins.convert.bash.state import State
from rollover.plugins.convert.bash.text import Piece, Text, plain, unknown
from rollover.plugins.convert.bash.words import BLANKS, QUOTE, Budget, Words
from rollover.plugins.convert.bash.written import Command, Script, Target, write

__all__ = ["Command", "Script", "read_script"]
# They set something up, and are taken to succeed: what stands behind their `&&` is not in doubt.
_SETTING_UP = ("cd", "pushd", "popd", "mkdir", "set", "source", ".", "echo", "printf", "rm", "cp", "ulimit", "module",
               "conda", "pip", "pip3", "touch", "chmod", "true", ":", "unset", "shopt", "sleep")  # fmt: skip
_MOST_DEPTH = 40  # of calls and of scripts within scripts
_MOST_ROUNDS = 64  # of a loop
_QUOTED = re.compile(rb"(?<=\")\$\{\w+:?[-=+][^\"{}\n]*\}")  # a ' in it is no quote
_LISTED = re.compile(rb"(\$\{\w+:?[-=+])\[\"([^\"{}\n]*)\"\](?=\})")  # ${NAME:-["value"]}
_CONTINUED = re.compile(rb"\\\s*\Z")  # a last line that goes on
_PREFIXES = ("!", "time", "exec", "command", "builtin")


def read_script(text: str, path: str = "", environment: Mapping[str, str] = os.environ) -> Script:
    """Read a script. path: its own. ValueError for text that cannot be parsed; ImportError without tree-sitter."""
    names = {name: plain(value) for name, value in {"HOME": "~", **environment, "PWD": "."}.items()}
    names["IFS"] = plain(BLANKS)
    script = Script()
    Run(text, State(environment, names, exported=names.keys() - {"IFS"}), script, Budget(), path).all()
    return script


def _parsed(source: bytes, first_line: int) -> tuple[Any, bytes]:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise ImportError(f"reading bash needs the package {error.name}: pip install 'rollover[convert]'") from error
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    root = parser.parse(source).root_node
    if root.has_error:  # what bash reads, and tree-sitter does not: see _QUOTED, _LISTED and _CONTINUED
        source = _QUOTED.sub(lambda match: match[0].replace(b"'", QUOTE.encode()), source)
        source = _CONTINUED.sub(b"", _LISTED.sub(rb'\1"[\2]"', source))
        root = parser.parse(source).root_node
    if root.has_error:
        node = root
        while inner := next((child for child in node.children if child.has_error), None):
            node = inner
        shown = " ".join(source[node.start_byte :][:60].decode(errors="ignore").split())
        raise ValueError(f"line {first_line + node.start_point.row}: bash that cannot be parsed: {shown}")
    return root, source


class Run:
    """One text, evaluated in a state. line: of the text in the file."""

    def __init__(
        self, text: str, state: State, script: Script, budget: Budget, path: str, line: int = 1, depth: int = 0
    ) -> None:
        if depth > _MOST_DEPTH:
            raise ValueError("its scripts are nested too deeply")
        if depth:
            budget.spend(steps=10, chars=len(text))  # parsing it is work, too
        self.state, self.script, self.budget = state, script, budget
        self.path, self._line, self._depth = path, line, depth
        self._root, source = _parsed(text.encode(), line)
        self.words = Words(source, state, budget, self._substitute, path)

    def all(self) -> None:
        """Evaluate the whole text."""
        self._each(self._root.children)

    # Statements

    def _each(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            if self.state.ended:
                return
            if node.is_named:
                self._statement(node)

    def _statement(self, node: Any, heredoc: Text | None = None, target: Target | None = None) -> None:
        self.budget.spend(steps=1)
        kind = node.type
        simple = {
            "variable_assignment": lambda node: assign(self.words, node),
            "declaration_command": lambda node: declare(self.words, node, self._line_of(node)),
            "redirected_statement": self._redirected,
            "list": self._list,
            "if_statement": self._if,
            "case_statement": self._case,
            "for_statement": self._loop,
            "c_style_for_statement": self._loop,
            "while_statement": self._loop,
        }
        if kind == "command":
            self._command(node, heredoc, target)
        elif kind in simple:
            simple[kind](node)
        elif kind == "function_definition":
            body, name = node.child_by_field_name("body"), node.child_by_field_name("name")
            self.state.functions[self.words.source(name)] = (self, body)
        elif kind in ("pipeline", "subshell"):
            self._apart(self.state.copy(), [child for child in node.children if child.is_named])
        elif kind == "compound_statement" and node.children[0].type == "((":
            self.state.count(self.words.source(node))
        elif kind == "unset_command":
            remove(self.words, node, self._line_of(node))
        elif kind not in ("comment", "test_command"):
            self._each(node.children)

    def _apart(self, state: State, nodes: Sequence[Any]) -> State:
        """Evaluate nodes in another state."""
        before = self.state
        self.state = self.words.state = state
        try:
            self._each(nodes)
        finally:
            self.state = self.words.state = before
        return state

    def _alternatives(self, bodies: Sequence[Sequence[Any]], node: Any, *, may_skip: bool) -> None:
        """Evaluate bodies of which one runs, or none."""
        states = [self.state.copy()] if may_skip else []
        states += [self._apart(self.state.copy(), body) for body in bodies]
        self.state.one_of(states, self._line_of(node))

    def _list(self, node: Any) -> None:
        left, operator, right = node.children[0], node.children[1].type, node.children[-1]
        self._statement(left)
        if self.state.ended:
            return
        if operator == "&&" and _succeeds(self.words, left):
            self._each([right])
        else:
            self._alternatives([[right]], node, may_skip=True)

    def _if(self, node: Any) -> None:
        bodies: list[list[Any]] = [[]]
        for child in node.children:
            if child.type in ("elif_clause", "else_clause"):
                bodies.append([inner for inner in child.children if inner.is_named])
            elif child.is_named:
                bodies[0].append(child)
        has_else = any(child.type == "else_clause" for child in node.children)
        self._alternatives(bodies, node, may_skip=not has_else)

    def _case(self, node: Any) -> None:
        items = [child for child in node.children if child.type == "case_item"]
        bodies = []
        for item in items:
            behind = next((i for i, child in enumerate(item.children) if child.type == ")"), -1)
            bodies.append(item.children[behind + 1 :])
        has_else = any(self.words.source(item).lstrip("( ").startswith("*)") for item in items)
        self._alternatives(bodies, node, may_skip=not has_else)

    def _loop(self, node: Any) -> None:
        name = node.child_by_field_name("variable")
        nodes = [child for child in node.children if child.type in ("do_group", "compound_statement")]
        if node.type == "while_statement":
            nodes = [child for child in node.children if child.is_named]
        items = loop_items(self.words, node) if node.type == "for_statement" else None
        if node.type == "c_style_for_statement":
            self.state.count(self.words.between(node.start_byte, node.child_by_field_name("body").start_byte))
        exact = items is not None and not re.search(r"\b(?:break|continue)\b", self.words.source(node))
        if items is None or len(items) > _MOST_ROUNDS:
            items, exact = [unknown("$", f"the loop of line {self._line_of(node)} gives it its values")], False
        state = self.state if exact else self.state.copy()
        for item in items:
            if name is not None:
                state.assign(self.words.source(name), item)
            self._apart(state, nodes)
        if not exact:
            self.state.one_of([self.state.copy(), state], self._line_of(node))

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
                heredoc = self.words.value(child.named_children[-1])
            elif child.type == "file_redirect":
                behind.append(child)
        targets = [target for child in behind if (target := _target(self.words, child)) is not None]
        body = node.child_by_field_name("body")
        is_command = body is not None and body.type == "command"
        if body is not None:
            self._statement(body, heredoc, targets[0] if targets and is_command else None)
        for target in targets[1:] if is_command else targets:
            write(self.script, self.state, target, None if body is not None else Text())
        self._apart(self.state.copy(), [child for child in behind if child.type != "file_redirect"])

    def _heredoc(self, node: Any) -> Text:
        start = next(child for child in node.children if child.type == "heredoc_start")
        body = next((child for child in node.children if child.type == "heredoc_body"), None)
        if body is None:
            return Text()
        quoted = self.words.source(start)[:1] in "'\"\\"
        return plain(self.words.source(body)) if quoted else self.words.body(body)

    def _command(self, node: Any, heredoc: Text | None, target: Target | None) -> None:  # noqa: C901 - one case for each kind of node
        words: list[Text] = []
        before: dict[str, Text | None] = {}
        last: Any = None
        for child in node.children:
            if last is not None and not words and _ends_between(self.words, last, child):
                before = {}  # tree-sitter takes assignments of the lines before for a part of this command
            if child.type == "variable_assignment":
                name = self.words.source(child.child_by_field_name("name"))
                before.setdefault(name, self.state.names.get(name))
                assign(self.words, child)
            elif child.type == "command_name":
                words += self.words.fields(child.children[0]) if child.children else []
            elif child.type == "herestring_redirect":
                heredoc = self.words.value(child.named_children[-1])
            elif child.type == "heredoc_redirect":
                heredoc = self._heredoc(child)
            elif child.type not in ("file_redirect", "comment"):
                words += self.words.fields(child)
            last = child
        replaces = False
        while words and words[0].text in _PREFIXES:
            replaces |= words.pop(0).text == "exec"
        if not words:
            return
        exported = before.keys() - self.state.exported
        self.state.exported |= exported
        start(self, words, self._line_of(node), heredoc, target)
        if replaces:
            self.state.ended = "exit"
        self.state.exported -= exported
        for name, value in before.items():
            self.state.unset(name)
            if value is not None:
                self.state.names[name] = value

    def within(self, text: Text, state: State, line: int, path: str = "") -> None:
        """Evaluate another text as a script; unknown parts of it stay unknown. path: of its file, if it has another."""
        source = ""
        for piece in text.pieces:
            if piece.why:
                name = f"__unknown_{len(state.names)}"
                state.names[name] = Text((piece,))
            source += f"${{{name}}}" if piece.why else piece.text
        state.names.setdefault("PWD", plain("."))
        run = Run(source, state, self.script, self.budget, path or self.path, line, self._depth + 1)
        running = self.script.running
        running.append(self.path)
        try:
            run.all()
        finally:
            running.pop()

    def call(self, body: Any, arguments: list[Text], line: int) -> None:
        """Evaluate a function, whose body another text may have."""
        run, node = body
        if self._depth >= _MOST_DEPTH:
            raise ValueError("its functions call each other without an end")
        before = run.state, run._depth, self.state.arguments, self.state.returned, self.state.local
        run.state = run.words.state = self.state
        run._depth = self._depth + 1
        self.state.arguments, self.state.returned, self.state.local = arguments, None, {}
        try:
            run._each([node])
            self.state.leave(line)
            self.state.forget_local(before[4])
        finally:
            run.state, run._depth, self.state.arguments, self.state.returned, _ = before
            run.words.state = run.state

    def _substitute(self, node: Any) -> Text:
        """What a command prints, as far as only its arguments decide that."""
        source = self.words.source(node)
        statements = [child for child in node.children if child.is_named]
        outer, self.script = self.script, Script(files=self.script.files)
        try:
            found = self._printed(statements, self.state.copy())
        finally:
            self.script = outer
        why = f"{' '.join(source.split())[:80]}: what a command prints is not known. Write the value in its place"
        return unknown(source, why) if found is None else found

    def _printed(self, statements: list[Any], state: State) -> Text | None:
        last = statements[0] if len(statements) == 1 else None
        if last is not None and last.type == "redirected_statement":
            heredoc = next((child for child in last.children if child.type == "heredoc_redirect"), None)
            last = last.child_by_field_name("body")
            if heredoc is not None and last is not None:
                return _stripped(self._heredoc(heredoc)) if self.words.source(last).strip() == "cat" else None
        if last is not None and last.type == "list" and last.children[1].type == "&&":
            self._apart(state, last.children[:1])
            last = last.children[-1]
        if last is None or last.type != "command":
            return None
        if any(child.type == "variable_assignment" for child in last.children):
            return None
        words: list[Text] = []
        outer, self.words.state = self.words.state, state
        for child in last.children:
            if child.type != "file_redirect":
                words += self.words.fields(child.children[0] if child.type == "command_name" else child)
        self.words.state = outer
        return printed(words, state)

    def _line_of(self, node: Any) -> int:
        return self._line + node.start_point.row


def _stripped(text: Text) -> Text:
    """Without the line ends at its end."""
    pieces = list(text.pieces)
    while pieces and not pieces[-1].why and not pieces[-1].text.rstrip("\n"):
        pieces.pop()
    if pieces:
        pieces[-1] = Piece(pieces[-1].text.rstrip("\n"), pieces[-1].why, pieces[-1].doubt)
    return Text(tuple(pieces))


def _ends_between(words: Words, first: Any, second: Any) -> bool:
    return "\n" in words.between(first.end_byte, second.start_byte).replace("\\\n", "")


def _succeeds(words: Words, node: Any) -> bool:
    """Whether a statement only sets something up. Any other may fail."""
    if node.type == "redirected_statement":
        return _succeeds(words, node.children[0])
    if node.type == "list":
        parts = [_succeeds(words, node.children[0]), _succeeds(words, node.children[-1])]
        return all(parts) if node.children[1].type == "&&" else any(parts)
    if node.type == "command":
        name = node.child_by_field_name("name")
        return name is not None and words.source(name) in _SETTING_UP
    assigns = node.type in ("variable_assignment", "variable_assignments", "declaration_command")
    return assigns and not re.search(r"\$\([^(]|`", words.source(node))


def _target(words: Words, node: Any) -> Target | None:
    """The file that a redirection writes to what a command prints."""
    operator = next((c.type for c in node.children if not c.is_named), "")
    descriptor = next((words.source(c) for c in node.children if c.type == "file_descriptor"), "1")
    if node.type != "file_redirect" or operator not in (">", ">>", ">|", "&>", "&>>") or descriptor != "1":
        return None
    return Target(words.value(node.named_children[-1]).text, operator.endswith(">>"))
