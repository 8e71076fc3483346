"""Messages as token ids: what a template makes of them at every call, and what a completion is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mwjax.quickstart import tokenizer_path
from mwjax.rollouts import Rollout, Turn
from mwjax.rollouts.rendering import Rendering, RenderingError, load
from mwjax.tree import build

TEMPLATES = Path(__file__).parent / "fixtures" / "templates"
TOKENIZER = Tokenizer.from_file(str(tokenizer_path()))

SYSTEM = {"role": "system", "content": "Be brief."}
READ = {"type": "function", "function": {"name": "read", "description": "Reads <a> file & more", "parameters": {}}}
CALLING = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I look.",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path":"é.txt"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rope"}


def user(text):
    return {"role": "user", "content": text}


def said(text, reasoning=None):
    return {"role": "assistant", "content": text, **({"reasoning_content": reasoning} if reasoning else {})}


def chatml():
    return Rendering((TEMPLATES / "chatml.jinja").read_text(), TOKENIZER)


def drops_thinking():
    return Rendering((TEMPLATES / "drops_thinking.jinja").read_text(), TOKENIZER)


def of(template, **more):
    return Rendering(template, TOKENIZER, **more)


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def test_a_conversation_with_tools_reads_as_the_template_writes_it():
    text = chatml().text([SYSTEM, user("Go"), CALLING, RESULT], [READ], add_generation_prompt=True)
    assert text == (
        '<|im_start|>system\nBe brief.\n{"type": "function", "function": {"name": "read", "description": "Reads <a> '
        'file & more", "parameters": {}}}<|im_end|>\n'
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n<think>\nI look.\n"
        '</think>\n\n<tool_call>\n{"name": "read", "arguments": {"path": "é.txt"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nrope<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_completion_is_what_the_answer_adds_up_to_its_stop_token():
    turn = chatml().turn([user("Go")], said("Yes."))
    assert turn.prompt_ids.tolist() == ids("<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n")
    assert turn.completion_ids.tolist() == ids("Yes.<|im_end|>")
    assert turn.prompt_ids.dtype == turn.completion_ids.dtype == np.int32
    assert turn.note is None


def test_an_answer_that_was_cut_off_has_no_stop_token():
    turn = chatml().turn([user("Go")], said("Yes, I"), truncated=True)
    assert turn.completion_ids.tolist() == ids("Yes, I")


def test_a_continuing_template_makes_one_view_of_a_tool_loop():
    calls = [
        ([user("Go")], CALLING),
        ([user("Go"), CALLING, RESULT], said("rope", "It says so.")),
        ([user("Go"), CALLING, RESULT, said("rope", "It says so."), user("Sure?")], said("Yes.")),
    ]
    tree = build(_rollout(chatml(), calls))
    assert len(tree.views) == 1 and not tree.junctions


def test_thinking_that_the_template_drops_opens_a_branch_and_every_turn_keeps_its_own_prompt():
    first, second = said("rope", "I remember."), said("Yes.", "Still so.")
    calls = [([user("Go")], first), ([user("Go"), first, user("Sure?")], second)]
    rendering = drops_thinking()
    rollout = _rollout(rendering, calls)
    opening, start = "<|im_start|>user\nGo<|im_end|>\n", "<|im_start|>assistant\n"
    assert rollout.turns[0].prompt_ids.tolist() == ids(opening + start)
    assert rollout.turns[0].completion_ids.tolist() == ids("<think>\nI remember.\n</think>\n\nrope<|im_end|>")
    shown = opening + start + "rope<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n" + start
    assert rollout.turns[1].prompt_ids.tolist() == ids(shown)
    (junction,) = build(rollout).junctions
    assert (junction.turn, junction.at, junction.reason) == (1, len(ids(opening + start)), "replacement")


def test_an_empty_think_block_that_is_gone_later_opens_a_branch():
    rendering = drops_thinking()
    answer = {**CALLING, "reasoning_content": ""}
    rollout = _rollout(rendering, [([user("Go")], answer), ([user("Go"), answer, RESULT], said("rope"))])
    assert rendering.decode(rollout.turns[0].completion_ids.tolist()).startswith("<think>\n\n</think>\n\n")
    (junction,) = build(rollout).junctions
    assert junction.turn == 1 and junction.evicted == len(ids("<think>\n\n</think>\n\n"))


def test_a_generation_prompt_that_a_history_does_not_have_moves_the_cut():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    )
    turn = of(template).turn([user("Go")], said("Yes."))
    assert turn.note == "reopened"
    assert turn.prompt_ids.tolist() == ids("<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n")
    assert turn.completion_ids.tolist() == ids("Yes.<|im_end|>")


def test_an_answer_that_changes_how_the_history_reads_is_refused():
    template = "{{ messages|length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(RenderingError, match="renders the earlier messages otherwise, from '1<"):
        of(template).turn([user("Go")], said("Yes."))


def test_ids_that_merge_over_the_end_of_the_prompt_are_the_prompts_own_and_the_rest():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    turn = of(template).turn([user("Hel")], said("lo<|im_end|>"))
    assert turn.note == "retokenised"
    assert turn.prompt_ids.tolist() == ids("Hel") and turn.completion_ids.tolist() == ids("lo<|im_end|>")
    assert ids("Hello") != ids("Hel") + ids("lo")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<|im_start|>", "<|im_end|>", " a", "user\n", "é🙂", "  ", "12", "<|im", "\n\n"]), max_size=12
    )
)
def test_looked_up_pieces_are_the_ids_of_the_whole_text(pieces):
    rendering = chatml()
    text = "".join(pieces)
    for _ in range(2):
        assert rendering.encode(text).tolist() == ids(text)


def test_half_a_surrogate_pair_is_the_replacement_character():
    assert chatml().encode("a\ud83d<|im_end|>").tolist() == ids("a\N{REPLACEMENT CHARACTER}<|im_end|>")


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ {'a': '<b> & é'} | tojson }}", '{"a": "<b> & é"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{% generation %}a{% endgeneration %}", "a"),
        ("{{ strftime_now('%Y-%m-%d') }}", "2023-11-14"),
        ("{{ bos_token }}{{ enable_thinking }}{{ tools is none }}", "<s>falseTrue"),
        ("  {%- if true %}\n  x\n  {%- endif %}\n", "  x"),
    ],
)
def test_templates_find_what_they_expect(template, shown):
    rendering = of(template, special={"bos_token": "<s>"})
    messages = [user("Go"), RESULT]
    options = {"enable_thinking": "false"}
    found = rendering.text(messages, add_generation_prompt=False, options=options, now=1_700_000_000.0)
    assert found == shown


def test_parts_go_to_templates_that_read_parts():
    template = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert of(template).text([user("Go")], add_generation_prompt=False) == "[Go]"


def test_a_developer_is_the_system_where_the_template_knows_no_developer():
    messages = [{"role": "developer", "content": "Be brief."}]
    assert of("{{ messages[0].role }}").text(messages, add_generation_prompt=False) == "system"
    assert of("{# developer #}{{ messages[0].role }}").text(messages, add_generation_prompt=False) == "developer"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only users') }}", "refuses the messages: only users"),
        ("{{ messages.append(1) }}", "refuses the messages: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages: .*unsafe"),
        ("{{ messages[7].content + 'a' }}", "(refuses|fails)"),
        ("{{ 1 + 'a' }}", "fails on the messages: TypeError"),
        ("{{ 1 // 0 }}", "fails on the messages: ZeroDivisionError"),
    ],
)
def test_templates_that_refuse_or_fail_are_messages(template, message):
    with pytest.raises(RenderingError, match=message):
        of(template).text([user("Go")], add_generation_prompt=False)


def test_arguments_stay_text_for_templates_that_put_them_into_text():
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.arguments }}{% endfor %}"
    )
    template += "{% endfor %}"
    given = [{"function": {"name": "read", "arguments": arguments}} for arguments in ('{"path":"é"}', {"path": "é"})]
    texts = [of(template).text([{**CALLING, "tool_calls": [call]}], add_generation_prompt=False) for call in given]
    assert texts == ['call {"path":"é"}', 'call {"path": "é"}']


def test_a_token_that_no_file_names_is_not_left_out_without_a_word(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    folder = _folder(tmp_path)
    for path in (folder, folder / "tokenizer.json"):
        with pytest.raises(RenderingError, match=r"writes bos_token, which .* put the model's tokenizer_config\.json"):
            load(path, folder / "t.jinja")
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "<|im_end|>"}')
    for path in (folder, folder / "tokenizer.json"):
        found = load(path, folder / "t.jinja")
        assert found.text([user("Go")], add_generation_prompt=False) == "<s>Go"
        assert found.stops == {TOKENIZER.token_to_id("<|im_end|>")}


def _folder(tmp_path, **files):
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_str())
    for name, value in files.items():
        (tmp_path / name.replace("__", ".")).write_text(value if isinstance(value, str) else json.dumps(value))
    return tmp_path


def test_a_folder_says_its_template_and_what_ends_a_completion(tmp_path):
    folder = _folder(
        tmp_path,
        tokenizer_config__json={"chat_template": "config", "eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>"},
        generation_config__json={"eos_token_id": [0, 2]},
    )
    found = load(folder)
    assert (found.template, found.stops, found.special["eos_token"]) == ("config", {0, 2}, "<|im_end|>")
    (folder / "chat_template.jinja").write_text("file")
    assert load(folder).template == "file"
    (folder / "other.jinja").write_text("other")
    assert load(folder, folder / "other.jinja").template == "other"


def test_of_several_templates_the_one_for_tools_is_taken(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    assert load(_folder(tmp_path, tokenizer_config__json={"chat_template": named})).template == "tools"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no chat template; give one with --template"),
        ({"chat_template__jinja": "{% if %}"}, "line 1: "),
        ({"chat_template__jinja": "a", "tokenizer__json": "{}"}, "is not a tokenizer.json"),
        ({"tokenizer_config__json": "{"}, "tokenizer_config.json is not JSON"),
    ],
)
def test_folders_that_do_not_do_are_messages(tmp_path, files, message):
    with pytest.raises(RenderingError, match=message):
        load(_folder(tmp_path, **files))


def test_a_folder_that_is_not_there_is_a_message(tmp_path):
    with pytest.raises(RenderingError, match="there is no such file or folder"):
        load(tmp_path / "missing")


def _rollout(rendering, calls):
    turns = [rendering.turn(messages, answer) for messages, answer in calls]
    return Rollout("r", tuple(Turn(turn.prompt_ids, turn.completion_ids) for turn in turns))
