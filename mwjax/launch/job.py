"""What is to run, and where."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from mwjax.launch.topologies import Slice

if TYPE_CHECKING:
    from mwjax.train.config import MeshConfig

Capacity = Literal["on-demand", "spot", "reserved"]
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
BUCKET = re.compile(r"gs://[a-z0-9][-_.a-z0-9]*(/[^\s/]+)*/*")
SECRET = re.compile(r".*(TOKEN|KEY|SECRET|PASSWORD|CREDENTIALS)", re.IGNORECASE)  # names of variables that hold one
EXTRAS = ("tpu", "gcs")  # of mwjax, that every host needs
# Names of files that stand beside those of the job: see `remote`.
TAKEN = ("installed", "job", "log", "log.before", "pid", "secrets", "status", "status.new", "stopped", "venv")
ELSEWHERE = ("gs://", "s3://", "http://", "https://")  # names that mean the same on every machine


class LaunchError(ValueError):
    """What was asked for cannot be launched, or the cloud refused it; the message says why and what to do."""


class Host(NamedTuple):
    """One virtual machine. node: its slice; worker: its number in there; label: what its lines begin with."""

    node: str
    worker: int
    label: str


@dataclass(frozen=True)
class Machines:
    """What is rented. name: of the queued resource. slices: how many ``slice``. runtime: image of the hosts, or None
    for that of the generation. internal: hosts without addresses of their own on the internet. give_up_after: how long
    to queue, as gcloud writes durations (``6h``); None: for ever. create_flags: passed on to gcloud as they are."""

    name: str
    slice: Slice
    zone: str
    slices: int = 1
    project: str | None = None
    capacity: Capacity = "on-demand"
    runtime: str | None = None
    internal: bool = False
    give_up_after: str | None = None
    create_flags: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the slices."""
        return (self.name,) if self.slices == 1 else tuple(f"{self.name}-{number}" for number in range(self.slices))

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(
            Host(node, worker, str(worker) if self.slices == 1 else f"{number}/{worker}")
            for number, node in enumerate(self.nodes)
            for worker in range(self.slice.hosts)
        )


@dataclass(frozen=True)
class Job:
    """What runs on every host. command: the same everywhere. files: copied into its working directory. environment:
    beside what the hosts have. secrets: the same, in no command line and in nothing that is printed. extras: of mwjax,
    to be installed. python: version of the interpreter that is installed for it."""

    machines: Machines
    command: tuple[str, ...]
    files: tuple[Path, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    extras: tuple[str, ...] = EXTRAS
    python: str = "3.12"

    @property
    def id(self) -> str:
        """Equal for the same command in the same environment: the same job, to be found running again. Other values of
        secrets make no other job."""
        names = [name for name, _ in self.secrets]
        text = "\0".join([*self.command, *(f"{name}={value}" for name, value in self.environment), *names])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def describe(self) -> str:
        return shlex.join(self.command)


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise LaunchError(f"name {name!r}: use lower-case letters, digits and hyphens, a letter first, 40 at most")
    return name


def plan(
    machines: Machines,
    words: Sequence[str],
    *,
    bucket: str | None,
    files: Sequence[str] = (),
    environment: Sequence[str] = (),
    python: str = "3.12",
    counted: bool = True,
) -> Job:
    """The job that the command line asks for.

    words: ``CONFIG.yaml KEY=VALUE...`` for ``mwjax train``, or any command. With a ``bucket``, jax's compilation cache
    is kept there and, unless configuration or options name another in a bucket, the run directory. environment:
    ``NAME=VALUE``, or ``NAME`` for a secret whose value this process's environment has; what is called a token, a key
    or the like is a secret anyway. counted: let every process check how many hosts there are and how many devices each
    has.

    Raises LaunchError or ConfigError for whatever would fail only once the machines are paid for: an option that does
    not exist, a run directory that goes with the hosts, a file that is not on them, a mesh that leaves devices out.
    """
    if not words:
        raise LaunchError("give what to run: a configuration with options, or any command after --")
    if re.match(r"[\w.]+=", words[0]):
        raise LaunchError(f"{words[0]}: the configuration comes first, options after it")
    if bucket is not None and not BUCKET.fullmatch(bucket):
        raise LaunchError(f"--bucket {bucket}: expected gs://BUCKET or gs://BUCKET/FOLDER")
    bucket = bucket.rstrip("/") if bucket else None
    shipped = tuple(Path(file) for file in files)
    for file in shipped:
        if not file.is_file():
            raise LaunchError(f"--file {file}: no such file")
    command, extras = tuple(words), [*EXTRAS]
    if words[0].endswith((".yaml", ".yml")):
        command, config, more = _train(machines, words, bucket, {file.name for file in shipped})
        shipped, extras = (config, *shipped), [*EXTRAS, *more]
    names = [file.name for file in shipped]
    if taken := sorted(set(names) & set(TAKEN)):
        raise LaunchError(f"{taken[0]}: mwjax keeps a file of that name beside the job's: give it another name")
    if len(set(names)) < len(names):
        raise LaunchError(f"files of one name would overwrite each other on the hosts: {', '.join(sorted(names))}")
    plain, secrets = _environment(machines, bucket, environment, counted)
    return Job(machines, command, shipped, plain, secrets, tuple(extras), python)


def _train(
    machines: Machines, words: Sequence[str], bucket: str | None, shipped: set[str]
) -> tuple[tuple[str, ...], Path, list[str]]:
    """The command on the hosts, the configuration to copy there, and the extras of mwjax that it needs."""
    from mwjax.model.hub import HUB_ID
    from mwjax.train import load

    config, overrides = Path(words[0]), list(words[1:])
    # A file without run_dir will do: the bucket's is taken below, as where the file names a local one.
    settings = load.load(str(config), overrides, defaults=["run_dir=runs"] if bucket else ())
    in_bucket = settings.run_dir.startswith("gs://")
    if bucket and not in_bucket and not any(word.startswith("run_dir=") for word in overrides):
        overrides.append(f"run_dir={bucket}/{machines.name}")
        in_bucket = True
    if not in_bucket:
        instead = "leave run_dir= out" if bucket else "give --bucket gs://BUCKET/FOLDER"
        raise LaunchError(
            f"run_dir {settings.run_dir} would be on the hosts' own disks, and its checkpoints gone with them: "
            f"{instead}, or name one in a bucket, run_dir=gs://..."
        )
    small = settings.model.small
    files = [*settings.data.paths, *settings.evaluation.paths, small.tokenizer if small else None]
    for value in [*files, settings.model.path]:
        if value is None or value.startswith(ELSEWHERE) or value in shipped:
            continue
        if not Path(value).exists() and value in files and not value.startswith("/"):
            raise LaunchError(f"{value}: no such file, here or among what is copied to the hosts with --file")
        if not Path(value).exists() and not value.startswith("/") and not HUB_ID.fullmatch(value):
            raise LaunchError(f"model.path {value}: no such folder; give a hub id or the model's gs:// name")
        if Path(value).exists():
            raise LaunchError(
                f"{value} is on this machine, not on the hosts: copy it into the bucket (gcloud storage cp -r) and "
                f"give its gs:// name; or, if it is one small file, add --file {value} and name it {Path(value).name} "
                "in the options"
            )
    _check_mesh(machines, settings.mesh)
    trackers = {"tensorboard": settings.tracking.tensorboard, "wandb": settings.tracking.wandb}
    return ("mwjax", "train", config.name, *overrides), config, [name for name, wanted in trackers.items() if wanted]


def _check_mesh(machines: Machines, mesh: MeshConfig) -> None:
    """Several processes must use all their devices, see `mwjax.train.mesh.make_mesh`; one a number that divides them,
    and only ``data`` goes over slices, see `mwjax.model.sharding.make_mesh`."""
    hosts = len(machines.hosts)
    used, devices = mesh.devices, machines.slices * machines.slice.devices
    if used != devices and (hosts > 1 or devices % used):
        several = f"mesh.data={machines.slices} " if machines.slices > 1 else ""
        needed = f"on {hosts} hosts it must be all" if hosts > 1 else "it must be all, or a number that divides theirs"
        raise LaunchError(
            f"mesh: {used} of {devices} devices used; {needed}: {several}mesh.fsdp={machines.slice.devices} with "
            f"data.rows_per_microbatch={devices}, for instance; mwjax plan says what fits"
        )
    if mesh.data % machines.slices:
        raise LaunchError(
            f"mesh.data ({mesh.data}) must be a multiple of the slices ({machines.slices}): only it goes from one to "
            f"another; mesh.data={machines.slices} mesh.fsdp={machines.slice.devices}, for instance"
        )


Variables = tuple[tuple[str, str], ...]


def _environment(
    machines: Machines, bucket: str | None, given: Sequence[str], counted: bool
) -> tuple[Variables, Variables]:
    """Plain variables and secret ones."""
    values: dict[str, str] = {"PYTHONUNBUFFERED": "1"}
    secrets: dict[str, str] = {}
    if bucket:
        values["JAX_COMPILATION_CACHE_DIR"] = f"{bucket}/compilation-cache"
    if counted:
        values["MWJAX_PROCESSES"] = str(len(machines.hosts))
        values["MWJAX_LOCAL_DEVICES"] = str(machines.slice.devices_per_host)
    for pair in given:
        name, equals, value = pair.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise LaunchError(f"--env {pair}: expected NAME=VALUE, or NAME to take its value from this environment")
        if not equals and name not in os.environ:
            raise LaunchError(f"--env {name}: {name} is not set here; export it, or give --env {name}=VALUE")
        kind, other = (values, secrets) if equals and not SECRET.fullmatch(name) else (secrets, values)
        kind[name] = value if equals else os.environ[name]
        other.pop(name, None)  # the last word counts
    return tuple(values.items()), tuple(secrets.items())
