"""Reading a run's configuration: a YAML file, dotted ``key=value`` overrides, and errors that say what to do."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pydantic
import yaml
from etils import epath
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mwjax.train import whole_file
from mwjax.train.config import RunConfig


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the file, the key and the reason."""


def load(path: str | None, overrides: Sequence[str] = (), defaults: Sequence[str] = ()) -> RunConfig:
    """The configuration in the YAML file ``path`` (none: only the overrides), changed by ``overrides``.

    overrides: ``"section.key=value"``, the value in YAML (``data.paths=[a.jsonl,b.jsonl]``). defaults: the same, for
    options that neither file nor overrides give.
    Raises ``ConfigError`` on unknown keys (suggesting the right one), wrong types and unreadable files, all at once.
    """
    file = _read(path) if path is not None else {}
    merged = OmegaConf.merge(_dotlist(defaults), file, _dotlist(overrides))
    try:
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path or 'overrides'}: {str(error).splitlines()[0]}") from error
    try:
        return RunConfig.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error, path or "overrides")) from error


def dump(config: RunConfig) -> str:
    """The resolved configuration as YAML; ``load`` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def write(config: RunConfig, path: epath.PathLike) -> None:
    """Puts the resolved configuration into the file ``path``, all of it at once."""
    whole_file.write(path, dump(config))


def changes(path: epath.PathLike, config: RunConfig, keys: Sequence[str]) -> list[str]:
    """What ``config`` has otherwise than the file ``path``, an earlier start's `write`: ``"key: old -> new"``.

    keys: options and sections to look at. A file that is gone or cannot be read, and options it lacks, tell nothing.
    """
    try:
        before = yaml.safe_load(epath.Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []
    old, new = dict(flat(before if isinstance(before, Mapping) else {})), dict(flat(config.model_dump(mode="json")))
    return [
        f"{key}: {_shown(old[key])} -> {_shown(value)}"
        for key, value in new.items()
        if any(within(key, section) for section in keys) and key in old and old[key] != value
    ]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option of nested sections as (dotted key, value)."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def within(key: str, section: str) -> bool:
    """Whether the option ``key`` is ``section`` or lies in it."""
    return key == section or key.startswith(section + ".")


def options(model: type[pydantic.BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Every option as (dotted key, default as YAML, description), in the order of the file."""
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            yield from options(section, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else yaml.safe_dump(field.default, default_flow_style=True)
        yield f"{prefix}{name}", default.removesuffix("...\n").strip(), field.description or ""


def _read(path: str) -> Any:
    try:
        text = epath.Path(path).read_text()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a YAML configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        loaded = OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not OmegaConf.is_dict(loaded):
        raise ConfigError(f"{path}: expected keys and values at the top, as in 'run_dir: runs/first'")
    return loaded


def _dotlist(overrides: Sequence[str]) -> Any:
    given = OmegaConf.create()
    for override in overrides:
        if not re.match(r"[A-Za-z_][\w.]*=", override):
            raise ConfigError(f"override {override!r}: expected key=value, as in optimizer.learning_rate=1e-5")
        try:
            given.merge_with_dotlist([override])
        except yaml.YAMLError as error:
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise ConfigError(f"override {override!r}: the value is not valid YAML: {problem}") from error
        except OmegaConfBaseException as error:
            raise ConfigError(f"override {override!r}: {str(error).splitlines()[0]}") from error
    return given


def _section(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The model class an annotation stands for, be it optional; None for a plain value."""
    choices = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for choice in choices:
        if isinstance(choice, type) and issubclass(choice, pydantic.BaseModel):
            return choice
    return None


def _explain(error: pydantic.ValidationError, source: str) -> str:
    lines = [_explain_one(details, source) for details in error.errors()]
    return "\n".join(dict.fromkeys(lines))


def _explain_one(details: Any, source: str) -> str:
    key = ".".join(str(part) for part in details["loc"])
    kind, value = details["type"], details["input"]
    where = f"{source}: {key}" if key else source
    if kind == "extra_forbidden":
        return f"{where}: unknown key{_suggestion(key)}"
    if kind == "missing":
        description = next((text for name, _, text in options() if name == key), "")
        return f"{where}: required and not given. {description}".rstrip()
    if kind == "value_error":
        return f"{where}: {details['ctx']['error']}"
    reason = details["msg"].removeprefix("Input should be ").replace("a valid i", "an i").replace("a valid ", "a ")
    reason = re.sub(r"^(greater|less)", r"a value \1", reason)
    if kind == "model_type":
        reason = f"a section with the keys {', '.join(name for name, _, _ in options() if name.startswith(key + '.'))}"
    text = f"{where}: expected {reason[0].lower() + reason[1:]}, got {value!r}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", details["ctx"]["expected"])
        close = difflib.get_close_matches(str(value), choices, n=1)
        text += f"; did you mean {close[0]}?" if close else ""
    return text


def _suggestion(key: str) -> str:
    """What to write instead of ``key``: a close key of its section, the right name elsewhere, or its section's keys."""
    known = [name for name, _, _ in options()]
    section, _, last = key.rpartition(".")
    siblings = [name for name in known if section and name.startswith(section + ".")]
    sections = sorted({name.split(".", 1)[0] for name in known if "." in name})
    lasts = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    here = {name.removeprefix(section + "."): name for name in siblings} or dict(zip(sections, sections))
    close = [here[name] for name in difflib.get_close_matches(last, list(here), n=1, cutoff=0.6)]
    close = close or [lasts[name] for name in difflib.get_close_matches(last, list(lasts), n=1, cutoff=0.7)]
    if close:
        return f"; did you mean {close[0]}?"
    if siblings:
        return f"; the keys of {section} are {', '.join(name.removeprefix(section + '.') for name in siblings)}"
    return "; 'mwjax train --keys' lists all of them"
