"""Several files audited one by one, with the same models, and put side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from etils import epath

from mwjax.audit.comparison import Comparison, compare_audits, compare_models, short_names
from mwjax.audit.consistency import load_models, run
from mwjax.audit.result import AuditResult, to_json


@dataclasses.dataclass(frozen=True)
class ComparedFiles:
    """Audits of several files. names: what each is called; models: what every model says of every file, or None."""

    names: tuple[str, ...]
    results: tuple[AuditResult, ...]
    figures: Comparison
    models: Comparison | None

    @property
    def usable(self) -> bool:
        """Something was audited in every file."""
        return all(result.usable for result in self.results)

    @property
    def any_refused(self) -> bool:
        """Some input was refused."""
        return any(result.any_refused for result in self.results)

    @property
    def strictly_consistent(self) -> bool:
        """What ``--strict`` asks, of every file."""
        return all(result.strictly_consistent for result in self.results)


def compared_json(compared: ComparedFiles) -> dict[str, Any]:
    """The comparison as plain JSON values, with the whole audit of every file under ``audits``."""
    return {
        "names": list(compared.names),
        "comparison": dataclasses.asdict(compared.figures),
        "model_comparison": None if compared.models is None else dataclasses.asdict(compared.models),
        "audits": [to_json(result) for result in compared.results],
    }


def compare(paths: Sequence[epath.PathLike], *, models: Sequence[Any] = (), **options: Any) -> ComparedFiles:
    """Audit files one by one and put the figures side by side.

    models and options: as :func:`mwjax.audit.run` takes them, except ``rows``; a model is loaded once.

    Raises: as :func:`mwjax.audit.run`; ValueError for fewer than two files.
    """
    if len(paths) < 2:
        raise ValueError("a comparison takes two or more files")
    loaded = load_models(paths, models)
    names = short_names(paths)
    results = tuple(run(path, models=loaded, **options) for path in paths)
    scored = [
        (f"{name}: {model.model}" if len(loaded) > 1 else name, model)
        for name, result in zip(names, results)
        for model in result.models
    ]
    return ComparedFiles(
        tuple(names),
        results,
        compare_audits(results, names),
        compare_models([model for _, model in scored], [name for name, _ in scored]) if scored else None,
    )
