"""One session of a run, from what the user gave to a RunRequest: configuration, checks, claim, checkpoint.

For `shoal run` and `shoal.run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from shoal import config as configuration
from shoal.config import Config
from shoal.dashboard import account
from shoal.dashboard.account import Summary
from shoal.dashboard.terminal import Terminal
from shoal.launcher import preflight, returning
from shoal.launcher.ahead import Ahead
from shoal.launcher.files import checkpoints, rundir
from shoal.launcher.planning import plan_settings
from shoal.launcher.planning.problem import refuse_other_size, tensor_bytes
from shoal.launcher.watching import page
from shoal.launcher.watching.watch import Resumed
from shoal.model import remote
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.strategy import plan as plans
from shoal.planner.strategy.plan import Plan
from shoal.runtime.records.account import CommittedStep

Source = Config | Mapping[str, Any] | str | Path | None  # of a configuration: checked, a tree, or a TOML file


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The command's arguments, checked."""

    config: Config
    directory: Path
    claim: IO[str]  # on the directory
    here: int  # peers to start
    started_s: float
    resumed: Resumed = Resumed()
    plan: Plan | None = None
    cluster: Cluster | None = None  # whose lines the peers get
    kill_every_s: float | None = None
    invite: str = ""  # to somebody else's run; '' to found one
    ahead: Ahead | None = None  # the first peer's process, begun already
    page: bool = False  # in the browser, beside the terminal
    time_s: float | None = None  # after which the run is saved and ended
    command: str = ""  # that goes on with the run, or takes part again
    view: Terminal = msgspec.field(default_factory=Terminal)  # shows its progress
    # Called in the launcher's loop with every new committed step
    hear: Callable[[CommittedStep], object] = lambda step: None


class Outcome(msgspec.Struct, frozen=True):
    """How the session ended: the command's exit code, the account, and both in words."""

    code: int
    summary: Summary
    text: str


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How this machine takes part, beside the configuration."""

    here: int | None = None  # peers to start; None: run.peers
    plan: str = ""  # its file
    cluster: str = ""  # with `plan`: the file whose lines the peers get
    resume: bool = False
    adopt: bool = False
    kill_every_s: float | None = None
    page: bool = False
    time_s: float | None = None
    command: str = ""  # that goes on with the run


class Prepared(msgspec.Struct, frozen=True):
    """A checked configuration with its plan. `warning`: why the run would be slow; ''."""

    config: Config
    plan: Plan | None = None
    cluster: Cluster | None = None
    warning: str = ""


def read(source: Source, settings: Sequence[str] = ()) -> Config:
    """The checked configuration, with `a.b=c` settings that replace its own. ValueError: all that is wrong with it."""
    if source is None or isinstance(source, str | Path):
        return remote.local(configuration.load(source, settings))
    tree = configuration.to_tree(source) if isinstance(source, Config) else _copy(source)
    return remote.local(configuration.from_tree(configuration.overridden(tree, settings)))


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in tree.items()}


def prepare(source: Source, settings: Sequence[str], options: RunOptions) -> Prepared:
    """Read everything that was named. ValueError: it does not fit together."""
    if options.cluster and not options.plan:
        raise ValueError("--cluster says what the peers of a plan are; name the plan too, with --plan FILE")
    if not options.plan:
        config = read(source, settings)
        return Prepared(config, warning=_slow_store(config, None))
    plan = plans.load(options.plan)
    assert source is None or isinstance(source, str | Path)
    config = plan_settings.load(str(source) if source is not None else None, settings, plan, options.plan)
    refuse_other_size(plan, config, options.plan)
    cluster = plan_settings.read_cluster(options.cluster, plan, config) if options.cluster else None
    return Prepared(config, plan, cluster, _slow_store(config, plan))


@contextmanager
def begin(prepared: Prepared, options: RunOptions, faults: Sequence[str] = ()) -> Iterator[RunRequest | Summary]:
    """Check this machine, claim the run's directory and find where the run goes on. Gives the account instead of a request when a
    resumed run has ended. ValueError: `faults` and what is wrong here, or another launcher has the directory."""
    started_s, config = time.monotonic(), prepared.config
    here = config.run.peers if options.here is None else options.here
    local = prepared.cluster is None  # a rehearsal's peers have loopback addresses of their own
    address = preflight.address(config, config.network.port) if local else []
    if options.page:
        page.require()
    preflight.refuse([*faults, *preflight.machine(config), *address])
    directory = config.run.directory
    with rundir.claimed(directory) as claim:
        resumed, others = Resumed(), returning.living(config, directory) if options.resume else None
        if others is not None:
            resumed = rundir.rejoin(directory, others.view, others.addresses)
        elif options.resume:
            resumed = rundir.resume(config, directory, adopt=options.adopt, others=here < config.run.peers)
        if not options.resume:
            checkpoints.begin(config, directory, adopt=options.adopt)
            rundir.set_aside(directory)
        elif (
            others is None
            and resumed.first_step >= config.run.steps
            and (over := _ended(config, directory)) is not None
        ):
            yield over
            return
        yield RunRequest(
            claim=claim,
            config=config,
            directory=directory,
            here=here,
            started_s=started_s,
            resumed=resumed,
            plan=prepared.plan,
            cluster=prepared.cluster,
            kill_every_s=options.kill_every_s,
            command=options.command,
            page=options.page,
            time_s=options.time_s,
        )


def _slow_store(config: Config, plan: Plan | None) -> str:
    """Why the run would be slow for want of room for boundary tensors; '' when it would not."""
    if config.run.stages == 1:
        return ""
    known_bytes = plan.boundary_bytes if plan is not None else 0.0
    try:
        size_bytes = known_bytes or tensor_bytes(config)
    except (
        ValueError,
        OSError,
    ):  # no such model, which is said elsewhere; or only transformers knows the family's shape
        return ""
    return configuration.narrow_store(config, size_bytes, config.run.stages, configuration.inflight(config.run))


def _ended(config: Config, directory: Path) -> Summary | None:
    """The account of a run that has trained all its steps, if its launcher lived to write it."""
    path = directory / "summary.json"
    summary = account.read(path) if path.exists() else None
    whole = summary is not None and summary.balanced and summary.steps == config.run.steps and not summary.unsaved
    return summary if whole else None
