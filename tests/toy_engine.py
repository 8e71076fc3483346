"""An engine on loopback that speaks as vLLM does and answers what a test has written down, with a toy tokenizer.

Texts are words; a word is one id, unless a test spells it in two. A message is its role's id, its words and END; the
generation prompt is the assistant's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer, decoders, models

from tests.scripted_engine import on_a_loop

END = 1
ROLES = {"system": 2, "user": 3, "assistant": 4, "tool": 5}


class Words:
    """Ids of words, given out as they come, from 10 on."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def ids(self, text: str) -> list[int]:
        return [self.known.setdefault(word, 10 + len(self.known)) for word in text.split()]

    def prompt(self, *messages: tuple[str, str | Sequence[int]]) -> list[int]:
        """The ids of (role, text or ids) messages, and the generation prompt."""
        found: list[int] = []
        for role, said in messages:
            found += [ROLES[role], *(self.ids(said) if isinstance(said, str) else said), END]
        return [*found, ROLES["assistant"]]

    def tokenizer(self) -> Tokenizer:
        """Words come back with a space before them, all but those that begin with "+", which go on with the word."""
        vocabulary = {f"<{role}>": id for role, id in ROLES.items()} | {"<end>": END, "<unknown>": 0}
        for word, id in self.known.items():
            vocabulary[word.removeprefix("+") if word.startswith("+") else " " + word] = id
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
        tokenizer.decoder = decoders.Fuse()
        return tokenizer


def logprobs_of(ids: Sequence[int]) -> list[float]:
    return [-(id % 97) / 64 for id in ids]


def answer(
    name: str,
    prompt: Sequence[int],
    ids: Sequence[int],
    content: str | None = None,
    calls: Sequence[tuple[str, dict[str, Any] | str]] = (),
    finish_reason: str | None = None,
    usage: dict[str, int] | None = None,
) -> dict[str, Any]:
    """A chat completion with what ``return_token_ids`` and ``logprobs`` add to it."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"{name}-{k}",
                "type": "function",
                "function": {"name": tool, "arguments": said if isinstance(said, str) else json.dumps(said)},
            }
            for k, (tool, said) in enumerate(calls)
        ]
    return {
        "id": name,
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": finish_reason or ("tool_calls" if calls else "stop"),
                "token_ids": list(ids),
                "logprobs": {"content": [{"token": str(id), "logprob": p} for id, p in zip(ids, logprobs_of(ids))]},
            }
        ],
        "prompt_token_ids": list(prompt),
        "usage": usage or {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
    }


@contextlib.contextmanager
def answering(answers: list[dict[str, Any] | int]) -> Iterator[str]:
    """The engine's address. It gives the answers in turn; a number is the status of a call that fails."""
    left = iter(answers)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})
        said = next(left)
        if isinstance(said, int):
            return web.json_response({"error": {"message": "busy"}}, status=said)
        return web.json_response(said)

    async def start() -> web.ServerRunner:
        runner = web.ServerRunner(web.Server(handle), handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    with on_a_loop() as loop:
        runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
