"""Messages as token ids: a model's chat template and tokenizer, as an engine would apply them at one call.

For logs without token ids, and to check whether rendering recorded messages gives the ids that were recorded.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.meta
import numpy as np
from tokenizers import Tokenizer

from mwjax.rollouts.chat_templates import environment, raise_exception, reads_parts
from mwjax.rollouts.errors import file_error

Message = Mapping[str, Any]

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
CACHED_SEGMENTS = 1 << 16

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class RenderingError(ValueError):
    """A template or tokenizer cannot be loaded, or does not render these messages."""


class RenderedTurn(NamedTuple):
    """One call. prompt_ids, completion_ids: int32. ``text`` is prompt and completion as rendered. ``note`` says where
    the template does not simply continue its prompt: ``retokenised`` (the text does, its ids do not) or ``reopened``
    (the completion starts before the end of the generation prompt, which the template writes otherwise once the answer
    is there)."""

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    text: str
    note: str | None


@dataclass(frozen=True, eq=False)
class Rendering:
    """A chat template and the tokenizer that goes with it.

    ``special``: names such as ``bos_token`` that the template may use, and ``options`` of its own, such as
    ``enable_thinking``. ``stops``: ids that end a completion; where the model's files name none, every special token
    does. ``source``: where it was loaded from, for messages.
    """

    template: str
    tokenizer: Tokenizer
    special: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    stops: frozenset[int] = frozenset()
    source: str = ""

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool,
        options: Mapping[str, Any] | None = None,
        now: float | None = None,
    ) -> str:
        """The rendered conversation. ``options``: variables of the template, before those of the rendering. ``now``:
        seconds since 1970 for ``strftime_now``, the time of the call; without it, the time of rendering.

        Raises:
          RenderingError: the template refuses the messages or fails on them.
        """
        try:
            moment = datetime.datetime.now() if now is None else datetime.datetime.fromtimestamp(now)
        except (ValueError, OverflowError, OSError) as error:
            raise RenderingError(f"the time of the call is no date: {error}") from None

        def rendered(parsed: bool) -> str:
            shown = [self._message(message, parsed) for message in messages]
            return self._compiled.render({**variables, "messages": shown})

        variables = {
            **self.special,
            **self.options,
            **(options or {}),
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": moment.strftime,
            "raise_exception": raise_exception,
        }
        try:
            try:
                return rendered(parsed=True)
            except TypeError:  # a template that puts arguments into its text as they come (DeepSeek's)
                if not any(message.get("tool_calls") for message in messages):
                    raise
                return rendered(parsed=False)
        except jinja2.TemplateError as error:
            raise RenderingError(f"the chat template refuses the messages: {error}") from None
        except Exception as error:  # a template can fail in any way
            raise RenderingError(f"the chat template fails on the messages: {type(error).__name__}: {error}") from None

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of rendered text; special tokens in it are read as such, none are added. Half of a surrogate pair,
        which JSON can hold and UTF-8 cannot, becomes U+FFFD."""
        text = _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
        if self._whole:
            return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        # Text between special tokens is tokenised on its own, so what earlier calls share is looked up.
        pieces = self._added.split(text)
        ids = [self._segment(piece) for piece in pieces if piece]
        return np.concatenate(ids) if ids else np.zeros(0, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def turn(
        self,
        messages: Sequence[Message],
        answer: Message,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        truncated: bool = False,
        options: Mapping[str, Any] | None = None,
        now: float | None = None,
    ) -> RenderedTurn:
        """What the engine saw at this call, and what it must have sampled for the answer to read as it does.

        The prompt is rendered as the template would at this call (it may drop earlier thinking, for example). The
        completion is what rendering with the answer adds, up to the token that ends it: what the template writes after
        that was not sampled, and an answer that was cut off (``truncated``) has no such token.

        Raises:
          RenderingError: the template refuses the messages, or rendering with the answer does not continue the prompt.
        """
        settings: dict[str, Any] = {"options": options, "now": now}
        prompt = self.text(messages, tools, add_generation_prompt=True, **settings)
        whole = self.text([*messages, answer], tools, add_generation_prompt=False, **settings)
        note = None
        if not whole.startswith(prompt):
            history = self.text(messages, tools, add_generation_prompt=False, **settings)
            shared = _shared(prompt, whole)
            if shared < len(history) or shared == 0 or not whole.startswith(history):
                raise RenderingError(
                    "with the answer, the chat template renders the earlier messages otherwise, from "
                    f"{_excerpt(prompt, shared)} to {_excerpt(whole, shared)}: the prompt of this call cannot be told"
                )
            prompt, note = prompt[:shared], "reopened"
        prompt_ids, whole_ids = self.encode(prompt), self.encode(whole)
        if np.array_equal(whole_ids[: len(prompt_ids)], prompt_ids):
            completion = whole_ids[len(prompt_ids) :]
        else:
            completion, note = self.encode(whole[len(prompt) :]), note or "retokenised"
        completion = self._ended(completion, truncated)
        return RenderedTurn(prompt_ids, completion, prompt + self.decode(completion.tolist()), note)

    def _ended(self, ids: np.ndarray, truncated: bool) -> np.ndarray:
        """Without what the template writes after the token that ends the completion, or from it on."""
        ends = np.flatnonzero(np.isin(ids, self._stop_ids))
        if not len(ends):
            return ids
        return ids[: ends[-1]] if truncated else ids[: ends[-1] + 1]

    def _message(self, message: Message, parsed: bool) -> dict[str, Any]:
        """As engines hand it to the template: text in one string (in parts for templates that read parts), arguments
        parsed (or as JSON), and the reasoning under all names that templates use."""
        result = dict(message)
        if result["role"] == "developer" and "developer" not in self.template:
            result["role"] = "system"  # many templates drop roles that they do not know
        content = result.get("content")
        content = "" if content is None else content
        result["content"] = [{"type": "text", "text": content}] if self._reads_parts and content else content
        if reasoning := result.get("reasoning_content"):
            result.update(reasoning=reasoning, thinking=reasoning)
        if result.get("tool_calls"):
            result["tool_calls"] = [_with_arguments(call, parsed) for call in result["tool_calls"]]
        else:
            result.pop("tool_calls", None)
        return result

    def _segment(self, text: str) -> np.ndarray:
        ids = self._segments.get(text)
        if ids is None:
            ids = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
            if len(self._segments) >= CACHED_SEGMENTS:
                self._segments.clear()
            self._segments[text] = ids
        return ids

    @cached_property
    def _segments(self) -> dict[str, np.ndarray]:
        return {}

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return environment().from_string(self.template)

    @cached_property
    def _reads_parts(self) -> bool:
        return reads_parts(self.template)

    @cached_property
    def _stop_ids(self) -> np.ndarray:
        special = [token_id for token_id, token in self._added_tokens.items() if token.special]
        return np.array(sorted(self.stops) or special, np.int64)

    @cached_property
    def _added_tokens(self) -> dict[int, Any]:
        return self.tokenizer.get_added_tokens_decoder()

    @cached_property
    def _added(self) -> re.Pattern[str]:
        names = sorted((token.content for token in self._added_tokens.values()), key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, names)) + ")")

    @cached_property
    def _whole(self) -> bool:
        """Whether a text must be tokenised in one go: pieces would not give the same ids, or there is nothing to cut
        at."""
        tokens = self._added_tokens.values()
        if not tokens or any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in tokens):
            return True
        before = self.tokenizer.pre_tokenizer
        return before is not None and b'"first"' in before.__getstate__()


def load(path: str | os.PathLike[str], template: str | os.PathLike[str] | None = None) -> Rendering:
    """The rendering of a local model folder, or of a tokenizer.json with ``template`` from a file of its own.

    In a folder: ``tokenizer.json``; the template from ``chat_template.jinja``, ``chat_template.json`` or
    ``tokenizer_config.json`` unless ``template`` names a file; the tokens that end a completion from
    ``generation_config.json`` and ``tokenizer_config.json``, which are read beside a tokenizer.json too.

    Raises:
      RenderingError: a file is missing or not what it should be; the message says which and what to do.
    """
    place = Path(path).expanduser()
    folder = place if place.is_dir() else None
    file = place / "tokenizer.json" if folder else place
    try:
        tokenizer = Tokenizer.from_str(file.read_text("utf-8"))
    except OSError as error:
        advice = "; a folder needs tokenizer.json" if folder else ""
        raise RenderingError(f"{file_error('read', file, error)}{advice}") from None
    except Exception as error:  # the library's own exception type
        raise RenderingError(f"{file} is not a tokenizer.json: {error}") from None
    # Beside a tokenizer.json that is given alone there may be the others of its model.
    named_tokens = file.with_name("tokenizer_config.json")
    config, generation = _json(named_tokens), _json(file.with_name("generation_config.json"))
    special: dict[str, str] = {}
    for name, value in config.items():
        word = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(word, str):
            special[name] = word
    stops = generation.get("eos_token_id")
    ids = {each for each in (stops if isinstance(stops, list) else [stops]) if isinstance(each, int)}
    if (named := tokenizer.token_to_id(special.get("eos_token", ""))) is not None:
        ids.add(named)
    text = _read_text(Path(template).expanduser()) if template is not None else _folder_template(folder, config)
    if text is None:
        where = f"{place} has no chat template" if folder else f"{place} is a tokenizer without a chat template"
        raise RenderingError(f"{where}; give one with --template FILE.jinja")
    try:
        used = jinja2.meta.find_undeclared_variables(environment().parse(text))
    except jinja2.TemplateSyntaxError as error:
        raise RenderingError(f"the chat template ({template or place}) line {error.lineno}: {error.message}") from None
    unknown = sorted(name for name in used - special.keys() if name in ("bos_token", "eos_token"))
    if unknown and not named_tokens.exists():
        raise RenderingError(
            f"the chat template ({template or place}) writes {' and '.join(unknown)}, which {place} does not name: "
            "put the model's tokenizer_config.json beside tokenizer.json"
        )
    return Rendering(text, tokenizer, special, stops=frozenset(ids), source=str(path))


def _folder_template(folder: Path | None, config: Mapping[str, Any]) -> str | None:
    if folder is None:
        return None
    for name in TEMPLATE_FILES:
        if (folder / name).exists():
            return _json(folder / name).get("chat_template") if name.endswith(".json") else _read_text(folder / name)
    given = config.get("chat_template")
    if isinstance(given, list):  # several under names
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        return named.get("tool_use") or named.get("default")
    return given if isinstance(given, str) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise RenderingError(str(file_error("read", path, error))) from None
    except UnicodeDecodeError:
        raise RenderingError(f"{path} is not UTF-8 text") from None


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise RenderingError(f"{path} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _with_arguments(call: Mapping[str, Any], parsed: bool) -> dict[str, Any]:
    """Arguments as an object, since engines parse the JSON string before templates see it; or as that string."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str) and parsed:
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments or "{}")
    elif not isinstance(arguments, str) and not parsed:
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": function}


def _shared(left: str, right: str) -> int:
    """Length of the common prefix."""
    differ = (at for at, (a, b) in enumerate(zip(left, right)) if a != b)
    return next(differ, min(len(left), len(right)))


def _excerpt(text: str, at: int) -> str:
    shown = text[at : at + 30]
    return repr(shown + ("..." if len(text) > at + 30 else "")) if shown else "the end"
