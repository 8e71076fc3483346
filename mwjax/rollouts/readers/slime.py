"""Samples of slime (and of miles, its fork): a dump of ``--save-debug-rollout-data``, or the same samples as JSON.

THUDM/slime, slime/utils/types.py (Sample.to_dict; commit 0d234f3e3a83c81b7d37209994e0b994deacbb24) and
slime/observability/rollout_data_utils.py (save_debug_rollout_data; commit
8e3769fc45fea5951b4854ad460bcb371ffa7c09): ``torch.save`` of ``{"rollout_id", "samples": [...]}``. Of a sample are used
``tokens``, ``response_length``, ``loss_mask`` (of the response; all of it where null), ``rollout_log_probs`` (of the
response), ``weight_versions``, ``reward``, ``status``, ``group_index``, ``index``, ``remove_sample`` and
``rollout_id``, which the samples of one compacted rollout share. The file's own ``rollout_id`` is the training step.

The dump is read without torch, and nothing in it is run: whatever is no plain value becomes a mark without meaning.
SGLang's log-probs are of the logits divided by the temperature; the temperature itself is not in the dump.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from typing import Any, NoReturn

from mwjax.rollouts.errors import RecordError, Refusal, file_error
from mwjax.rollouts.fields import described
from mwjax.rollouts.lines import open_binary
from mwjax.rollouts.readers.reader import Head, Item, Options
from mwjax.rollouts.readers.records import Record, json_records
from mwjax.rollouts.readers.rows import Row, read_rows
from mwjax.rollouts.readers.settings import sampling_settings

NAME = "slime"
DESCRIPTION = "samples of slime: data_ROLLOUT.pt of --save-debug-rollout-data, or JSON Lines of Sample.to_dict()"
ZIP_MAGIC = b"PK\x03\x04"


def looks_like(head: Head) -> bool:
    if head.data.startswith(ZIP_MAGIC):
        return b"data.pkl" in head.data
    return any(_is_sample(record) or _is_dump(record) for record in head.records)


def _is_sample(value: Any) -> bool:
    return isinstance(value, dict) and {"tokens", "response_length"} <= value.keys()


def _is_dump(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("samples"), list) and "rollout_id" in value


def read(path: str, options: Options) -> Iterator[Item]:
    with open_binary(path) as handle:
        packed = handle.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    records = _samples(_unpickled(path)) if packed else _from_json(path, options)
    yield from read_rows(path, records, lambda record: [_row(record.value, options)], options)


def _from_json(path: str, options: Options) -> Iterator[Record | Refusal]:
    for record in json_records(path, options):
        if not isinstance(record, Refusal) and _is_dump(record.value):
            yield from _samples(record.value, record.line)
        else:
            yield record


def _samples(dump: Any, line: int = 1) -> Iterator[Record]:
    step = dump.get("rollout_id") if isinstance(dump, dict) else None
    listed = dump.get("samples") if isinstance(dump, dict) else None
    if not isinstance(listed, list):
        advice = "write JSON Lines of its rows instead, tensors as .tolist()"
        raise ValueError(f"the file has no list of samples: it is no dump of --save-debug-rollout-data; {advice}")
    for place, sample in enumerate(listed):
        known = {**sample, "step": step} if isinstance(sample, dict) else sample
        yield Record(line, f"samples[{place}]", known)


def _row(sample: Any, options: Options) -> Row:
    if not _is_sample(sample):
        raise RecordError("", f"is {described(sample)}, must be a sample with tokens and response_length")
    ids, length = sample["tokens"], sample["response_length"]
    if not isinstance(ids, list):
        raise RecordError("tokens", "must be a list of token ids")
    if type(length) is not int or not 0 <= length <= len(ids):
        raise RecordError("response_length", f"is {described(length)}, but there are {len(ids)} tokens")
    prompt = len(ids) - length
    mask = sample.get("loss_mask")
    mask = [1] * length if mask is None else mask
    logprobs = sample.get("rollout_log_probs")
    for field, given in (("loss_mask", mask), ("rollout_log_probs", logprobs)):
        if given is not None and (not isinstance(given, list) or len(given) != length):
            found = len(given) if isinstance(given, list) else described(given)
            raise RecordError(field, f"has {found} entries, response_length is {length}")
    versions = {str(each) for each in sample.get("weight_versions") or ()}
    version = min((int(each) for each in versions if each.isdecimal()), default=None)
    step = "" if sample.get("step") is None else f"step{sample['step']}/"
    name = next((sample[key] for key in ("rollout_id", "session_id", "index") if sample.get(key) is not None), None)
    group = sample.get("group_index")
    reward = sample.get("reward")
    status = str(sample.get("status"))
    if isinstance(reward, dict):
        if options.reward is None:
            names = ", ".join(map(str, reward))
            raise RecordError("reward", f"has several values ({names}); say which with --reward reward.NAME")
        reward = None
    return Row(
        ids=ids,
        mask=[0] * prompt + mask,
        logprobs=None if logprobs is None else [0.0] * prompt + logprobs,
        rollout=None if name is None else f"{step}{name}",
        group=None if group is None else f"{step}{group}",
        reward=reward,
        versions=None if version is None else [version] * len(ids),
        sampling=sampling_settings({}, options, logprobs="processed"),
        finish_reason={"truncated": "length", "completed": "stop"}.get(status, status),
        trainable=not sample.get("remove_sample") and status != "aborted",
        names=("tokens", "loss_mask", "rollout_log_probs"),
    )


class _Mark:
    """Stands for anything in a pickle that is no plain value. It can be made and filled, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def append(self, _: Any) -> None: ...


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Mark]:
        return _Mark

    def persistent_load(self, _: Any) -> _Mark:
        return _Mark()


def _unpickled(path: str) -> Any:
    """The object of a ``torch.save`` file, with marks for what is no plain value. Raises RolloutFileError."""
    try:
        with open_binary(path) as handle, zipfile.ZipFile(handle) as packed:
            inside = next((name for name in packed.namelist() if name.endswith("/data.pkl")), None)
            if inside is None:
                _damaged(path, "it holds no data.pkl")
            with packed.open(inside) as data:
                return _Plain(data).load()
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        _damaged(path, str(error) or type(error).__name__)


def _damaged(path: str, reason: str) -> NoReturn:
    raise file_error("read", path, ValueError(f"it is no file of torch.save, or it is damaged ({reason})"))
