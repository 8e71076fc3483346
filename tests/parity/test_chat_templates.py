"""Chat templates against transformers: our own, and those that trl ships (1.16.0 has 66) where it is installed.

trl itself is not imported, so ``pip install --no-deps trl`` is enough.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import Tokenizer

pytest.importorskip("transformers")
from transformers.utils.chat_template_utils import render_jinja_template

from mwjax.quickstart import tokenizer_path
from mwjax.rollouts.rendering import Rendering, RenderingError

pytestmark = pytest.mark.parity

OWN = Path(__file__).parents[1] / "fixtures" / "templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads <a> file & more: é",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
CALL = {"id": "c1abcdefg", "type": "function", "function": {"name": "read", "arguments": {"path": "é.txt"}}}
WITH_TOOLS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Go"},
    {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1abcdefg", "name": "read", "content": "rope"},
    {"role": "assistant", "content": "Rope.", "reasoning_content": "So it is."},
    {"role": "user", "content": "Sure?"},
]
PLAIN = [WITH_TOOLS[1], {"role": "assistant", "content": "Rope."}, WITH_TOOLS[5]]


def templates():
    found = sorted(OWN.glob("*.jinja"))
    trl = importlib.util.find_spec("trl")
    for place in trl.submodule_search_locations if trl is not None and trl.submodule_search_locations else ():
        found += sorted((Path(place) / "chat_templates").glob("*.jinja"))
    return found


@pytest.mark.parametrize("path", templates(), ids=lambda path: path.stem)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(("messages", "tools"), [(WITH_TOOLS, [TOOL]), (WITH_TOOLS[:2], []), (PLAIN, [])])
def test_a_template_renders_as_in_transformers(path, messages, tools, add_generation_prompt):
    rendering = Rendering(path.read_text("utf-8"), Tokenizer.from_file(str(tokenizer_path())), SPECIAL)
    try:
        found = rendering.text(messages, tools, add_generation_prompt=add_generation_prompt)
    except RenderingError:
        found = None
    expected = None
    for parsed in (True, False):  # arguments of tool calls, for templates that want them as text
        given = [rendering._message(message, parsed) for message in messages]  # what engines make of messages before
        try:
            ((expected,), _) = render_jinja_template(
                [given],
                tools=tools or None,
                chat_template=rendering.template,
                add_generation_prompt=add_generation_prompt,
                **SPECIAL,
            )
        except TypeError:
            continue
        except Exception:  # of many types: the template's own refusals among them
            pass
        break
    assert found == expected
