"""Which session a call belongs to, and what of its headers may be written down."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, unquote_plus

from mwjax.rollouts.http_calls import SESSION_HEADERS

KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key", "proxy-authorization", "cookie")
KEPT_REQUEST_HEADERS = (
    "accept",
    "anthropic-beta",
    "anthropic-version",
    "content-encoding",
    "content-type",
    "openai-beta",
    "originator",
    "traceparent",
    "user-agent",
    "x-request-id",
    "x-stainless-retry-count",
)
KEPT_RESPONSE_HEADERS = (
    "content-encoding",
    "content-type",
    "openai-model",
    "openai-version",
    "request-id",
    "retry-after",
    "x-request-id",
)
KEPT_QUERY = ("api-version", "beta")
HIDDEN_SECRET = "[credential]"
SHORTEST_SECRET = 12  # shorter ones are placeholders such as EMPTY, which occur in texts

_CREDENTIAL_HEADER = re.compile(r"(?:authorization|api[-_]?key|access[-_]?key|[-_]token|secret|cookie|password)$")
_WORDS = r"authorization|api.?key|token|secret|cookie|password"
_CREDENTIAL = re.compile(_WORDS, re.IGNORECASE)
# Names are short: looking for the end of a long text at each of its words would take quadratic time.
_CREDENTIAL_MEMBER = re.compile(rf'"[^"]{{0,200}}(?:{_WORDS})[^"]{{0,200}}"\s*:\s*"(?:\w+ )?([^"]+)', re.IGNORECASE)
_PREFIX = re.compile(r"/session/([^/?]+)(?=/)")


class Session(NamedTuple):
    """``source`` says where the name comes from: ``header NAME``, ``path``, ``key`` or ``none``."""

    name: str | None
    source: str


def without_prefix(target: str) -> tuple[str, str | None]:
    """A request target ``/session/NAME/v1/...`` as ``/v1/...`` and NAME; any other as it is and None."""
    found = _PREFIX.match(target)
    return (target[found.end() :], unquote(found.group(1))) if found else (target, None)


def session(headers: Mapping[str, str], path_name: str | None, extra: Sequence[str] = ()) -> Session:
    """The session of a call: by ``extra`` headers, else by path prefix, both of which somebody chose; else by a header
    that harnesses send by themselves, which may name every sub-agent apart; else by API key, of which only a hash is
    used. ``headers`` has lower-case names."""
    found = {name: value for name in (*extra, *SESSION_HEADERS) if (value := headers.get(name, "").strip())}
    for name in extra:
        if name in found:
            return Session(found[name], f"header {name}")
    if path_name is not None:
        return Session(path_name, "path")
    for name, value in found.items():
        return Session(value, f"header {name}")
    for key in _named(headers, KEY_HEADERS):
        return Session("key-" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:12], "key")
    return Session(None, "none")


def secrets(headers: Mapping[str, str]) -> list[str]:
    """The credentials in these headers, without the name of their scheme."""
    return _named(headers, [*KEY_HEADERS, *(name for name in headers if _CREDENTIAL_HEADER.search(name))])


def _named(headers: Mapping[str, str], names: Sequence[str]) -> list[str]:
    found = [headers[name].strip() for name in dict.fromkeys(names) if name in headers]
    return [value.split(None, 1)[-1] for value in found if value]


def without_secrets(value: Any, hidden: Sequence[str]) -> Any:
    """A copy of plain JSON values with HIDDEN_SECRET wherever a string or name holds one of ``hidden``."""
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, HIDDEN_SECRET)
        return value
    if isinstance(value, dict):
        return {without_secrets(key, hidden): without_secrets(item, hidden) for key, item in value.items()}
    return [without_secrets(item, hidden) for item in value] if isinstance(value, list) else value


def carried_secrets(payload: Any) -> list[str]:
    """The credentials for other servers that a request's own payload can hold: those of remote MCP tools."""
    found: list[str] = []
    if not isinstance(payload, dict):
        return found
    for place in ("tools", "mcp_servers"):
        entries = payload.get(place)
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                headers = entry.get("headers")
                named = {**entry, **(headers if isinstance(headers, dict) else {})}
                found += [
                    value.split(None, 1)[-1]
                    for name, value in named.items()
                    if isinstance(value, str) and value.strip() and _CREDENTIAL.search(name)
                ]
    return found


def carried_secrets_in_text(text: str) -> list[str]:
    """``carried_secrets`` of a payload that is not whole, by the names of members alone."""
    return _CREDENTIAL_MEMBER.findall(text)


def kept(headers: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: headers[name] for name in names if name in headers}


def kept_target(target: str) -> str:
    """The request target with only the known harmless parameters: a query may carry a key."""
    path, _, query = target.partition("?")
    kept_pairs = [pair for pair in query.split("&") if pair.partition("=")[0] in KEPT_QUERY]
    return path + ("?" + "&".join(kept_pairs) if kept_pairs else "")


def query_secrets(target: str) -> list[str]:
    """The values of a query that may be credentials, as they are and as they were sent."""
    pairs = [pair.partition("=") for pair in target.partition("?")[2].split("&")]
    values = [value for name, _, value in pairs if value and name not in KEPT_QUERY]
    return [form for value in values for form in dict.fromkeys((value, unquote(value), unquote_plus(value)))]
