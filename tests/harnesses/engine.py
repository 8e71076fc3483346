"""A scripted engine that answers chat completions as vLLM does, down to the token ids, without a model.

It renders what it is sent with a chat template, tokenises it with a real tokenizer, and "samples" a script: read file
after file by tool calls, then say so. A call without tools is one for a title or a summary. Of every call it keeps the
ids that it saw and sent: ``served``, against which an import is compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
from aiohttp import web
from tokenizers import Tokenizer

from tests.scripted_engine import on_a_loop

TOKENIZER = Path(__file__).parents[2] / "mwjax" / "quickstart" / "data" / "tokenizer.json"
TEMPLATE = Path(__file__).parents[1] / "fixtures" / "templates" / "chatml.jinja"
END = "<|im_end|>"
SUBTASK = "SUBTASK: say how many villages there are in the list."

Quirk = Literal["refused", "cut", "thinks", "compact", "spelled"]


@dataclass
class Served:
    """One call as the engine saw and answered it. ``outcome``: "whole", "cut" (the stream broke off after these ids) or
    "refused" (503; nothing was sampled). ``kind``: "act", "help" (a sub-agent acts), "summary" or "title"."""

    kind: str
    outcome: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    messages: list[dict[str, Any]]
    answer: str
    quirk: str | None = None


@dataclass
class Answer:
    """``parts``: (what a delta calls it, text) in the order sampled; "" is text that no delta shows, such as a tag."""

    kind: str
    parts: list[tuple[str, str]]
    call: dict[str, str] | None = None
    quirk: Quirk | None = None

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.parts)

    def said(self, name: str) -> str:
        return "".join(text for part, text in self.parts if part == name)


def logprob(id: int, place: int) -> float:
    return -((id * 31 + place) % 251) / 128


@dataclass
class Engine:
    """``folder`` holds file1.txt to file``files``.txt. ``quirks``: what is special about the n-th call with tools, from
    1: "refused" with 503, "cut" in the middle of its stream, "thinks" first, "compact" spelling of the tool call's
    arguments, a word "spelled" in other tokens than the tokenizer would. ``delegates``: hands a task to a sub-agent
    after the first file."""

    folder: str
    files: int
    quirks: Mapping[int, Quirk] = field(default_factory=dict)
    delegates: bool = False
    served: list[Served] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    reads: int = 0
    acts: int = 0
    delegated: bool = False

    def __post_init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(TOKENIZER))
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(TEMPLATE.read_text("utf-8"))

    # ---- what the model sees and says

    def prompt_ids(self, request: Mapping[str, Any]) -> list[int]:
        text = self._template.render(
            messages=[_for_template(each) for each in request["messages"]],
            tools=request.get("tools") or None,
            add_generation_prompt=True,
        )
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def answer(self, request: Mapping[str, Any]) -> Answer:
        messages = request["messages"]
        names = [tool["function"]["name"] for tool in request.get("tools") or ()]
        system = "\n".join(text_of(each) for each in messages if each["role"] == "system")
        users = [text_of(each) for each in messages if each["role"] == "user"]
        asked = users[-1]
        in_text = not names and "<tools>" in system
        if "title generator" in system:
            return Answer("title", [("content", "Villages and the goods that they sell")])
        snapshot = "state_snapshot" in system + asked and not asked.startswith("<state_snapshot>")
        if snapshot or (not names and not in_text and "summ" in (system + asked).lower()):
            said = f"Summary {len(self.served)}: the files up to {self.reads} of {self.files} were read; go on."
            return Answer("summary", [("content", f"<state_snapshot>{said}</state_snapshot>" if snapshot else said)])
        if users[0].endswith(SUBTASK):
            return self._help(messages, names)
        return self._act(names, in_text)

    def _help(self, messages: list[dict[str, Any]], names: list[str]) -> Answer:
        """As the sub-agent, which looks at one file too."""
        if messages[-1]["role"] == "tool":
            return Answer("help", [("content", f"There are {self.files} villages in all, as the list says.")])
        name, member = _reader(names)
        arguments = {member: f"{self.folder}/file1.txt"}
        return self._calling([], "I look at the list of villages.", name, arguments, None, False, kind="help")

    def _act(self, names: list[str], in_text: bool) -> Answer:
        self.acts += 1
        quirk = self.quirks.get(self.acts)
        thought = [("", "<think>\n"), ("reasoning_content", f"Step {self.acts} is easy."), ("", "\n</think>\n")]
        parts = thought if quirk == "thinks" else []
        if self.delegates and not self.delegated and self.reads == 1:
            self.delegated = True
            name, kind = ("task", "general") if "task" in names else ("agent", "general-purpose")
            arguments = {"description": "Count villages", "prompt": SUBTASK, "subagent_type": kind}
            return self._calling(parts, f"Step {self.acts}: somebody else counts.", name, arguments, quirk, in_text)
        if self.reads == self.files:
            said = f"All {self.files} files are read in {self.acts} steps: the last village sells rope."
            return Answer("act", [*parts, ("content", said)], quirk=quirk)
        said = f"Step {self.acts}: the village of file {self.reads + 1} comes next."
        name, member = _reader(names)
        path = f"{self.folder}/file{self.reads + 1}.txt"
        if quirk not in ("refused", "cut"):
            self.reads += 1
        return self._calling(parts, said, name, {member: path}, quirk, in_text)

    def _calling(
        self,
        parts: list[tuple[str, str]],
        said: str,
        name: str,
        arguments: dict[str, str],
        quirk: Quirk | None,
        in_text: bool,
        kind: str = "act",
    ) -> Answer:
        spelt = json.dumps(arguments, separators=(",", ":") if quirk == "compact" else None)
        sampled = f'\n<tool_call>\n{{"name": "{name}", "arguments": {spelt}}}\n</tool_call>'
        if in_text:
            return Answer(kind, [*parts, ("content", said + sampled)], quirk=quirk)
        return Answer(kind, [*parts, ("content", said), ("", sampled)], {"name": name, "arguments": spelt}, quirk)

    def sampled_ids(self, answer: Answer) -> list[int]:
        text = answer.text + END
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if answer.quirk == "spelled":
            (whole,), halves = self._encode(" village"), [*self._encode(" vil"), *self._encode("lage")]
            at = ids.index(whole)
            ids[at : at + 1] = halves
        assert self._tokenizer.decode(ids, skip_special_tokens=False) == text
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def piece(self, id: int) -> str:
        return self._tokenizer.decode([id], skip_special_tokens=False)

    # ---- the server

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "scripted", "owned_by": "vllm"}]})
        if request.path != "/v1/chat/completions":
            self.others.append(f"{request.method} {request.path}")
            return web.json_response({"error": {"message": "there is no such endpoint"}}, status=404)
        payload = json.loads(await request.read())
        answer = self.answer(payload)
        ids = self.sampled_ids(answer)
        outcome = answer.quirk if answer.quirk in ("refused", "cut") else "whole"
        kept = {"refused": 0, "cut": len(ids) // 2, "whole": len(ids)}[outcome]
        served = Served(
            answer.kind,
            outcome,
            self.prompt_ids(payload),
            ids[:kept],
            [logprob(id, place) for place, id in enumerate(ids[:kept])],
            payload["messages"],
            answer.text,
            answer.quirk,
        )
        number = len(self.served)
        self.served.append(served)
        if outcome == "refused":
            return web.json_response({"error": {"message": "the engine is busy", "code": 503}}, status=503)
        base = {"id": f"chatcmpl-{number}", "created": 1700000000, "model": payload["model"]}
        if not payload.get("stream"):
            return web.json_response(self._whole(base, payload, answer, served))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in self._chunks({**base, "object": "chat.completion.chunk"}, payload, answer, served):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if outcome == "cut":
            request.transport.close()
            return response
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _usage(self, served: Served) -> dict[str, int]:
        prompt, completion = len(served.prompt_ids), len(served.completion_ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _logprobs(self, served: Served, place: int) -> list[dict[str, Any]]:
        id = served.completion_ids[place]
        return [{"token": self.piece(id), "logprob": served.logprobs[place], "bytes": None, "top_logprobs": []}]

    def _whole(
        self, base: dict[str, Any], payload: Mapping[str, Any], answer: Answer, served: Served
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.said("content"), "tool_calls": []}
        message["reasoning_content"] = answer.said("reasoning_content") or None
        if answer.call is not None:
            message["tool_calls"] = [{"id": _call_id(base), "type": "function", "function": answer.call}]
        places = range(len(served.completion_ids))
        every = [entry for place in places for entry in self._logprobs(served, place)]
        wants = payload.get("return_token_ids")
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": every} if payload.get("logprobs") else None,
            "finish_reason": "tool_calls" if answer.call else "stop",
            "token_ids": served.completion_ids if wants else None,
        }
        ids = served.prompt_ids if wants else None
        usage = self._usage(served)
        return {**base, "object": "chat.completion", "choices": [choice], "usage": usage, "prompt_token_ids": ids}

    def _chunks(
        self, base: dict[str, Any], payload: Mapping[str, Any], answer: Answer, served: Served
    ) -> Iterator[dict[str, Any]]:
        """A chunk for every token. Of a tool call, its name and arguments come with the token that ends it."""
        wants = payload.get("return_token_ids")
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield {**base, "choices": [opening], "prompt_token_ids": served.prompt_ids if wants else None}
        begin, shown = 0, answer.text
        for place, id in enumerate(served.completion_ids):
            end = begin + len(self.piece(id))
            delta: dict[str, Any] = _shown(answer, begin, end)
            if answer.call is not None and begin < len(shown) <= end:
                call = {"index": 0, "id": _call_id(base), "type": "function", "function": answer.call}
                delta["tool_calls"] = [call]
            begin = end
            last = served.outcome == "whole" and place == len(served.completion_ids) - 1
            choice = {
                "index": 0,
                "delta": delta,
                "logprobs": {"content": self._logprobs(served, place)} if payload.get("logprobs") else None,
                "finish_reason": ("tool_calls" if answer.call else "stop") if last else None,
                "token_ids": [id] if wants else None,
            }
            if delta or last or wants or payload.get("logprobs"):
                yield {**base, "choices": [choice]}
        if served.outcome == "whole" and (payload.get("stream_options") or {}).get("include_usage"):
            yield {**base, "choices": [], "usage": self._usage(served)}


def _shown(answer: Answer, begin: int, end: int) -> dict[str, str]:
    """What the characters from ``begin`` to ``end`` of the sampled text are called in a delta."""
    found: dict[str, str] = {}
    at = 0
    for name, text in answer.parts:
        piece = text[max(begin - at, 0) : max(end - at, 0)]
        if name and piece:
            found[name] = piece
        at += len(text)
    return found


def _reader(names: list[str]) -> tuple[str, str]:
    """What a harness calls its tool for reading a file, and the argument that names it."""
    return ("read", "filePath") if "read" in names else ("read_file", "file_path")


def _call_id(base: Mapping[str, Any]) -> str:
    return f"call-{base['id']}"


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content or ())


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM hands messages to a template: parts of text joined, tool arguments parsed."""
    result = {**message, "content": text_of(message)}
    result["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"] or "{}")}}
        for call in message.get("tool_calls") or ()
    ]
    return result


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """The address of the engine, on loopback, while the block runs."""

    async def start() -> web.ServerRunner:
        server = web.Server(engine.handle, access_log=None)
        runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    with on_a_loop() as loop:
        runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
