"""Chat templates: Jinja, in its sandbox, with what Hugging Face templates expect beyond it: ``tojson``,
``raise_exception``, ``{% break %}`` and ``{% generation %}``."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What parses and runs templates."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    return made


def reads_parts(template: str) -> bool:
    """Whether a template goes through the parts of a content, and so wants a list, not a string."""
    loops = [node.iter for node in environment().parse(template).find_all(jinja2.nodes.For)]
    checks = "is string" in template or "is not string" in template
    return not checks and any(_names_content(each) for each in loops)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what the model wrote; its text is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _names_content(node: jinja2.nodes.Node) -> bool:
    while isinstance(node, jinja2.nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name == "content"
