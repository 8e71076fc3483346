"""Editors, tools and environments: episodes whose context is edited while they run, recorded exactly."""

from mwjax.harness.editors import HARNESSES
from mwjax.harness.episode import Episode, run_episode, run_episodes
from mwjax.harness.state import Editor, EditorState, Harness, Span
from mwjax.harness.villages import Task, make_task

__all__ = [
    "HARNESSES",
    "Editor",
    "EditorState",
    "Episode",
    "Harness",
    "Span",
    "Task",
    "make_task",
    "run_episode",
    "run_episodes",
]
