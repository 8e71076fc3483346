"""Chat messages in one form: OpenAI's, with text in one string, whatever API or program wrote them.

``{"role", "content": str, "reasoning_content", "tool_calls": [{"id", "type", "function": {"name", "arguments"}}],
"tool_call_id", "name"}``; what is empty is left out, but for ``content``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mwjax.rollouts.errors import RecordError

Message = dict[str, Any]

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"})


def message(
    role: str,
    content: str = "",
    *,
    reasoning: str | None = None,
    calls: Iterable[Mapping[str, Any]] = (),
    tool_call_id: Any = None,
    name: Any = None,
) -> Message:
    result: Message = {"role": role, "content": content}
    if reasoning:
        result["reasoning_content"] = reasoning
    if calls := list(calls):
        result["tool_calls"] = calls
    if tool_call_id is not None:
        result["tool_call_id"] = str(tool_call_id)
    if isinstance(name, str):
        result["name"] = name
    return result


def listed(value: Any) -> list[Any]:
    """The list, or an empty one where there is none."""
    return value if isinstance(value, list) else []


def tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """``arguments``: a JSON string as the model wrote it, or an object."""
    function = {"name": str(name), "arguments": arguments if arguments is not None else {}}
    return {"id": str(call_id), "type": "function", "function": function}


def text_of(content: Any, field: str) -> str:
    """The text of a content: a string, null, or parts, which engines join by line breaks. Raises RecordError for parts
    that are no text: a record of token ids cannot hold them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RecordError(field, "is neither text nor a list of parts")
    texts = []
    for place, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if (kind is None or (isinstance(kind, str) and kind in _TEXT_PARTS)) and isinstance(text, str):
            texts.append(text)
        else:
            raise RecordError(f"{field}[{place}]", f"is a part of kind {kind!r}; only text can become token ids")
    return "\n".join(texts)


def from_openai(value: Any, field: str) -> Message:
    """A message of the chat completions API. Raises RecordError."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise RecordError(field, "is no chat message: it has no role")
    reasoning = next(
        (value[key] for key in ("reasoning_content", "reasoning", "thinking") if isinstance(value.get(key), str)), None
    )
    if reasoning is None:  # as OpenRouter writes it
        details = (each for each in listed(value.get("reasoning_details")) if isinstance(each, dict))
        reasoning = "".join(each["text"] for each in details if isinstance(each.get("text"), str))
    calls = []
    for place, call in enumerate(listed(value.get("tool_calls"))):
        function = call.get("function", call) if isinstance(call, dict) else None  # verifiers' have no such member
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordError(f"{field}.tool_calls[{place}]", "is no function call")
        calls.append(tool_call(call.get("id"), function["name"], function.get("arguments")))
    old = value.get("function_call")
    if isinstance(old, dict) and isinstance(old.get("name"), str):
        calls.append(tool_call("", old["name"], old.get("arguments")))
    role = "tool" if value["role"] == "function" else value["role"]
    return message(
        role,
        text_of(value.get("content"), f"{field}.content"),
        reasoning=reasoning,
        calls=calls,
        tool_call_id=value.get("tool_call_id"),
        name=value.get("name"),
    )


def from_anthropic(value: Any, field: str) -> list[Message]:
    """The messages that one of the messages API stands for: every tool result becomes a message of its own, before the
    text beside it. Raises RecordError."""
    if not isinstance(value, dict) or value.get("role") not in ("user", "assistant", "system"):
        raise RecordError(field, "is no message: its role is neither user nor assistant")
    content = value.get("content")
    if content is None or isinstance(content, str):
        return [message(value["role"], content or "")]
    if not isinstance(content, list):
        raise RecordError(f"{field}.content", "is neither text nor a list of blocks")
    texts: list[str] = []
    reasoning: list[str] = []
    calls, results = [], []
    for place, block in enumerate(content):
        where = f"{field}.content[{place}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(str(block.get("text") or ""))
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            calls.append(tool_call(block.get("id"), block.get("name"), block.get("input")))
        elif kind == "tool_result":
            shown = text_of(block.get("content"), f"{where}.content")
            results.append(message("tool", shown, tool_call_id=block.get("tool_use_id")))
        elif kind == "compaction":
            raise RecordError(where, "is a compaction made on the server: what the model saw instead is not in the log")
        elif kind != "redacted_thinking":
            raise RecordError(where, f"is a block of kind {kind!r}; only text can become token ids")
    if value["role"] != "user" or texts or not results:
        between = "" if value["role"] == "assistant" else "\n"  # an answer with citations is one text in many blocks
        results.append(message(value["role"], between.join(texts), reasoning="\n".join(reasoning), calls=calls))
    return results


def from_responses(items: Any, field: str) -> list[Message]:
    """The messages of the responses API's items; what one response holds (reasoning, text, calls) is one message.
    Raises RecordError."""
    if isinstance(items, str):
        return [message("user", items)]
    if not isinstance(items, list):
        raise RecordError(field, "is neither text nor a list of items")
    result: list[Message] = []
    open_answer: Message | None = None
    for place, item in enumerate(items):
        where = f"{field}[{place}]"
        kind = item.get("type", "message" if "role" in item else None) if isinstance(item, dict) else None
        if kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
            shown = item.get("output")
            open_answer = None
            text = shown if isinstance(shown, str) else _output_text(shown, f"{where}.output")
            result.append(message("tool", text, tool_call_id=item.get("call_id")))
            continue
        if kind == "message" and item.get("role") != "assistant":
            open_answer = None
            if not isinstance(item.get("role"), str):
                raise RecordError(where, "is no message: it has no role")
            result.append(message(item["role"], text_of(item.get("content"), f"{where}.content")))
            continue
        if kind not in ("message", "reasoning", "function_call", "custom_tool_call", "local_shell_call"):
            raise RecordError(where, _no_message(kind))
        if open_answer is None or (kind == "reasoning" and (open_answer["content"] or "tool_calls" in open_answer)):
            open_answer = message("assistant")
            result.append(open_answer)
        _add_to_answer(open_answer, kind, item, where)
    return result


def joined(found: Sequence[Message]) -> Message:
    """Several messages that one response holds, as the one turn that they are."""
    calls = [made for each in found for made in each.get("tool_calls", ())]
    thoughts = "\n".join(each["reasoning_content"] for each in found if each.get("reasoning_content"))
    return message("assistant", "".join(each["content"] for each in found), reasoning=thoughts, calls=calls)


def _add_to_answer(answer: Message, kind: str, item: Mapping[str, Any], where: str) -> None:
    if kind == "message":
        answer["content"] += text_of(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        shown = text_of(item.get("content"), f"{where}.content") or text_of(item.get("summary"), f"{where}.summary")
        if shown:
            before = answer.get("reasoning_content")
            answer["reasoning_content"] = f"{before}\n{shown}" if before else shown
    else:
        given = item.get("arguments", item.get("action"))
        arguments = {"input": item.get("input")} if kind == "custom_tool_call" else given
        name = item.get("name") or kind.removesuffix("_call")
        answer.setdefault("tool_calls", []).append(tool_call(item.get("call_id"), name, arguments))


def _output_text(value: Any, field: str) -> str:
    return text_of(value, field) if value is None or isinstance(value, list) else json.dumps(value, ensure_ascii=False)


def _no_message(kind: Any) -> str:
    if kind in ("compaction", "compaction_summary", "context_compaction"):
        return "is an encrypted compaction made on the server: what the model saw instead is not in the log"
    if kind == "item_reference":
        return "points at an item stored on the server, which is not in the log"
    return f"is an item of kind {kind!r}; only messages, reasoning and tool calls can become token ids"


def tools_of(request: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools of a request; ``functions`` is OpenAI's earlier name for them."""
    return function_tools(request.get("tools") or [{"function": each} for each in listed(request.get("functions"))])


def function_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Tool lists of the three APIs in the form of chat completions. Tools that the server runs itself have no schema in
    the request; their name and description stand for them."""
    result = []
    for tool in tools if isinstance(tools, Sequence) and not isinstance(tools, str) else ():
        if not isinstance(tool, dict):
            continue
        if isinstance(tool.get("function"), dict):
            result.append({"type": "function", "function": tool["function"]})
            continue
        function = {
            "name": tool.get("name") or tool.get("type"),
            "description": tool.get("description") or "",
            "parameters": tool.get("parameters") or tool.get("input_schema") or {"type": "object", "properties": {}},
        }
        result.append({"type": "function", "function": function})
    return tuple(result)


def merged_system(messages: Sequence[Message]) -> list[Message]:
    """Leading system and developer messages as one system message: most templates know one, at the beginning."""
    count = 0
    while count < len(messages) and messages[count]["role"] in ("system", "developer"):
        count += 1
    if not count:
        return list(messages)
    texts = [each["content"] for each in messages[:count] if each["content"]]
    return [message("system", "\n\n".join(texts)), *messages[count:]]
