"""Edits of JSON as text: what is not named stays as it was, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# For every key ("*": any key or index) what becomes of its value: the JSON text that replaces it, None to take the
# member away, or a plan for what is inside.
Plan = Mapping[str, "str | Plan | None"]

_SPACES = " \t\n\r"
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBERS = re.compile(r"\[[-0-9.eE+, \t\n\r]*\]")  # long id lists: found without building them


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_standard = json.JSONDecoder(parse_constant=_refuse)


def loads(text: str | bytes) -> Any:
    """JSON as the standard has it: NaN and infinities are refused. Raises ValueError."""
    try:
        return _standard.decode(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def rewrite(text: str, plan: Plan) -> str:
    """``text`` with the planned members replaced or removed. Raises ValueError if it is not one JSON value."""
    start = _space(text, 0)
    try:
        changed, end = _value(text, start, plan)
    except (IndexError, StopIteration, RecursionError):
        raise ValueError("not JSON") from None
    if _space(text, end) != len(text):
        raise ValueError("not one JSON value")
    return text[:start] + changed + text[end:]


def with_members(text: str, present: Mapping[str, Any], members: Mapping[str, Any]) -> str:
    """The JSON object ``text``, which holds ``present``, with these members set: in place where they exist, else at its
    end."""
    replaced = {key: json.dumps(value) for key, value in members.items() if key in present}
    if replaced:
        text = rewrite(text, replaced)
    added = ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in members.items() if key not in present)
    if not added:
        return text
    end = text.rindex("}")
    return f"{text[:end]}{',' if present else ''}{added}{text[end:]}"


def applied(value: Any, plan: Plan) -> Any:
    """What ``rewrite`` does, on a parsed value; shares what it does not change."""
    if isinstance(value, list):
        inner = plan.get("*", "")
        return [applied(item, inner) for item in value] if isinstance(inner, Mapping) else value
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        action = plan.get(key, plan.get("*", ""))
        if isinstance(action, Mapping):
            result[key] = applied(item, action)
        elif action is not None:
            result[key] = json.loads(action) if action else item
    return result


def _value(text: str, at: int, plan: Plan) -> tuple[str, int]:
    """The rewritten value that starts at ``at``, and where it ended."""
    if text[at] == "{":
        return _object(text, at, plan)
    inner = plan.get("*")
    if text[at] == "[" and isinstance(inner, Mapping):
        return _array(text, at, inner)
    end = _skip(text, at)
    return text[at:end], end


def _object(text: str, at: int, plan: Plan) -> tuple[str, int]:
    out: list[str] = []
    here = first = _space(text, at + 1)
    done, more = at + 1, text[here] != "}"
    while more:
        lead, member = text[done:here], here
        if text[member] != '"':
            raise ValueError("not JSON")
        key, here = json.decoder.scanstring(text, member + 1)  # type: ignore[attr-defined]
        here = _space(text, here)
        if text[here] != ":":
            raise ValueError("not JSON")
        value = _space(text, here + 1)
        action = plan.get(key, plan.get("*", ""))
        if isinstance(action, Mapping):
            changed, done = _value(text, value, action)
        else:
            done = _skip(text, value)
            changed = action or text[value:done]
        if action is not None:
            out += [lead if out else text[at + 1 : first], text[member:value], changed]
        here, more = _next(text, done, "}")
    return "".join(["{", *out, text[done:here], "}"]), here + 1


def _array(text: str, at: int, plan: Plan) -> tuple[str, int]:
    out: list[str] = []
    here = _space(text, at + 1)
    done, more = at + 1, text[here] != "]"
    while more:
        out.append(text[done:here])
        changed, done = _value(text, here, plan)
        out.append(changed)
        here, more = _next(text, done, "]")
    return "".join(["[", *out, text[done:here], "]"]), here + 1


def _next(text: str, done: int, closing: str) -> tuple[int, bool]:
    """Where the next item or the closing bracket is, and whether there is a next item."""
    here = _space(text, done)
    if text[here] == ",":
        return _space(text, here + 1), True
    if text[here] != closing:
        raise ValueError("not JSON")
    return here, False


def _skip(text: str, at: int) -> int:
    if text[at] == "[" and (numbers := _NUMBERS.match(text, at)):
        return numbers.end()
    if text[at] == '"':
        return json.decoder.scanstring(text, at + 1)[1]  # type: ignore[attr-defined]
    return _standard.raw_decode(text, at)[1]


def _space(text: str, at: int) -> int:
    if at < len(text) and text[at] not in _SPACES:
        return at
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]
