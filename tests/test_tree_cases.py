"""Every shipped case, on all of its ``expect``, and the prefix of every token, read back from the built rows."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from mwjax import rollouts
from mwjax.audit.inspect import summary, token_lines, trie_tokens
from mwjax.tree import build

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))


def read_case(path: Path):
    case = json.loads(path.read_text())
    return case, [build(rollouts.from_json(obj)) for obj in case["rollouts"]]


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_case(path):
    case, trees = read_case(path)
    expected = case["expect"]["summary"]
    for tree, want in zip(trees, expected, strict=True):
        found = summary(tree)
        for junction in found["junctions"]:
            assert junction.pop("detail") is None
        assert found == want
    assert trie_tokens(trees) == case["expect"]["group_trie_tokens"]


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_prefixes_of_exact_methods(path):
    _, trees = read_case(path)
    for tree in trees:
        for line in token_lines(tree):
            turn = tree.rollout.turns[line["turn"]]
            ids = np.concatenate([turn.prompt_ids, turn.completion_ids[: line["index"]]]).astype("<i4")
            exact = {"prefix_len": len(ids), "prefix_crc32": zlib.crc32(ids.tobytes())} if turn.trainable else None
            assert line["methods"]["packed"] == exact
            assert line["methods"]["logittree"] == exact
            assert line["methods"]["sdcc"] == line["methods"]["naive_compressed"]
            assert line["methods"]["sdcc_teacher"] in (None, exact)
            if not turn.trainable:
                assert set(line["methods"].values()) == {None}


def test_running_example_leaf_by_leaf():
    """MemoryWalker's running example: three one-token evictions, the exact prefix of every leaf."""
    _, (tree,) = read_case(Path(__file__).parent / "cases" / "running_example.json")
    prompt = [341, 164, 414]
    y = dict(zip(range(1, 14), [676, 59, 84, 850, 558, 106, 384, 606, 69, 529, 229, 48, 98]))
    first = prompt + [y[k] for k in range(1, 8)]
    second = prompt + [y[k] for k in (1, 2, 3, 4, 6, 7, 8, 9, 10)]
    third = prompt + [y[k] for k in (1, 2, 3, 4, 6, 7, 9, 10, 11, 12)]
    last = prompt + [y[k] for k in (1, 2, 3, 4, 6, 7, 9, 10, 12, 13)]
    everything = prompt + [y[k] for k in range(1, 14)]
    branch = dict.fromkeys(range(1, 8), first) | {8: second, 9: second, 10: second, 11: third, 12: third, 13: last}

    def before(walk: list[int], k: int) -> dict[str, int] | None:
        if y[k] not in walk:
            return None
        prefix = walk[: walk.index(y[k])]
        return {"prefix_len": len(prefix), "prefix_crc32": zlib.crc32(np.array(prefix, "<i4").tobytes())}

    lines = list(token_lines(tree))
    assert [line["token"] for line in lines] == list(y.values())
    for k, line in enumerate(lines, start=1):
        methods = line["methods"]
        assert methods["packed"] == methods["logittree"] == before(branch[k], k)
        assert methods["naive_compressed"] == methods["sdcc"] == before(last, k)
        assert methods["naive_full"] == before(everything, k)
        assert methods["union"] == before(branch[k], k)  # right at the surface; its keys are what leak
        diverges = k in (6, 7, 9, 10, 12)
        assert methods["sdcc_teacher"] == (before(branch[k], k) if diverges else None)
