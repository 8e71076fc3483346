"""Scripts that run on a host, in its login shell. What they print for us begins with :data:`MARK`.

The job is a session of its own there, in ``~/mwjax-launch``: it outlives the connection that started it. Beside its
``log`` stand ``job`` (which one it is), ``pid``, ``status`` (once it has ended) and ``stopped`` (if it was told to).
Secrets come as a file that only we can read, and not in a command, which every process list shows.
"""

from __future__ import annotations

import shlex

from mwjax.launch.job import Job

FOLDER = "mwjax-launch"
SECRETS = "secrets"  # the file of that name there
MARK = "\x1emwjax-"
_OCTAL = r"\036mwjax-"
_ENTER = f'cd "$HOME/{FOLDER}"'


def prepare() -> str:
    """Makes the folder; whether a host can be reached shows in it."""
    return f'mkdir -p "$HOME/{FOLDER}" && chmod 700 "$HOME/{FOLDER}"'


def secrets(job: Job) -> str:
    """The file of that name: the job's secrets for its shell."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.secrets)


def _leave_alone(job: Job) -> list[str]:
    """Ends the script where the job runs already, and with an error where another does."""
    return [
        'if [ -f pid ] && [ ! -f status ] && kill -0 -- "-$(cat pid)" 2>/dev/null; then',
        f'  if [ "$(cat job)" = {job.id} ]; then exit 0; fi',
        '  echo "another job is running here" >&2; exit 1',
        "fi",
    ]


def install(job: Job, wheel: str, digest: str) -> str:
    """Installs the wheel that was copied into the folder, unless the same is installed already, or the job runs.

    The hosts' own Python is older than mwjax's; uv brings one. PIP_BREAK_SYSTEM_PACKAGES: newer images refuse a plain
    ``pip install --user``.
    """
    extras = ",".join(job.extras)
    tag = shlex.quote(f"{digest} {extras} {job.python}")
    return "\n".join(
        [
            f"set -e; {_ENTER}",
            *_leave_alone(job),
            f'if [ "$(cat installed 2>/dev/null)" = {tag} ]; then exit 0; fi',
            "rm -f installed",
            'export PATH="$HOME/.local/bin:$PATH" PIP_BREAK_SYSTEM_PACKAGES=1',
            "command -v uv >/dev/null || python3 -m pip install --quiet --user uv",
            f"uv venv --quiet --clear --python {shlex.quote(job.python)} venv",
            f'uv pip install --quiet --python venv/bin/python "mwjax[{extras}] @ file://$PWD/{wheel}"',
            f"echo {tag} > installed",
        ]
    )


def start(job: Job) -> str:
    """Starts the job and returns. Its shell waits for it even when told to stop, to write down how it ended."""
    run = f"trap : TERM INT\n{shlex.join(job.command)}\necho $? > status.new\nmv status.new status"
    return "\n".join(
        [
            f"set -e; {_ENTER}",
            *_leave_alone(job),  # gcloud runs a script once more when its connection breaks
            "rm -f status stopped; if [ -f log ]; then mv -f log log.before; fi",
            *(f"export {name}={shlex.quote(value)}" for name, value in job.environment),
            *([f". ./{SECRETS}"] if job.secrets else []),
            f'export PATH="$HOME/{FOLDER}/venv/bin:$PATH"',
            f"echo {job.id} > job",
            f"setsid nohup bash -c {shlex.quote(run)} > log 2>&1 < /dev/null &",
            "echo $! > pid",
        ]
    )


def probe() -> str:
    """Prints ``none``, or ``running ID``, ``ended STATUS ID`` or ``lost ID`` (it died without a word)."""
    return "\n".join(
        [
            f"{_ENTER} 2>/dev/null && [ -f job ] || {{ printf '{_OCTAL}job none\\n'; exit 0; }}",
            'if [ -f status ]; then state="ended $(cat status)"',
            'elif kill -0 -- "-$(cat pid)" 2>/dev/null; then state=running',
            "else state=lost; fi",
            f'printf \'{_OCTAL}job %s %s\\n\' "$state" "$(cat job)"',
        ]
    )


def follow(offset: int) -> str:
    """Prints ``log OFFSET``, the log from that byte on until the job has ended, and then ``end STATUS [stopped]``;
    STATUS is ``lost`` where the job died without a word."""
    return "\n".join(
        [
            f"{_ENTER} || exit 1",
            f"printf '{_OCTAL}log {offset}\\n'",
            f'tail -c +{offset + 1} -s 0.2 --pid="$(cat pid)" -f log 2>/dev/null',
            'status="$(cat status 2>/dev/null)"',  # empty where the disk was full
            f'printf \'{_OCTAL}end %s %s\\n\' "${{status:-lost}}" "$(if [ -f stopped ]; then echo stopped; fi)"',
        ]
    )


def stop(seconds: int, job: str | None = None) -> str:
    """Asks the job to stop, waits so long for it to save its state, then kills it. job: only the one of that id."""
    return "\n".join(
        [
            f"{_ENTER} 2>/dev/null && [ -f pid ] && [ ! -f status ] || exit 0",
            *([f'[ "$(cat job)" = {job} ] || exit 0'] if job else []),
            'touch stopped; group="-$(cat pid)"',
            'kill -TERM -- "$group" 2>/dev/null || exit 0',
            f"for _ in $(seq {2 * seconds}); do",
            '  [ ! -f status ] && kill -0 -- "$group" 2>/dev/null || exit 0',
            "  sleep 0.5",
            "done",
            'kill -KILL -- "$group"',
        ]
    )
