"""Conversations in messages as rollouts, and what holds no messages or ids refused with what to do."""

from __future__ import annotations

import json

import pytest

from mwjax import rollouts
from mwjax.rollouts import RolloutFileError
from mwjax.rollouts.readers import Options, detect, import_files, rendering_for
from tests.test_readers_requests import DROPS_THINKING, READ, calling, result, said, user, write
from tests.test_readers_sessions import OPTIONS

SYSTEM = {"role": "system", "content": "Be brief."}


def imported(tmp_path, records, options=OPTIONS, **more):
    path = write(tmp_path, records)
    assert detect(path).NAME == "conversation"
    done = import_files([path], tmp_path / "out.jsonl", options=options, overwrite=True, **more)
    return done, rollouts.read(tmp_path / "out.jsonl").rollouts if done.rollouts else []


def texts(rollout, options=OPTIONS):
    rendering = rendering_for("test", options)
    ids = [(turn.prompt_ids.tolist(), turn.completion_ids.tolist()) for turn in rollout.turns]
    return [(rendering.decode(prompt), rendering.decode(completion)) for prompt, completion in ids]


def test_every_answer_is_a_call_under_all_before_it_and_weight_zero_is_context(tmp_path):
    messages = [SYSTEM, user("Go"), said("First.", weight=0), user("On"), said("Second.")]
    done, (rollout,) = imported(tmp_path, [{"messages": messages, "reward": 0.5}])
    assert (done.records, done.used, rollout.reward) == (1, 1, 0.5)
    assert [turn.trainable for turn in rollout.turns] == [False, True]
    (first, one), (second, two) = texts(rollout)
    assert one.startswith("First.") and two.startswith("Second.")
    assert second.startswith(first + "First.") and "Be brief." in first and "On" in second
    assert "context_incomplete" not in rollout.meta


def test_a_template_that_drops_thinking_gives_each_answer_its_own_prompt(tmp_path):
    messages = [
        user("Go"),
        said("First.", reasoning_content="Hm."),
        user("On"),
        said("Second.", reasoning_content="So."),
    ]
    _, (rollout,) = imported(tmp_path, [{"messages": messages}], DROPS_THINKING)
    (_, one), (second, two) = texts(rollout, DROPS_THINKING)
    assert "Hm." in one and "Hm." not in second and "So." in two
    assert rollout.meta["junction_details"] == {"1": "template"}


def test_what_trl_logs_of_completions_has_its_reward_and_answers_of_the_completion_only(tmp_path):
    record = {
        "step": 3,
        "prompt": [user("Go"), said("Earlier."), user("On")],
        "completion": [calling({"path": "a"}), result("text"), said("Done.")],
        "accuracy": 1.0,
        "advantage": 0.3,
    }
    _, (rollout,) = imported(tmp_path, [record], Options(**{**vars(OPTIONS), "reward": "accuracy", "group_by": "step"}))
    assert (rollout.reward, rollout.group, len(rollout.turns)) == (1.0, "3", 2)
    assert "Earlier." in texts(rollout)[0][0] and texts(rollout)[1][1].startswith("Done.")
    assert rollout.meta["context_incomplete"] == ["tool list"]
    _, (rollout,) = imported(tmp_path, [{**record, "tools": [READ]}])
    assert "context_incomplete" not in rollout.meta


def test_what_cannot_be_rendered_is_refused_and_counted_once(tmp_path):
    picture = {"role": "user", "content": [{"type": "image", "image": "x"}]}
    good = {"messages": [user("Go"), said("First.")]}
    done, _ = imported(
        tmp_path, [good, {"messages": [picture, said("A cat.")]}, {"messages": [user("Go")]}, {"messages": 3}]
    )
    assert (done.records, done.used, done.empty) == (4, 1, 1)
    assert [(refusal.line, refusal.field) for refusal in done.refused] == [
        (2, "messages[0].content[0]"),
        (4, "messages"),
    ]


def test_calls_that_the_template_refuses_are_left_out_and_the_record_counts_once(tmp_path):
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{% for m in messages %}{% if m.content == 'bad' and loop.last %}{{ raise_exception('no') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    options = Options(tokenizer=OPTIONS.tokenizer, template=str(strict))
    done, (rollout,) = imported(tmp_path, [{"messages": [user("Go"), said("Good."), user("bad"), said("x")]}], options)
    assert (done.records, done.used, len(rollout.turns)) == (1, 1, 1)
    assert any("a call is left out: messages the chat template refuses" in remark.reason for remark in done.remarks)
    path = write(tmp_path, [{"messages": [user("bad"), said("x"), user("bad"), said("y")]}])
    done = import_files([path], tmp_path / "out.jsonl", options=options, overwrite=True)
    assert (done.records, len(done.refused), done.rollouts) == (1, 1, 0)


def test_tools_as_text_and_options_of_the_template_are_those_of_the_record(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{{ style }}:{% for t in tools or [] %}{{ t.function.name }}{% endfor %}:"
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    options = Options(tokenizer=OPTIONS.tokenizer, template=str(template))
    record = {"messages": [user("Go"), said("Rope.")], "chat_template_kwargs": {"style": "a"}}
    _, found = imported(tmp_path, [{**record, "tools": json.dumps([READ])}, {**record, "tools": [READ]}], options)
    assert [texts(rollout, options)[0][0] for rollout in found] == ["a:read:Go<|im_end|>"] * 2
    done, _ = imported(tmp_path, [{**record, "tools": "read"}], options)
    assert done.refused[0].field == "tools" and "the JSON of one" in done.refused[0].reason


def test_text_is_refused(tmp_path):
    done, _ = imported(tmp_path, [{"prompt": "Go", "completion": "Rope.", "step": 1}])
    assert done.refused[0].field == "completion" and "save messages" in done.refused[0].reason


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"PAR1rest", r"a Parquet file; .*read_parquet\(FILE\)\.to_json"),
        (b"ARROW1rest", "an Arrow file"),
        (b"\x80\x04rest", "a pickle, such as verl's DataProto, and reading one runs whatever is in it"),
        (b"\x93NUMPYrest", "an array of numpy"),
        (b"PK\x03\x04rest", "no dump of slime"),
    ],
)
def test_binary_files_are_named_with_what_to_do(tmp_path, data, reason):
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(RolloutFileError, match=reason):
        import_files([str(path)], tmp_path / "out.jsonl", options=OPTIONS)


def test_a_tensor_that_is_no_list_says_how_to_write_it(tmp_path):
    tensor = {"type": "tensor", "data": "AAAA", "shape": [1], "dtype": "torch.int64"}
    path = write(tmp_path, [{"input_ids": tensor, "loss_mask": tensor}])
    done = import_files([path], tmp_path / "out.jsonl", options=Options())
    assert done.refused[0].field == "input_ids" and ".tolist()" in done.refused[0].reason


def test_results_of_verifiers_without_trajectories(tmp_path):
    made = said("", tool_calls=[{"id": "c1", "name": "read", "arguments": '{"path": "a"}'}])
    record = {"example_id": 4, "prompt": [SYSTEM, user("Go")], "completion": [made, result("Rope."), said("Rope.")]}
    record |= {
        "reward": 0.5,
        "info": {"split": "a"},
        "tool_defs": [{"name": "read", "description": "", "parameters": {}}],
    }
    _, (rollout,) = imported(tmp_path, [record])
    (prompt, call), (second, _) = texts(rollout)
    assert '"name": "read"' in prompt and '"path": "a"' in call and second.startswith(prompt + call)
    assert rollout.reward == 0.5 and "context_incomplete" not in rollout.meta
