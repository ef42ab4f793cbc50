"""A program that answers calls from tests in another sandbox: its functions and objects stay here, plain values cross.

in   {"get": name} | {"call": handle, "args", "kwargs"} | {"attr": handle, "name"} | {"item": handle, "args"} | {}
out  {"value": form, "changed"?: arguments changed in place} | {"raised": type, "text"} | {"none": true}
"""

from __future__ import annotations

from typing import Any

from rollover.plugins.sandbox.guest.program import Channel, Source, told
from rollover.plugins.sandbox.guest.values import from_json, to_json


def serve(source: Source, channel: Channel) -> None:
    """Load the program, say so, and answer until it is told that no more is wanted."""
    objects: list[Any] = []

    def handle(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    found = source.run("program")
    channel.say({"loaded": True})
    while request := channel.hear():
        try:
            answer = _answer(request, found, source, objects, handle)
        except MemoryError:
            raise
        except Exception as error:
            base = next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"), "Exception")
            answer = {"raised": base, "text": told(error)}
        channel.say(answer)


def _answer(request: dict[str, Any], found: dict[str, Any], source: Source, objects: list[Any], handle: Any) -> Any:
    if "get" in request:
        try:
            return {"value": to_json(source.function(found, request["get"]), handle)}
        except NameError:
            return {"none": True}
    if "attr" in request:
        return {"value": to_json(getattr(objects[request["attr"]], request["name"]), handle)}
    args = [from_json(form, objects.__getitem__) for form in request["args"]]
    if "item" in request:
        return {"value": to_json(objects[request["item"]][args[0]], handle)}
    kwargs = {name: from_json(form, objects.__getitem__) for name, form in request["kwargs"].items()}
    result = to_json(objects[request["call"]](*args, **kwargs), handle)
    after = [to_json(arg, handle) if isinstance(arg, list | dict | set) else None for arg in args]
    changed = {str(i): form for i, form in enumerate(after) if form is not None and form != request["args"][i]}
    return {"value": result, **({"changed": changed} if changed else {})}
