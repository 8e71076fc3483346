"""What must hold of every harness's recording: all of it is there, and trained under what was really sent."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typer.testing import CliRunner, Result

from mwjax import rollouts, tree
from mwjax.audit.inspect import built_rows
from mwjax.cli import app
from mwjax.rollouts.record import Rollout, Turn
from tests.harnesses.engine import SUBTASK, TEMPLATE, TOKENIZER, Served, text_of
from tests.harnesses.play import SESSION


class Play(NamedTuple):
    """``served``: as the engine saw it. ``calls``: what the recorder wrote. ``of_turn``: which of ``served`` each
    turn of the imported rollout is. ``summary`` and ``tokens`` are those of ``mwjax inspect --json --tokens``."""

    world: dict[str, Any]
    said: str
    served: list[Served]
    calls: list[dict[str, Any]]
    account: str
    rollout: Rollout
    of_turn: list[int]
    summary: dict[str, Any]
    tokens: list[dict[str, Any]]

    @property
    def junctions(self) -> list[dict[str, Any]]:
        return self.summary["junctions"]

    def kinds(self) -> list[tuple[str, str]]:
        """(what the engine takes a turn for, chain it was put into)."""
        return [(self.served[number].kind, turn.chain) for number, turn in zip(self.of_turn, self.rollout.turns)]

    def turn_of(self, number: int) -> int:
        return self.of_turn.index(number)

    def following(self, number: int) -> int:
        """The turn of the same chain after that of a served call."""
        turn = self.turn_of(number)
        chain = self.rollout.turns[turn].chain
        return next(k for k in range(turn + 1, len(self.of_turn)) if self.rollout.turns[k].chain == chain)

    def quirky(self, quirk: str) -> int:
        """The number of the served call with that quirk."""
        return next(number for number, each in enumerate(self.served) if each.quirk == quirk)


def imported(folder: Path) -> Play:
    def mwjax(*arguments: str) -> Result:
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done

    log, out = folder / "record" / "calls.jsonl", str(folder / "rollouts.jsonl")
    rendering = ("--check-rendering", "--tokenizer", str(TOKENIZER), "--template", str(TEMPLATE))
    account = mwjax("import", str(log), "--out", out, *rendering).output
    served = [Served(**json.loads(line)) for line in (folder / "served.jsonl").read_text().splitlines()]
    (rollout,) = rollouts.read(out).rollouts
    lines = [json.loads(line) for line in mwjax("inspect", out, "--json", "--tokens").stdout.splitlines()]
    return Play(
        json.loads((folder / "world.json").read_text()),
        (folder / "said.txt").read_text(),
        served,
        [json.loads(line) for line in log.read_text().splitlines()],
        account,
        rollout,
        _served_turns(served, rollout.turns),
        lines[0],
        lines[1:],
    )


def _served_turns(served: list[Served], turns: tuple[Turn, ...]) -> list[int]:
    """Which call each turn is: that of the same ids. Every call that sampled anything is one turn, and nothing else."""
    left = {number: each for number, each in enumerate(served) if each.completion_ids}
    found = []
    for turn in turns:
        ids = (turn.prompt_ids.tolist(), turn.completion_ids.tolist())
        number = next(number for number, each in left.items() if (each.prompt_ids, each.completion_ids) == ids)
        del left[number]
        found.append(number)
    assert not left, f"served, but not imported: {left}"
    return found


def check_the_world(play: Play) -> None:
    """The harness ended well, and the recorder is all that it asked for anything."""
    assert play.world["status"] == 0
    assert "the last village sells rope" in play.said
    assert play.world["other_requests"] == []
    assert play.world["proxied"] == []
    if play.world["alone"]:
        assert play.world["unroutable"] == 0


def check_the_recording(play: Play) -> None:
    """One line for each call that the engine saw, with the ids and log-probs that it sent."""
    assert len(play.calls) == len(play.served)
    assert {each["session"] for each in play.calls} == {SESSION} == {play.rollout.id}
    assert Counter(each["outcome"] for each in map(_outcome, play.calls)) == Counter(
        each.outcome for each in play.served
    )
    seen = set()
    for call in play.calls:
        if "completions" not in call:
            continue
        number = int(call["response"]["id"].removeprefix("chatcmpl-"))
        seen.add(number)
        each = play.served[number]
        assert call["request"]["messages"] == each.messages
        (completion,) = call["completions"]
        assert call["prompt_ids"] == each.prompt_ids
        assert completion["completion_ids"] == each.completion_ids
        assert completion["logprobs"] == each.logprobs
    assert seen == {number for number, each in enumerate(play.served) if each.completion_ids}


def _outcome(call: dict[str, Any]) -> dict[str, str]:
    kind = call.get("error", {}).get("kind")
    return {"outcome": {None: "whole", "http_status": "refused", "upstream_cut_off": "cut"}[kind]}


def check_the_import(play: Play) -> None:
    """Every record is accounted for; log-probs are the engine's; what broke off is context only."""
    refused = sum(each.outcome == "refused" for each in play.served)
    used = len(play.served) - refused
    assert (
        f"{len(play.served)} records read: {used} in rollouts, 0 merged, {refused} with nothing sampled, 0 refused"
        in (play.account)
    )
    # Rendering the recorded messages gives the recorded ids, but for what was sampled otherwise than rendered.
    other = sum(each.quirk in ("spelled", "compact", "cut") for each in play.served)
    assert f"{used} of {used} prompts and {used - other} of {used} completions are the recorded ids" in play.account
    for number, turn in zip(play.of_turn, play.rollout.turns):
        served = play.served[number]
        assert turn.logprobs is not None and turn.logprobs.tolist() == served.logprobs
        assert (turn.purpose == "cut_off") == (served.outcome == "cut")
        assert turn.trainable == (served.outcome == "whole")


def check_the_prefixes(play: Play) -> None:
    """Every sampled token is owned once, and seen by the exact methods behind exactly the ids that the engine saw."""
    expected = {}
    for turn, number in enumerate(play.of_turn):
        served = play.served[number]
        ids = np.array([*served.prompt_ids, *served.completion_ids], "<i4").tobytes()
        begin = len(served.prompt_ids)
        crc32 = zlib.crc32(ids[: 4 * begin])
        for index, token in enumerate(served.completion_ids):
            expected[turn, index] = (token, {"prefix_len": begin + index, "prefix_crc32": crc32})
            crc32 = zlib.crc32(ids[4 * (begin + index) : 4 * (begin + index + 1)], crc32)
    assert len(play.tokens) == len(expected)
    for line in play.tokens:
        token, prefix = expected.pop((line["turn"], line["index"]))
        assert line["token"] == token
        turn = play.rollout.turns[line["turn"]]
        for method in ("packed", "logittree"):
            assert line["methods"][method] == (prefix if turn.trainable else None), (line, method, prefix)
        assert line["methods"]["sdcc_teacher"] in (None, prefix)
    assert not expected

    built = tree.build(play.rollout)
    owned = {
        (turn, k)
        for turn, each in enumerate(play.rollout.turns)
        if each.trainable
        for k in range(len(each.completion_ids))
    }
    for method in ("packed", "logittree"):
        edges = built_rows([built], method).rows.edges
        real = edges.weight > 0
        edges_of = Counter(zip(edges.turn[real].tolist(), edges.index[real].tolist()))
        assert set(edges_of) == owned and set(edges_of.values()) == {1}


def check_the_junctions(play: Play) -> None:
    """Against a replay of what the engine saw: which prompts of ``main`` do not go on from its view, and where the two
    part."""
    view: list[int] = []
    found = []
    for turn, (number, each) in enumerate(zip(play.of_turn, play.rollout.turns)):
        if each.chain != "main":
            continue
        prompt = play.served[number].prompt_ids
        if prompt[: len(view)] != view:
            same = (k for k, (old, new) in enumerate(zip(view, prompt)) if old != new)
            found.append((turn, next(same, min(len(view), len(prompt)))))
        view = [*prompt, *play.served[number].completion_ids]
    assert [(each["turn"], each["at"]) for each in play.junctions] == found
    # A method that trains on the last context alone does not see what the engine saw.
    wrong = [
        line
        for line in play.tokens
        if line["methods"]["naive_compressed"] is not None
        and line["methods"]["naive_compressed"] != line["methods"]["packed"]
    ]
    main = {turn for turn, each in enumerate(play.rollout.turns) if each.chain == "main"}
    assert sum(line["turn"] in main for line in wrong) == play.summary["diverging_leaves"]


def check_the_folds(play: Play) -> list[int]:
    """The turns of ``main`` whose prompt carries a summary for the first time: each is a fold caused by the call that
    sampled the summary. At least two."""
    carried: set[str] = set()
    found = []
    for turn, (number, each) in enumerate(zip(play.of_turn, play.rollout.turns)):
        if each.chain != "main" or play.served[number].kind == "summary":
            continue
        prompt = "\n".join(text_of(message) for message in play.served[number].messages)
        for other, served in enumerate(play.served[:number]):
            if served.kind == "summary" and served.answer in prompt and served.answer not in carried:
                carried.add(served.answer)
                found.append(turn)
                assert each.cause_turn == play.turn_of(other)
                assert play.rollout.turns[each.cause_turn].purpose == "summary"
    assert len(found) >= 2
    return found


def check_the_helper(play: Play) -> None:
    """A sub-agent's chain begins because of the call that delegated, and its answer is why ``main`` goes on with it."""
    turns = [turn for turn, (kind, _) in enumerate(play.kinds()) if kind == "help"]
    first, last = turns[0], play.served[play.of_turn[turns[-1]]]
    cause = play.rollout.turns[first].cause_turn
    assert cause is not None and SUBTASK in play.served[play.of_turn[cause]].answer
    carries = [
        turn
        for turn, (number, each) in enumerate(zip(play.of_turn, play.rollout.turns))
        if each.chain == "main" and last.answer in "\n".join(map(text_of, play.served[number].messages))
    ]
    assert play.rollout.turns[carries[0]].cause_turn == turns[-1]


def check_the_details(play: Play, expected: Mapping[int, str | None]) -> None:
    """What each junction is: ``expected`` by turn, besides where a completion was not what its rendering gives."""
    sampled = {
        play.following(number): {"spelled": "retokenised", "compact": "tool_json"}[each.quirk]
        for number, each in enumerate(play.served)
        if each.quirk in ("spelled", "compact")
    }
    assert {each["turn"]: each["detail"] for each in play.junctions} == {**sampled, **expected}
