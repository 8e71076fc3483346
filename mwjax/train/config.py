"""What a training run is made of. Loading from YAML and the command line is in ``load.py``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Method = Literal["naive_compressed", "naive_full", "logittree", "packed", "union", "sdcc"]
Task = Literal["sft", "memorywalker", "memagent", "grpo", "dr_grpo", "dapo", "gspo", "cispo"]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]  # jax keeps 32 bits of one, numpy takes none below 0
Share = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class DataConfig(Section):
    """Which rollouts, in which order, in rows of which shape."""

    paths: list[str] = Field(
        min_length=1,
        description="Files of recorded rollouts (JSON Lines, .gz and .zst too) or folders that mwjax pack-data wrote; "
        "one path or a list.",
    )
    method: Method = Field(
        default="packed",
        description="How a rollout becomes training rows. packed and logittree are exact, sdcc approximates, "
        "the others are baselines.",
    )
    row_length: Positive = Field(
        default=2048, description="Tokens a row holds; a single view longer than this is refused."
    )
    edges_per_row: Positive | None = Field(
        default=None, description="Loss tokens a row can hold; null: as many as row_length."
    )
    teacher_row_length: Positive | None = Field(
        default=None, description="sdcc only: tokens a teacher row holds; null: twice row_length."
    )
    pairs_per_row: Positive | None = Field(
        default=None, description="sdcc only: diverging leaves a row can hold; null: as many as edges_per_row."
    )
    rows_per_microbatch: Positive = Field(
        default=1, description="Rows of one forward and backward pass, over all devices."
    )
    rollouts_per_step: Positive = Field(default=8, description="Whole rollouts of one optimiser step (8 in the paper).")
    group_tries: bool = Field(
        default=True,
        description="packed only: rollouts of one group stay together in a step and share their common prompt; "
        "false: the order of the other methods.",
    )
    workers: Count = Field(default=0, description="Processes that build the rows; 0: threads of this one.")
    seed: Seed = Field(
        default=0, description="Order of the rollouts; a batch is a pure function of it, the epoch and the step."
    )
    epochs: Positive = Field(default=1, description="Passes over the rollouts; unused where data.steps is given.")
    steps: Positive | None = Field(
        default=None, description="Optimiser steps, over as many epochs as it takes; null: go by data.epochs."
    )

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class SmallModel(Section):
    """A decoder with random weights: for trying a run out, and for tests."""

    vocab_size: Positive | None = Field(
        default=None, description="Number of token ids; null: read it from model.small.tokenizer."
    )
    tokenizer: str | None = Field(default=None, description="A tokenizer.json whose vocabulary size is taken.")
    family: Literal["qwen3", "qwen3_moe", "qwen2", "llama"] = Field(
        default="qwen3", description="Which kind of decoder."
    )
    layers: Positive = Field(default=4, description="Number of decoder layers.")
    width: Positive = Field(default=256, description="Width of the residual stream.")
    heads: Positive = Field(default=4, description="Query heads.")
    key_value_heads: Positive = Field(default=2, description="Key and value heads; must divide model.small.heads.")
    head_dim: Positive | None = Field(default=None, description="Width of a head (even); null: width / heads.")
    feed_forward_width: Positive | None = Field(default=None, description="Inner width of SwiGLU; null: 3 * width.")
    experts: Positive | None = Field(default=None, description="qwen3_moe only: experts of a layer; null: 8.")
    experts_per_token: Positive | None = Field(
        default=None, description="qwen3_moe only: experts that a token goes through; null: 2."
    )
    expert_width: Positive | None = Field(
        default=None, description="qwen3_moe only: inner width of an expert; null: a quarter of that of SwiGLU."
    )
    tied: bool = Field(default=True, description="Whether the output layer is the embedding.")
    seed: Seed = Field(default=0, description="Seed of the random weights.")

    @model_validator(mode="after")
    def _check(self) -> SmallModel:
        if (self.vocab_size is None) == (self.tokenizer is None):
            raise ValueError("give exactly one of vocab_size and tokenizer")
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of key_value_heads ({self.key_value_heads})")
        given = [n for n in ("experts", "experts_per_token", "expert_width") if getattr(self, n) is not None]
        if given and self.family != "qwen3_moe":
            raise ValueError(f"{', '.join(given)}: without effect on family {self.family}; remove it, or set qwen3_moe")
        count, per_token = self.experts or 8, self.experts_per_token or 2
        if per_token > count:
            raise ValueError(f"experts_per_token ({per_token}) is more than there are experts ({count})")
        return self


class LoRASection(Section):
    """Low-rank adapters (arXiv:2106.09685): only they are trained, the model stays as it is."""

    rank: Positive = Field(default=16, description="Inner width of an adapter.")
    alpha: PositiveFloat = Field(default=32.0, description="Adapters are scaled by alpha / rank.")
    targets: list[Literal["query", "key", "value", "output", "gate", "up", "down"]] = Field(
        default=["query", "key", "value", "output", "gate", "up", "down"],
        min_length=1,
        description="The matrices of every layer that get one; of mixtures of experts not gate, up and down.",
    )
    seed: Seed = Field(default=0, description="Seed of the random half of an adapter; the other half begins at zero.")

    @field_validator("targets")
    @classmethod
    def _once(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError(f"{', '.join(value)}: every target at most once")
        return value


class ModelSection(Section):
    """The decoder: a model in Hugging Face format, or a small random one."""

    path: str | None = Field(
        default=None,
        description="Folder with config.json and *.safetensors (Qwen3, Qwen3-MoE, Qwen2.5 or Llama type), or a hub id "
        "such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION: local cache first.",
    )
    small: SmallModel | None = Field(
        default=None, description="A small decoder with random weights in place of model.path."
    )
    sampled_the_data: bool = Field(
        default=False,
        description="Whether exactly these weights sampled the rollouts: only then is logdiff reported.",
    )
    attention: Literal["auto", "blockwise", "oracle", "pallas", "splash"] = Field(
        default="auto",
        description="Attention: blockwise runs on any device; pallas (our kernel) and splash (jax's, whose mask takes "
        "memory) on TPUs only; oracle is dense (T x T), for tests on short rows only. auto: on TPUs splash, but pallas "
        "for rows above 65,536 tokens; elsewhere blockwise.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of the activations; parameters, norms, softmax and losses stay float32. auto: bfloat16 on "
        "accelerators, float32 on CPUs.",
    )
    remat: Literal["none", "attention", "full"] = Field(
        default="none",
        description="What the backward pass recomputes to save memory: nothing, all of a layer but attention, or all.",
    )
    lora: LoRASection | None = Field(default=None, description="Train low-rank adapters in place of the model.")
    frozen: list[str] = Field(
        default=[],
        description="Parameters that are not trained, by dotted names with * and ?, in quotes where * comes first: "
        "[embedding, layers.attention.*, '*norm*'].",
    )
    frozen_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type in which weights that are not trained are stored (with model.lora or model.frozen).",
    )

    @field_validator("frozen", mode="before")
    @classmethod
    def _one_pattern(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if (self.path is None) == (self.small is None):
            raise ValueError("give exactly one of model.path and model.small; null takes back what the file says")
        if self.lora is not None and self.frozen:
            raise ValueError("frozen is without effect beside lora, which trains the adapters only; remove one")
        if self.frozen_dtype != "float32" and self.lora is None and not self.frozen:
            raise ValueError("frozen_dtype is without effect where everything is trained; set lora or frozen as well")
        return self


class SDCCConfig(Section):
    """MemoryWalker's SDCC: weight of KL(teacher || student) over the diverging leaves. Used by data.method sdcc."""

    peak: NonNegative = Field(default=0.1, description="lambda after the ramp; 0 trains exactly as naive_compressed.")
    ramp: Share = Field(default=0.2, description="Share of the steps over which lambda rises linearly from 0.")
    teacher: Literal["same", "ema"] = Field(
        default="same",
        description="The weights that teach: the student's own (the paper), or their moving average over the steps.",
    )
    ema_decay: Beta = Field(
        default=0.99, description="ema only: share of the average kept at each update; 0 teaches as same does."
    )


class LossConfig(Section):
    """The task loss, on the loss tokens of any method. Options of policy gradients are null for the recipe's own."""

    task: Task = Field(
        default="sft",
        description="sft: cross entropy of the sampled tokens. The others are published recipes of policy gradients; "
        "memorywalker is GRPO as that paper runs it.",
    )
    clip_low: Share | None = Field(default=None, description="Ratios are clipped below at 1 - this; memorywalker 0.2.")
    clip_high: NonNegative | None = Field(
        default=None, description="Ratios are clipped above at 1 + this; memorywalker 0.28."
    )
    dual_clip: Annotated[float, Field(gt=1.0)] | Literal["none"] | None = Field(
        default=None, description="Ratios of negative advantages are cut here, or none; memagent 3, the others none."
    )
    kl: NonNegative | None = Field(
        default=None,
        description="Weight of the KL penalty to the initial weights; 0 skips that pass; memorywalker 0.001.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None, description="Estimator of that KL; all recipes k3 (the low-variance one)."
    )
    entropy: NonNegative | None = Field(default=None, description="Weight of an entropy bonus; all recipes 0.")
    unit: Literal["rollout", "view"] | None = Field(
        default=None,
        description="gspo only: what a sequence's ratio is over, a whole rollout or one branch view of it.",
    )
    advantage: Literal["grpo", "dr_grpo", "rloo"] | None = Field(
        default=None,
        description="From the rewards of a group: standardised, centred, or against the mean of the others.",
    )
    aggregation: Literal["token_mean_global", "token_mean_group", "sequence_mean", "constant"] | None = Field(
        default=None, description="How token losses are averaged; sft and memorywalker: mean over all loss tokens."
    )
    tokens_per_rollout: Positive | None = Field(
        default=None, description="The normaliser of loss.aggregation constant (dr_grpo), times the number of rollouts."
    )
    old_logprobs: Literal["recorded", "recompute", "recompute_own_rows"] = Field(
        default="recorded",
        description="Denominator of the ratio: the engine's record; the initial weights under the exact generation "
        "prefix; or the initial weights on the method's own rows (an ablation that hides a method's error).",
    )
    sdcc: SDCCConfig = Field(default_factory=SDCCConfig, description="Settings of data.method sdcc.")
    router_auxiliary: NonNegative = Field(
        default=0.0,
        description="Mixtures of experts only: weight of a loss that spreads tokens evenly over the experts (every "
        "token of a trie counts once; 0.001 is usual in pretraining, 0 in RL). With several micro-batches in a step it "
        "takes one more forward pass.",
    )
    vocab_chunk: Positive | None = Field(
        default=None, description="Vocabulary entries scored at once, smaller saves memory; null: chosen by size."
    )

    @model_validator(mode="after")
    def _check(self) -> LossConfig:
        if self.task == "sft":
            names = ("clip_low", "clip_high", "dual_clip", "kl", "kl_estimator", "entropy", "unit", "advantage")
            given = [name for name in names if getattr(self, name) is not None]
            given += ["old_logprobs"] if self.old_logprobs != "recorded" else []
            if given:
                raise ValueError(f"{', '.join(given)}: without effect on task sft; remove it or choose another task")
        return self


class OptimizerConfig(Section):
    """AdamW; defaults as in the paper."""

    learning_rate: NonNegative = Field(default=1e-6, description="The rate after the warm-up, the largest of the run.")
    warmup_steps: Count = Field(default=0, description="Steps over which the rate rises linearly.")
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = Field(
        default="constant",
        description="What follows the warm-up: no change, or a decay over the rest of the run; warmup_stable_decay "
        "falls linearly at the end only.",
    )
    final_rate: Share = Field(default=0.0, description="Share of the rate a decay comes down to after the last step.")
    decay_share: Share = Field(
        default=0.1, description="warmup_stable_decay only: share of all steps over which the rate falls."
    )
    b1: Beta = Field(default=0.9, description="Decay of the first moment.")
    b2: Beta = Field(default=0.98, description="Decay of the second moment.")
    epsilon: PositiveFloat = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: NonNegative = Field(
        default=0.01, description="Decoupled weight decay; norm scales and biases are exempt."
    )
    moments_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type both moments are stored in; bfloat16 takes 4 bytes less per parameter and rounds them.",
    )
    clip_norm: PositiveFloat | None = Field(
        default=1.0, description="Global L2 norm gradients are clipped to; null: no clipping."
    )

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if self.moments_dtype == "bfloat16" and self.b2 > 0.99:
            raise ValueError(
                f"moments_dtype bfloat16 needs b2 of at most 0.99, got {self.b2}: closer to 1, rounding to 8 bits "
                "would keep the second moment from falling"
            )
        return self


class CheckpointConfig(Section):
    """When weights, optimiser state and data position are saved together. The last step always is."""

    every: Count = Field(default=50, description="Steps between checkpoints; 0: only at the end and on SIGTERM.")
    keep: Positive = Field(default=2, description="How many of the newest checkpoints are kept.")
    best: Count = Field(default=0, description="How many of the best checkpoints are kept besides.")
    best_by: Literal["evaluation_loss", "loss"] = Field(
        default="evaluation_loss",
        description="What the best ones are lowest in: the loss on held-out rollouts of the weights at that step, or "
        "the training loss of that step.",
    )


class EvaluationConfig(Section):
    """Held-out rollouts, scored under the contexts they were sampled under whatever data.method trains on."""

    paths: list[str] = Field(
        default=[], description="Files of held-out rollouts, one path or a list; none: nothing is evaluated."
    )
    every: Count = Field(
        default=0,
        description="Steps between evaluations; the weights before the first and after the last step always are, "
        "0: only those.",
    )
    row_length: Positive | None = Field(
        default=None,
        description="Tokens of an evaluation row; null: data.row_length, or more where a held-out context is longer.",
    )
    rows_per_batch: Positive | None = Field(
        default=None, description="Rows scored at once, over all devices; null: data.rows_per_microbatch."
    )

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class TrackingConfig(Section):
    """Where the figures of a run go beside metrics.jsonl and evaluation.jsonl."""

    plots: bool = Field(default=True, description="Draw plots/training.png at every checkpoint and at the end.")
    tensorboard: bool = Field(
        default=False, description="Write TensorBoard events to tensorboard/ (needs the extra tensorboard)."
    )
    wandb: str | None = Field(
        default=None, description="Weights & Biases project to log to; null: none (needs the extra wandb)."
    )
    wandb_mode: Literal["online", "offline"] | None = Field(
        default=None,
        description="offline: write wandb/ here, for a later 'wandb sync'; null: as the environment's WANDB_MODE says.",
    )
    name: str | None = Field(
        default=None, description="Name of the run at Weights & Biases; null: the last part of run_dir."
    )


class MeshConfig(Section):
    """How the devices share the work."""

    data: Positive = Field(
        default=1, description="Devices the rows of a micro-batch are spread over, each with all the weights."
    )
    fsdp: Positive = Field(
        default=1,
        description="Devices rows and weights are spread over; data times fsdp must divide data.rows_per_microbatch.",
    )
    tensor: Positive = Field(
        default=1, description="Devices that share heads, feed-forward width and vocabulary of every row."
    )
    context: Positive = Field(
        default=1,
        description="Devices that share the positions of a row, for rows too long for one; must divide row lengths.",
    )

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor * self.context


class RunConfig(Section):
    """A training run."""

    run_dir: str = Field(description="Where the run is written; an existing run there is continued. May be gs://.")
    data: DataConfig
    model: ModelSection
    loss: LossConfig = Field(default_factory=LossConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    log_every: Positive = Field(default=1, description="Steps between progress lines where stderr is no terminal.")
    debug: bool = Field(
        default=False,
        description="No jit, no scan over layers, NaN checks, and the first rollout printed token by token: slow.",
    )
    tokenizer: str | None = Field(
        default=None, description="A tokenizer.json for the texts that debug prints; null: the model's, if it has one."
    )

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        spread = self.mesh.data * self.mesh.fsdp
        rows = {
            "data.rows_per_microbatch": self.data.rows_per_microbatch,
            "evaluation.rows_per_batch": self.evaluation.rows_per_batch or spread,
        }
        for name, count in rows.items():
            if count % spread:
                raise ValueError(
                    f"mesh.data times mesh.fsdp ({spread}) must divide {name} ({count}): every device gets the same "
                    "number of rows"
                )
        self._check_context()
        self._check_best()
        idle = [name for name, value in EvaluationConfig() if value != getattr(self.evaluation, name)]
        if idle and not self.evaluation.paths:
            raise ValueError(f"evaluation.{idle[0]}: without effect unless evaluation.paths names held-out rollouts")
        if self.debug and self.mesh.devices > 1:
            raise ValueError("debug runs on one device: set every size of mesh to 1")
        return self

    def _check_context(self) -> None:
        """Whether ``mesh.context`` divides what it cuts."""
        data, context = self.data, self.mesh.context
        cut = {
            "data.row_length": data.row_length,
            "data.edges_per_row": data.edges_per_row,
            "evaluation.row_length": self.evaluation.row_length,
        }
        if data.method == "sdcc" and self.loss.sdcc.peak:
            cut |= {"data.teacher_row_length": data.teacher_row_length, "data.pairs_per_row": data.pairs_per_row}
        for name, size in cut.items():
            if size is not None and size % context:
                raise ValueError(f"mesh.context ({context}) must divide {name} ({size}): every device gets its share")

    def _check_best(self) -> None:
        """Whether checkpoints fall on evaluated steps, where those decide which are the best."""
        checkpoint, evaluation = self.checkpoint, self.evaluation
        if not checkpoint.best or checkpoint.best_by != "evaluation_loss":
            return
        if not evaluation.paths:
            raise ValueError(
                "checkpoint.best goes by the loss on held-out rollouts: give evaluation.paths, or set "
                "checkpoint.best_by=loss"
            )
        every = evaluation.every
        if not every or (checkpoint.every and checkpoint.every % every and every % checkpoint.every):
            raise ValueError(
                f"checkpoint.best compares checkpoints whose weights were evaluated: with checkpoint.every "
                f"{checkpoint.every}, evaluation.every must divide it or be a multiple of it, got {every}"
            )
