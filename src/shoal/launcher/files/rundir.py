"""A run's directory, runs/NAME/: who may write it, what an earlier run left there, and where a resumed one goes on.

    summary.json   the account and the losses            trace.jsonl  events and commands of every peer (`shoal replay`), or .gz
    commits.jsonl  each committed step with its round    status.json  the newest snapshot (`shoal status`)
    loss.png       checkpoints/step-N/                   logs/        each peer's words for people
    peers.json     the launcher's peers as processes      wanted.json  how many there are to be, while `shoal chaos` is at work
                                                          faults.json  whose links it has cut or slowed
    config.toml    the whole configuration               authority.key, bootstrap.json   for `shoal invite`
    bootstrap.before.json  where the session before was found, by whom a resumed one asks whether others train on
    invites.json   invites that were issued, renewed, revoked            founder.key, founder.port   its first peer's, in every session
    names.json     which peer is p1, p2, ...             override.json   the last `shoal recover`
    session.json   what this session began with, when it resumed an earlier one
    metrics.jsonl  tensorboard/  wandb/  what run.log_to asks for          page.token   the page's secret beyond loopback
    samples.jsonl  what followed eval.prompts            evictions.json  who was evicted, and why
    proofs.jsonl   the newest commits as they were signed (`shoal leaderboard --verify`), and proofs.older.jsonl
    watched        its time says when `shoal watch` last read the status
    unloadable     the step of the checkpoint for which the session before ended

For `shoal run`, which writes most of it, `shoal join`, `shoal invite`, `shoal revoke` and `shoal status`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from shoal import config as configuration
from shoal import trace
from shoal.config import Config, microbatches
from shoal.core.messages import Peer, View
from shoal.dashboard import account, plot
from shoal.escaping import UNDECODABLE, escaped, escaped_json
from shoal.launcher.files import checkpoints
from shoal.launcher.process import Process, lives
from shoal.launcher.watching.watch import Resumed
from shoal.runtime.checkpoints.catalog import Catalog, url_of
from shoal.runtime.records.account import Base, CommittedStep, restarted, surviving
from shoal.runtime.records.report import replace
from shoal.runtime.records.tape import segments


class MemberSeat(msgspec.Struct, frozen=True):
    """A member of the newest view; `label` is '' when it is another machine's. `name`: of its seat in the run's plan, or
    else its label, or else the beginning of its peer's name."""

    label: str
    stage: int
    name: str = ""


class LocalPeer(msgspec.Struct, frozen=True):
    """One of the launcher's peers."""

    label: str
    process: Process
    stage: int | None = None
    leads: bool = False
    peer: str = ""  # its name in the run; '' before it listens


class PeersFile(msgspec.Struct, frozen=True):
    """peers.json: who can be signalled here, and who the run relies on."""

    launcher: Process
    started: bool = False  # training has begun
    finished: bool = False
    peers: tuple[LocalPeer, ...] = ()
    members: tuple[MemberSeat, ...] = ()
    voters: tuple[str, ...] = ()  # labels as in `members`: these, and members that move to another stage
    casting_voter: str = ""  # label of the voter whose vote decides between two equal halves; "": none of these
    names: tuple[str, ...] = ()  # of everybody in the newest view, on whatever machine


class WantedPeers(msgspec.Struct, frozen=True):
    """wanted.json: the launcher starts peers until there are so many, as long as process `by` lives."""

    peers: int
    by: Process


def locals_of(directory: Path) -> PeersFile:
    """Of a run that is being trained here now."""
    path = directory / "peers.json"
    try:
        peers = msgspec.json.decode(path.read_bytes(), type=PeersFile)
    except FileNotFoundError:
        raise ValueError(f"{directory}: no run is there; name a run's directory, such as runs/quickstart") from None
    except UNDECODABLE as error:
        raise ValueError(f"{path} is not a list of a run's peers: {error}") from None
    if not lives(peers.launcher):
        raise ValueError(f"{directory}: its launcher is not running any more")
    return peers


def wanted(directory: Path) -> WantedPeers | None:
    """None: nobody but the launcher decides how many peers there are."""
    try:
        written = msgspec.json.decode((directory / "wanted.json").read_bytes(), type=WantedPeers)
    except (FileNotFoundError, *UNDECODABLE):
        return None
    return written if lives(written.by) else None


def labels(directory: Path) -> dict[str, Peer]:
    """The names of this machine's peers by their labels, those that have ended too."""
    path = directory / "names.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Peer]) if path.exists() else {}


def conclude(directory: Path, summary: account.Summary, name: str) -> tuple[str, bool]:
    """Write what the run adds up to, and draw its losses. Returns it in words, and whether it could be written."""
    try:
        replace(directory / "summary.json", account.encode(summary))
        if summary.losses:
            plot.save(summary.losses, directory / "loss.png", name)
        problem = ""
    except OSError as error:  # a full disk: the account is printed all the same
        problem = f"the account could not be written to {directory}: {error.strerror}"
    curve = plot.curve(summary.losses) if summary.losses else ""
    return "\n".join(filter(None, [curve, account.text(summary), problem])), not problem


def running(directory: Path) -> bool:
    """Is there a launcher that writes this directory?"""
    try:
        with open(_lock(directory)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[IO[str]]:
    """One launcher at a time writes a run's directory. The claim lies beside it, so that it can be set aside."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(_lock(directory), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{directory}: this run is being trained now; try another run.name=...") from None
        yield lock


BOOTSTRAP, BEFORE = "bootstrap.json", "bootstrap.before.json"
WATCHED = "watched"  # touched by `shoal watch` each time it reads the status
UNLOADABLE = "unloadable"  # the step of a checkpoint that no machine could load
FOUNDING = (
    "config.toml",
    "authority.key",
    "founder.key",
    "founder.port",
    "session.json",
    "plan.json",
)  # written once, when a session begins


def set_addresses_aside(directory: Path) -> tuple[str, ...]:
    """Where the run's peers were found in the session before; () if nowhere. Whoever makes an invite waits for those of the new one."""
    if (directory / BOOTSTRAP).exists():
        os.replace(directory / BOOTSTRAP, directory / BEFORE)
    return addresses(directory) or ()


def addresses(directory: Path) -> tuple[str, ...] | None:
    """Where the run's peers are found, or were before. None: it never had any, or the machine lost its power while they were written."""
    path = directory / BOOTSTRAP
    try:
        return msgspec.json.decode((path if path.exists() else directory / BEFORE).read_bytes(), type=tuple[str, ...])
    except (FileNotFoundError, *UNDECODABLE):
        return None


def founding(directory: Path) -> dict[str, bytes]:
    """What a directory that is deleted must get back, since nobody could make it again."""
    return {name: (directory / name).read_bytes() for name in FOUNDING if (directory / name).exists()}


def identity(directory: Path) -> tuple[int, int] | None:
    """Which directory it is; None when it is not there."""
    try:
        status = directory.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def make_anew(directory: Path, files: Mapping[str, bytes], claim: IO[str]) -> IO[str]:
    """A run's directory that was deleted or moved away while it is trained. Returns the claim on it. ValueError: another launcher has
    claimed that place meanwhile. OSError: it cannot be made."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(directory)
    if not lock.exists() or not os.path.samestat(os.fstat(claim.fileno()), lock.stat()):
        claim = open(lock, "w")  # its life is the launcher's
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            claim.close()
            raise ValueError(f"{directory} was deleted, and another launcher has begun a run there") from None
    for name in ("", "logs", "traces"):
        (directory / name).mkdir(exist_ok=True)
    for name, data in files.items():
        place = directory / name
        with open(
            os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if name.endswith(".key") else 0o644), "wb"
        ) as file:
            file.write(data)
    return claim


def _served(directory: Path) -> bool:
    """The run of that directory trained nothing, so that there is nothing to go on with."""
    with contextlib.suppress(ValueError, OSError):
        return configuration.load(directory / "config.toml").run.serve
    return False


def _committed(directory: Path) -> bool:
    """That run has done a step, so that it ended neither before it began nor with the reason that is on the screen."""
    path = directory / "commits.jsonl"
    return path.exists() and path.stat().st_size > 0


def set_aside(directory: Path, but: str = "") -> None:
    """A new run begins with an empty directory; what an earlier one of that name left is kept under another. `but`: a folder that stays."""
    if directory.exists() and any(directory.iterdir()):
        number = 1
        while (old := directory.with_name(f"{directory.name}.{number}")).exists():
            number += 1
        ours = (directory / checkpoints.KEY).exists()  # a guest has nothing to resume
        killed = ours and _committed(directory) and not (directory / "summary.json").exists()
        os.rename(directory, old)
        print(f"what was in {directory} is now in {old}")
        if killed and not _served(old):
            print(f"that run was killed; to go on with it, name it {directory.name} again and add --resume")
        if but:
            directory.mkdir()
            os.rename(old / but, directory / but)
            print(f"except {directory / but}, which the run may need")
    directory.mkdir(parents=True, exist_ok=True)


def resume(config: Config, directory: Path, *, adopt: bool = False, others: bool = False) -> Resumed:
    """The newest complete checkpoint, and the commits of the steps that it holds; from the beginning when there is no checkpoint
    yet, so that the same command goes on whenever the one before was killed. What had been committed since is undone. `others`: machines
    will join that hold what is missing here."""
    directory.mkdir(parents=True, exist_ok=True)
    standing = surviving(commits(directory))
    before = _unloadable(directory)
    if before < float("inf"):
        print(f"--resume: no machine could load the checkpoint of step {before:.0f}; an older one is taken")
    store = Catalog(url_of(config))
    saved = _newest_saved(directory, standing, before, lost=others and not store.place)
    beginning = checkpoints.newest(config, directory, checkpoints.Wanted(adopt, saved, others, before))
    training, first = beginning.training, beginning.step
    kept = tuple(step for step in standing if step.commit.step < first)
    void = sum(step.commit.step >= first for step in standing)
    if not first:
        print(f"--resume: there is no checkpoint in {store.url} yet: training begins at step 0")
    if void:
        print(f"{void} steps that were committed after step {first} are undone and trained again")
    base = restarted(standing, first, microbatches(config.train), _began_with(directory))
    if training is not None and training.adopted and not standing:
        base = msgspec.structs.replace(base, adopted_steps=first)
    resumed = Resumed(first_step=first, steps=kept, base=base, checkpoint=store.path(first) if first else "")
    if first >= config.run.steps:
        print(f"--resume: all {first} steps are trained; to go on, try run.steps={2 * first}")
        return resumed
    _set_trace_aside(directory, first)
    _thin_earlier(directory, config.run.trace_bytes * config.run.peers)
    _begin_session(directory, base, kept)
    return resumed


def rejoin(directory: Path, view: View, addresses: tuple[str, ...]) -> Resumed:
    """What this machine knows of the session that others have gone on with; nothing is undone. Where they have gone back to a
    checkpoint since, it is one that was saved when this machine was last there, or a newer one."""
    base, standing = _began_with(directory), surviving(commits(directory))
    last = standing[-1] if standing else None
    if last is not None and last.commit.step >= base.first_step and last.epoch != view.epoch:
        standing = tuple(step for step in standing if step.commit.step < max(last.saved, base.first_step))
    return Resumed(first_step=base.first_step, steps=standing, base=base, living=addresses)


def _newest_saved(directory: Path, standing: Sequence[CommittedStep], before: float, *, lost: bool) -> int:
    """The step of the newest checkpoint of a step below `before`, as the session before and its commits say. `lost`: what was saved here
    is not here any more, and no commit may say yet that a checkpoint was saved elsewhere."""
    steps = {0, _summary_saved(directory), *(step.saved for step in standing)}
    if lost:
        steps |= {step.commit.step + 1 for step in standing if step.commit.save}
    return max(step for step in steps if step < before)


def _begin_session(directory: Path, base: Base, kept: Sequence[CommittedStep]) -> None:
    """Write what the session begins with."""
    # In this order: killed between the two, the next one finds the same again.
    replace(directory / "session.json", msgspec.json.encode(base))
    replace(directory / "commits.jsonl", b"".join(escaped_json(msgspec.json.encode(step)) + b"\n" for step in kept))
    (directory / "summary.json").unlink(missing_ok=True)  # it is not over after all
    (directory / UNLOADABLE).unlink(missing_ok=True)


def pass_over(directory: Path, step: int) -> None:
    """No machine could load the checkpoint of that step: the next --resume goes on from an older one."""
    replace(directory / UNLOADABLE, str(step).encode())


def _unloadable(directory: Path) -> float:
    try:
        return int((directory / UNLOADABLE).read_text())
    except (FileNotFoundError, ValueError):
        return float("inf")


def _summary_saved(directory: Path) -> int:
    """The step of the newest checkpoint at the end of the session before, if its launcher lived to write it."""
    path = directory / "summary.json"
    return account.read(path).saved if path.exists() else 0


def commits(directory: Path) -> list[CommittedStep]:
    """Every commit in commits.jsonl, in the order in which they were received."""
    path = directory / "commits.jsonl"
    steps: list[CommittedStep] = []
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            steps.append(msgspec.json.decode(text, type=CommittedStep))
        except msgspec.DecodeError:
            continue  # half a line: the launcher was killed; if a step is missing for it, the account will say so
    return steps


def _began_with(directory: Path) -> Base:
    path = directory / "session.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Base)
    except FileNotFoundError:  # it was the first
        return Base()
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not what a session begins with: {error}; remove it to go on without") from None


def _set_trace_aside(directory: Path, step: int) -> None:
    """Keep the earlier session's trace under the step at which this one begins; its pieces, if its launcher was killed."""
    whole = trace.find(directory)
    if not segments(directory / "traces") and whole.exists():
        os.replace(whole, _unused(directory, step, "".join(whole.suffixes)))
        return
    try:
        _merge(directory, lambda packed: _unused(directory, step, ".jsonl.gz" if packed else ".jsonl"))
    except (OSError, ValueError) as error:  # a full disk, or a torn trace, is no reason not to go on
        kept = _unused(directory, step, "")
        os.rename(directory / "traces", kept)
        print(escaped(f"the earlier session's traces are in {kept}, they could not be put together: {error}"))


def _thin_earlier(directory: Path, most_bytes: int) -> None:
    """A run that is resumed every day leaves many traces: the newest stay, as far as they take `most_bytes` together, the newest always."""
    earlier = sorted(directory.glob("trace-before-*.jsonl*"), key=lambda path: path.stat().st_mtime, reverse=True)
    total_bytes = 0
    for number, path in enumerate(earlier):
        total_bytes += path.stat().st_size
        if number and total_bytes > most_bytes:
            path.unlink()
            print(f"{path} is removed: run.trace_bytes")


def _unused(directory: Path, step: int, ending: str) -> Path:
    number, path = 1, directory / f"trace-before-{step}{ending}"
    while path.exists():  # killed again before another checkpoint was written
        number += 1
        path = directory / f"trace-before-{step}.{number}{ending}"
    return path


def gather_traces(directory: Path) -> None:
    """The peers' traces as one, by time. OSError: there is no room; they stay as they are."""
    if segments(directory / "traces") or not trace.find(directory).exists():
        _merge(directory, lambda packed: directory / ("trace.jsonl.gz" if packed else "trace.jsonl"))


def thin_traces(directory: Path, ended: Sequence[str], most_bytes: int) -> list[str]:
    """Remove whole traces of peers that have ended, in that order, until those of the ended together take at most `most_bytes`.
    Returns whose are gone. Each living peer keeps its own within its room."""
    kept = segments(directory / "traces")
    sizes = {label: sum(piece.stat().st_size for piece in kept[label]) for label in ended if label in kept}
    removed = []
    for label in [label for label in ended if label in sizes]:
        if sum(sizes.values()) <= most_bytes:
            break
        del sizes[label]
        removed.append(label)
        for piece in kept[label]:
            piece.unlink(missing_ok=True)
    return removed


def _merge(directory: Path, into: Callable[[bool], Path]) -> None:
    """Compressed, when any of them was: as one they would take ten times the room that they were given."""
    traces = list(segments(directory / "traces").values())
    path = into(any(piece.suffix == ".gz" for pieces in traces for piece in pieces))
    draft = path.with_name(f".{path.name}")
    try:
        trace.merge(traces, draft)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    for piece in (directory / "traces").glob("*.jsonl*"):
        piece.unlink(missing_ok=True)


def _lock(directory: Path) -> Path:
    """Beside the directory, so that an old one can be set aside under the claim."""
    return directory.parent / f".{directory.name}.lock"
