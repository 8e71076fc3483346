"""The quickstart's report: one page with everything in it, the same figures as files, and the run's card."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING

from etils import epath

from mwjax.audit import report
from mwjax.audit.audit_page import sizes_figure, wrong_share_figure
from mwjax.audit.report import Section
from mwjax.quickstart import figures
from mwjax.quickstart.pretrained import MODEL
from mwjax.quickstart.stages import times
from mwjax.quickstart.summary import HEADERS, explanations, method_rows
from mwjax.quickstart.training import WHY_SFT
from mwjax.rollouts.record import MAIN_CHAIN
from mwjax.rollouts.storage import replacing
from mwjax.train.card import versions
from mwjax.tree import Tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mwjax.quickstart.run import Quickstart

TITLE = "Train agents on the contexts they actually saw"
PROBLEM = (
    "An agent harness edits the model's context while it works (it drops tool results, folds history into summaries, "
    "moves text out and back), so a rollout is a tree of contexts, not a sequence. Trained as one sequence, many "
    "sampled tokens are scored under a context the model never had in front of it; trained on the tree, none is."
)


def write(found: Quickstart) -> None:
    """Write ``report.html``, ``card.md`` and ``plots/`` into the run directory, each file whole or not at all."""
    drawn = _figures(found)
    plots = found.run_dir / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    for name, fig in drawn.items():
        _write(plots / f"{name}.svg", report.figure_svg(fig))
    card = card_facts(found)
    _write(found.run_dir / "card.md", "# quickstart\n\n" + "".join(f"- **{name}**: {value}\n" for name, value in card))
    _write(found.run_dir / "report.html", page(found, drawn))


def _write(path: epath.Path, text: str) -> None:
    with replacing(path) as out:
        out.write(text.encode())


def _figures(found: Quickstart) -> dict[str, Figure]:
    drawn = {"tree": figures.rollout_tree(shown_tree(found.trees)), "prefixes": wrong_share_figure(found.audit)}
    wrong = [one for name in ("naive_compressed", "naive_full") if (one := found.audit.method(name)).wrong]
    if wrong:
        drawn["sizes"] = sizes_figure(wrong)
    if found.scores.results:
        drawn["logdiff"] = figures.logdiff_curves(found.scores.results)
    drawn["loss"] = figures.loss_curves({run.method: run.losses for run in found.runs})
    return drawn


def shown_tree(trees: tuple[Tree, ...]) -> Tree:
    """The rollout with the most forks of ``main``; of those the one with the most text put in or taken out."""

    def busy(tree: Tree) -> tuple[int, int]:
        forks = [junction for junction in tree.junctions if junction.chain == MAIN_CHAIN]
        return len(forks), sum(fork.evicted + fork.inserted for fork in forks)

    return max(trees, key=busy)


def page(found: Quickstart, drawn: Mapping[str, Figure]) -> str:
    """The whole page; ``drawn`` by name."""
    audited, scores = found.audit, found.scores
    table = report.table([header.replace("re- c", "rec") for header in HEADERS], _rows(found))
    table += "".join(report.paragraph(line, "note") for line in explanations(audited, scores, found.runs))
    tree = shown_tree(found.trees)
    sections = [
        Section("", report.paragraph(PROBLEM) + report.verdict(audited.verdict, audited.advice, audited.consistent)),
        Section("What every method does to these rollouts", table),
        Section("One rollout", report.figure(drawn["tree"], _tree_caption(tree))),
        Section("Is a token's log-prob in training the one it was sampled with?", _logdiff(found, drawn)),
        Section("Which contexts the loss tokens are trained under", _prefixes(drawn)),
        Section("Training", _training(found, drawn)),
        Section("Card", report.facts(card_facts(found)) + _links(found)),
    ]
    return report.html_page(TITLE, sections, subtitle="mwjax quickstart: real rollouts, audited, scored and trained on")


def _rows(found: Quickstart) -> list[tuple[str, ...]]:
    return method_rows(found.audit, found.scores, found.runs)


def _tree_caption(tree: Tree) -> str:
    views = [view for view in tree.views if view.chain == MAIN_CHAIN]
    question = tree.rollout.meta.get("question")
    asked = f", asked “{question}”" if question else ""
    return (
        f"Rollout {tree.rollout.id}{asked}: {len(views)} contexts the model sampled in, one per bar. A stroke marks "
        "where the next context leaves the one above. Training on the last bar alone scores the blue tokens of the "
        "upper ones under what the last bar shows; the prefix trie keeps each under its own bar and stores once what "
        "they share."
    )


def _logdiff(found: Quickstart, drawn: Mapping[str, Figure]) -> str:
    if "logdiff" not in drawn:
        return report.paragraph(f"logdiff {found.scores.reason}")
    caption = (
        f"How far training's log-probs are from those recorded when sampling, {MODEL}, {len(found.scores.trees)} "
        "rollouts. Exact methods differ by rounding alone; what lies right of that is tokens scored under another "
        "context."
    )
    return report.figure(drawn["logdiff"], caption)


def _prefixes(drawn: Mapping[str, Figure]) -> str:
    body = report.figure(drawn["prefixes"], "Loss tokens whose training prefix is not the one they were sampled under.")
    if "sizes" in drawn:
        caption = "Loss tokens with a wrong prefix, by how many tokens it lacks (missing) and has too many (extra)."
        body += report.figure(drawn["sizes"], caption)
    return body


def _training(found: Quickstart, drawn: Mapping[str, Figure]) -> str:
    caption = (
        "Loss of the two runs. They train different tokens under different contexts, so the heights do not compare the "
        "methods: this shows that both run, not which is better."
    )
    return report.paragraph(WHY_SFT) + report.figure(drawn["loss"], caption)


def card_facts(found: Quickstart) -> list[tuple[str, str]]:
    """What a reader needs to interpret the figures."""
    small = found.training.model
    harnesses = sorted({str(tree.rollout.meta.get("harness", "not named")) for tree in found.trees})
    policies = sorted({str(tree.rollout.meta.get("model", "not named")) for tree in found.trees})
    scored = f"{len(found.scores.trees)} rollouts" if found.scores.results else found.scores.reason
    return [
        ("data", f"{found.data}: {found.audit.rollouts} rollouts, {len(found.audit.refused)} refused"),
        ("harness", f"{', '.join(harnesses)}; white box, edits recorded"),
        ("sampled by", "; ".join(policies)),
        ("logdiff", scored),
        (
            "trained",
            f"{small.family}, {small.layers} layers, width {small.width}, random weights; {found.training.steps} steps "
            f"of SFT, {found.training.rollouts_per_step} rollouts each, rows of {found.training.row_length} tokens",
        ),
        ("versions", versions()),
        ("time of this start", times(found.seconds)),
    ]


def _links(found: Quickstart) -> str:
    """Where the rest lies, relative to the page."""
    targets = [
        (f"{run.method}/", f"{run.method}: config.yaml, card.md, metrics.jsonl, checkpoints/") for run in found.runs
    ]
    targets.append(("plots/", "plots: the figures of this page as SVG files"))
    items = (f'<li><a href="{html.escape(href)}">{html.escape(words)}</a></li>' for href, words in targets)
    return f"<ul>{''.join(items)}</ul>"
