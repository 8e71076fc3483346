"""``mwjax quickstart``: audit real rollouts, score them with the model that sampled them, train on them, report."""

from __future__ import annotations

from dataclasses import dataclass, replace

from etils import epath

from mwjax import audit
from mwjax.audit import AuditResult, consistency
from mwjax.audit import terminal as audit_terminal
from mwjax.quickstart import load_quickstart_rollouts_path, pretrained, tokenizer_path, training
from mwjax.quickstart.pretrained import Scores
from mwjax.quickstart.stages import Stages
from mwjax.quickstart.training import Training, TrainingRun
from mwjax.rollouts.read import summary
from mwjax.train.config import SmallModel
from mwjax.tree import Tree

# Of every harness; a rollout costs about six seconds of one core under the five methods.
SCORED_PER_HARNESS = 2
# What a run leaves in its directory, beside the directories of the training runs.
WRITTEN = (pretrained.FILE, "report.html", "card.md", "plots")


@dataclass(frozen=True, eq=False)
class Quickstart:
    """What a run found. runs: as far as they came; ``stopped`` on a signal, to be continued by the same command."""

    run_dir: epath.Path
    data: str
    audit: AuditResult
    trees: tuple[Tree, ...]
    scores: Scores
    training: Training
    runs: tuple[TrainingRun, ...]
    seconds: tuple[tuple[str, float], ...]

    @property
    def stopped(self) -> bool:
        return any(run.stopped for run in self.runs) or len(self.runs) < len(training.METHODS)

    @property
    def refused(self) -> int:
        """Rollouts that some stage left out."""
        return max([len(self.audit.refused), *(run.refused for run in self.runs)])


def default_training(steps: int) -> Training:
    """A small random decoder over the shipped tokenizer's vocabulary."""
    small = SmallModel(tokenizer=str(tokenizer_path()), layers=4, width=128, heads=4, key_value_heads=2)
    return Training(small, steps=steps)


def run(
    run_dir: epath.PathLike,
    *,
    steps: int = 24,
    with_model: bool = True,
    fresh: bool = False,
    data: epath.PathLike | None = None,
    small: Training | None = None,
    stages: Stages | None = None,
) -> Quickstart:
    """Run every stage, saying on stderr what happens, and write ``report.html`` into ``run_dir``.

    Args:
        run_dir: holds everything that is written. What an earlier start finished there is kept; a training run that was
            stopped is continued.
        steps: of each training run.
        with_model: False leaves out the stage that needs the pretrained model.
        fresh: remove what an earlier quickstart wrote into ``run_dir`` first.
        data, small: other rollouts and another training than the default ones; ``steps`` is unused then.

    Raises:
        ValueError: no usable rollout, or ``run_dir`` holds runs of another configuration.
    """
    from mwjax.quickstart import report

    folder = epath.Path(run_dir)
    stages = Stages(4) if stages is None else stages
    file = str(load_quickstart_rollouts_path() if data is None else data)
    small = default_training(steps) if small is None else small
    if fresh:
        clean(folder)
    folder.mkdir(parents=True, exist_ok=True)

    with stages.stage("audit", "Is every sampled token trained under the context it was sampled under?"):
        audited = audit.run(file)
        stages.say(summary(audited.rollouts, list(audited.refused)))
        if not audited.usable:
            raise ValueError(f"{file}: no usable rollout")
        trees = tuple(item.item for item in consistency.load(file)[1] if isinstance(item.item, Tree))
        audit_terminal.show(audited, stages.console)
    with stages.stage("logdiff", "What the weights that sampled say of their own tokens in each method's rows"):
        chosen = pretrained.choose(trees, SCORED_PER_HARNESS)
        scores = (
            pretrained.score(chosen, folder, stages)
            if with_model
            else Scores((), chosen, "N/A: left out by --no-model")
        )
        if scores.reason:
            stages.say(f"logdiff {scores.reason}")
    runs: list[TrainingRun] = []
    with stages.stage("training", f"{small.steps} steps each on the rows of {' and '.join(training.METHODS)}"):
        stages.say(training.WHY_SFT)
        for method in training.METHODS:
            runs.append(training.train(small, file, method, folder))
            if runs[-1].stopped:
                break
    found = Quickstart(folder, file, audited, trees, scores, small, tuple(runs), tuple(stages.seconds))
    if found.stopped:
        return found
    with stages.stage("report", f"{folder / 'report.html'}"):
        report.write(found)
    return replace(found, seconds=tuple(stages.seconds))


def clean(run_dir: epath.Path) -> None:
    """Remove what a quickstart writes into ``run_dir``, and nothing else."""
    for name in (*training.METHODS, *WRITTEN):
        path = run_dir / name
        if path.is_dir():
            path.rmtree()
        elif path.exists():
            path.unlink()
