"""Progress on stderr; bars only where that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from etils import epath
from rich.console import Console
from rich.progress import Progress

from mwjax.rollouts.errors import file_error
from mwjax.rollouts.lines import is_compressed, is_pipe
from mwjax.rollouts.packed import is_packed


@contextlib.contextmanager
def watching(
    paths: Sequence[epath.PathLike], doing: str = "auditing"
) -> Iterator[tuple[Callable[[str, int], None], Callable[[str, int, int], None]]]:
    """The callbacks that :func:`mwjax.audit.run` takes as ``progress`` and ``scoring``. What a model does also leaves a
    line when it is done, since it takes long. doing: what the bar over the files is called.

    Raises:
      RolloutFileError: a file cannot be opened.
    """
    sizes = {str(path): _size(path) for path in paths}
    console = Console(stderr=True, highlight=False)
    done = dict.fromkeys(sizes, 0)
    known = [size for size in sizes.values() if size is not None]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=sum(known) if len(known) == len(sizes) else None)
        scored = bar.add_task("scoring", total=None, visible=False)

        def advance(file: str, so_far: int) -> None:
            bar.advance(task, so_far - done[file])
            done[file] = so_far

        def moved(what: str, rows: int, total: int) -> None:
            bar.update(task, visible=False)
            bar.update(scored, description=what, completed=rows, total=total, visible=True)
            if rows == total:
                console.print(f"mwjax: {what}: {total} rows done", style="dim")

        yield advance, moved


def _size(path: epath.PathLike) -> int | None:
    """Bytes of a plain file; None where the progress cannot be told from them."""
    if is_pipe(path) or is_packed(path) or is_compressed(path):
        return None
    try:
        return epath.Path(path).expanduser().stat().length
    except OSError as error:
        raise file_error("read", path, error) from error
