from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mwjax import losses
from mwjax.train import load, setup
from mwjax.train.config import RunConfig

REQUIRED = ["run_dir=run", "data.paths=a.jsonl", "model.path=model"]


def errors(*overrides: str) -> list[str]:
    with pytest.raises(load.ConfigError) as caught:
        load.load(None, [*REQUIRED, *overrides])
    return str(caught.value).splitlines()


def test_overrides_win_over_the_file_and_keep_yaml_types(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "run_dir: run\ndata: {paths: [a.jsonl], seed: 3}\nmodel: {path: m}\noptimizer: {learning_rate: 1e-5}\n"
    )
    config = load.load(str(file), ["data.paths=[b.jsonl,c.jsonl]", "optimizer.b2=0.95", "optimizer.clip_norm=null"])
    assert config.data.paths == ["b.jsonl", "c.jsonl"]
    assert config.data.seed == 3
    assert (config.optimizer.learning_rate, config.optimizer.b2, config.optimizer.clip_norm) == (1e-5, 0.95, None)


def test_the_defaults_are_the_papers() -> None:
    config = load.load(None, [*REQUIRED, "loss.task=memorywalker"])
    policy, optimizer = setup.loss_config(config.loss).policy_gradient, config.optimizer
    assert (policy.algorithm, policy.clip_low, policy.clip_high, policy.dual_clip) == ("grpo", 0.2, 0.28, None)
    assert (policy.kl_coefficient, policy.kl_estimator) == (0.001, "k3")
    assert (config.loss.sdcc.peak, config.loss.sdcc.ramp) == (0.1, 0.2)
    assert (optimizer.b1, optimizer.b2, optimizer.learning_rate) == (0.9, 0.98, 1e-6)
    assert (optimizer.weight_decay, optimizer.clip_norm, config.data.rollouts_per_step) == (0.01, 1.0, 8)


def test_every_option_of_the_loss_reaches_it() -> None:
    given = ("clip_low=0.1", "clip_high=0.5", "dual_clip=none", "kl=0", "kl_estimator=k1", "entropy=0.01", "unit=view")
    overrides = [f"loss.{option}" for option in ("task=memagent", "vocab_chunk=100", *given)]
    loss = setup.loss_config(load.load(None, [*REQUIRED, *overrides]).loss)
    assert loss == losses.LossConfig(
        "policy_gradient", losses.PolicyGradientConfig("dapo", 0.1, 0.5, None, 0.0, "k1", 0.01, "view"), 100
    )
    memagent = setup.loss_config(load.load(None, [*REQUIRED, "loss.task=memagent"]).loss)
    assert memagent.policy_gradient == losses.RECIPES["memagent"].policy_gradient


def test_edges_are_joined_only_where_nothing_tells_them_apart() -> None:
    def merges(*overrides: str) -> bool:
        return setup.layout(load.load(None, [*REQUIRED, *overrides])).merge

    assert merges() and merges("loss.aggregation=constant", "loss.tokens_per_rollout=10")
    assert not merges("loss.aggregation=sequence_mean")
    assert not merges("loss.task=grpo")


def test_a_dumped_configuration_loads_to_an_equal_one(tmp_path: Path) -> None:
    small = ["model.path=null", "model.small.vocab_size=100", "data.method=sdcc", "loss.task=grpo"]
    config = load.load(None, [*REQUIRED, *small])
    (tmp_path / "config.yaml").write_text(load.dump(config))
    assert load.load(str(tmp_path / "config.yaml")) == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.rowlength=10", "data.rowlength: unknown key; did you mean data.row_length?"),
        ("data.path=b", "data.path: unknown key; did you mean data.paths?"),
        ("learning_rate=1", "learning_rate: unknown key; did you mean optimizer.learning_rate?"),
        ("optimiser.b1=0", "optimiser: unknown key; did you mean optimizer?"),
        ("loss.sdcc.lambda=1", "loss.sdcc.lambda: unknown key; the keys of loss.sdcc are peak, ramp"),
        ("zzz=1", "zzz: unknown key; 'mwjax train --keys' lists all of them"),
        ("data.row_length=0", "data.row_length: expected a value greater than 0, got 0"),
        ("data.seed=1.5", "data.seed: expected an integer, got a number with a fractional part, got 1.5"),
        ("optimizer.b2=fast", "optimizer.b2: expected a number, unable to parse string as a number, got 'fast'"),
        ("loss.task=sftt", "did you mean sft?"),
        ("loss.kl=0.1", "loss: kl: without effect on task sft; remove it or choose another task"),
        ("mesh=3", "mesh: expected a section with the keys mesh.data, mesh.fsdp, mesh.tensor, mesh.context, got 3"),
        ("mesh.data=2", "mesh.data times mesh.fsdp (2) must divide data.rows_per_microbatch (1)"),
        ("model.small.vocab_size=5", "model: give exactly one of model.path and model.small"),
    ],
)
def test_a_wrong_option_is_named_and_put_right(override: str, expected: str) -> None:
    (line,) = errors(override)
    assert expected in line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["data.row_length=1000"], "data.row_length (1000)"),
        (["data.edges_per_row=100"], "data.edges_per_row (100)"),
        (["data.method=sdcc", "data.teacher_row_length=4100"], "data.teacher_row_length (4100)"),
        (["data.method=sdcc", "data.pairs_per_row=100"], "data.pairs_per_row (100)"),
        (["evaluation.paths=b.jsonl", "evaluation.row_length=1000"], "evaluation.row_length (1000)"),
    ],
)
def test_what_context_cuts_is_a_multiple_of_it(options: list[str], expected: str) -> None:
    (line,) = errors("mesh.context=16", *options)
    assert f"mesh.context (16) must divide {expected}" in line
    load.load(None, [*REQUIRED, "mesh.context=4", *options])


def test_all_errors_come_at_once() -> None:
    assert len(errors("data.rowlength=10", "optimizer.b1=2", "debug=maybe")) == 3


@pytest.mark.parametrize("override", ["run_dir", "=3", "data.paths"])
def test_an_override_without_a_value_is_refused(override: str) -> None:
    assert "expected key=value" in errors(override)[0]


@pytest.mark.parametrize("override", ["data.paths=*.jsonl", "model.frozen=[norm", "run_dir=@runs"])
def test_an_override_that_is_not_yaml_is_named_alone(override: str) -> None:
    assert errors("data.seed=1", override)[0].startswith(f"override {override!r}: the value is not valid YAML: ")


@pytest.mark.parametrize(("text", "reason"), [("a: [1", "not valid YAML"), ("- 1\n- 2\n", "expected keys and values")])
def test_a_broken_file_is_named(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(load.ConfigError, match=reason) as caught:
        load.load(str(file))
    assert str(file) in str(caught.value)


def test_a_missing_option_says_what_it_is_for() -> None:
    with pytest.raises(load.ConfigError, match=r"data\.paths: required and not given\. Files of recorded rollouts"):
        load.load(None, ["run_dir=run", "model.path=m", "data.seed=1"])


def test_every_option_is_documented_and_listed_once() -> None:
    listed = list(load.options())
    assert all(description for _, _, description in listed)
    assert len({key for key, _, _ in listed}) == len(listed)


def test_the_example_configurations_load_and_say_what_they_set() -> None:
    folder = Path(__file__).parent.parent / "configs"
    files = sorted(folder.glob("*.yaml"))
    assert {file.stem for file in files} >= {"sft", "grpo", "sdcc"}
    for file in files:
        config = load.load(str(file))
        assert isinstance(config, RunConfig)
        assert set(yaml.safe_load(file.read_text())) <= set(RunConfig.model_fields)


@pytest.mark.parametrize("seed", ["-1", str(1 << 32)])
@pytest.mark.parametrize("key", ["data.seed", "model.small.seed", "model.lora.seed"])
def test_a_seed_has_32_bits(key: str, seed: str) -> None:
    (line,) = errors("model.path=null", "model.small.vocab_size=9", f"{key}={seed}")
    assert key in line and ("less than 4294967296" in line or "greater than or equal to 0" in line)


@pytest.mark.parametrize(
    ("platform", "overrides", "attention", "dtype"),
    [
        ("cpu", [], "blockwise", "float32"),
        ("gpu", [], "blockwise", "bfloat16"),
        ("tpu", [], "splash", "bfloat16"),
        ("tpu", ["data.row_length=65536"], "splash", "bfloat16"),
        ("tpu", ["data.row_length=65664"], "pallas", "bfloat16"),
        ("tpu", ["data.method=sdcc", "data.row_length=32768", "data.teacher_row_length=131072"], "pallas", "bfloat16"),
        ("tpu", ["model.attention=blockwise", "model.dtype=float32"], "blockwise", "float32"),
        ("cpu", ["model.attention=pallas"], "pallas", "float32"),
    ],
)
def test_what_is_auto_goes_by_the_devices_and_the_row(
    platform: str, overrides: list[str], attention: str, dtype: str
) -> None:
    config = load.load(None, ["run_dir=r", "data.paths=a.jsonl", "model.path=m", *overrides])
    found = setup.resolved(config, platform).model
    assert (found.attention, found.dtype) == (attention, dtype)
    assert setup.resolved(config).model.dtype == ("float32" if "dtype" not in " ".join(overrides) else dtype)
