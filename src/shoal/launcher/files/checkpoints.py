"""Which checkpoint a run begins with: the newest whole one of its own, or none at all; another run's only when that is asked for.

For `shoal run` and `shoal train` with and without --resume, `shoal join` and `shoal recover`, before anything starts.
Checkpoints belong to the run whose authority's key they carry (docs/design/2026-11-22-checkpoints-belong-to-a-run.md). What
cannot be decided without losing something is a ValueError that names every checkpoint concerned and says what would do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.config import Config
from shoal.escaping import escaped
from shoal.runtime.checkpoints import marker
from shoal.runtime.checkpoints.catalog import Catalog, Entry, url_of, whose
from shoal.runtime.checkpoints.marker import Training
from shoal.transport.identity.invite import Authority

KEY = "authority.key"
ADOPT = "where checkpoint.url holds another run's checkpoints: with --resume continue from them as this run's, else rename them"


def authority(directory: Path) -> str:
    """The id of the key that the run in `directory` is named by; the first time a key is made."""
    return Authority.load(directory / KEY).run


def begin(config: Config, directory: Path, *, adopt: bool) -> None:
    """A run begins anew, in a directory that is set aside: nothing that lies where it will save may be another run's, nor an earlier
    session's. `adopt`: what lies there is renamed and kept."""
    catalog = Catalog(url_of(config))
    if catalog.within(directory):
        return  # it is set aside with the directory
    checkpoints = [entry for entry in catalog.entries() if not catalog.unfinished(entry)]
    if not checkpoints:
        return
    if not adopt:
        mine = authority(directory) if (directory / KEY).exists() else None
        earlier = all(entry.training is not None and entry.training.authority == mine for entry in checkpoints)
        whose_are = "an earlier session's" if earlier else "another run's"
        raise ValueError(
            f"checkpoint.url = {catalog.url} holds {listed(checkpoints, whose_are)}. Nothing there was changed. "
            + ("Add --resume to go on from them" if earlier else "Give another checkpoint.url")
            + "; or --adopt to begin anew, with what is there kept under other names"
        )
    if not catalog.storage.local:
        raise ValueError(
            f"--adopt: {catalog.url} holds {listed(checkpoints)}, and this kind of storage cannot rename them; give another checkpoint.url"
        )
    for entry in checkpoints:
        print(escaped(f"--adopt: {entry.path} is now {catalog.set_aside(entry.step, 'before')}"))


def refuse_others(config: Config, run: str) -> None:
    """For a guest in `run`: where it writes, there are no checkpoints of another run."""
    catalog = Catalog(url_of(config), run)
    others = [entry for entry in catalog.entries() if entry.training is not None and entry.training.authority != run]
    if others and config.checkpoint.url:  # else they are set aside with the directory
        raise ValueError(
            f"checkpoint.url = {catalog.url} holds {listed(others)}, not of the run of this invite; give another"
        )


class Beginning(msgspec.Struct, frozen=True):
    """Where a resumed run begins: 0 when there never was a checkpoint. `training` is None where other machines hold all of it."""

    step: int = 0
    training: Training | None = None


class Wanted(msgspec.Struct, frozen=True):
    """What is known before a run is resumed. `saved`: the step of the newest checkpoint, according to the run's commits. `others`: other
    machines will join, and what is missing or damaged here is downloaded from them. `before`: no machine could load the checkpoint of
    that step."""

    adopt: bool = False
    saved: int = 0
    others: bool = False
    before: float = math.inf


def newest(config: Config, directory: Path, wanted: Wanted) -> Beginning:
    """The checkpoint to go on from, every byte of which was checked."""
    saved, others = wanted.saved, wanted.others
    catalog = Catalog(url_of(config), authority(directory))
    _settle_foreign(catalog, config, directory, adopt=wanted.adopt)
    entry, refused = catalog.soundest_entry(wanted.before, others)
    training = entry.training if entry is not None else None
    step = training.step if training is not None else 0
    if others:  # a marker that is damaged here may be whole elsewhere
        saved = max([saved, *(one.step for one in refused if one.wrong.startswith("damaged"))])
    refused += tuple(_passed_over(catalog, one) for one in catalog.entries() if one.step >= wanted.before)
    if others and saved > step:
        _leave_to_others(catalog, step, saved, refused)
        return Beginning(saved)
    _refuse_unusable(catalog, training, refused, saved)
    if training is not None:
        marker.refuse_foreign(training, config)
        for change in marker.changes(training, config):
            print(escaped(f"changed since the checkpoint of step {step}: {change}"))
    _set_damaged_aside(catalog, refused)
    if entry is not None:
        _print_choice(catalog, entry, refused, saved)
    return Beginning(step, training)


def _settle_foreign(catalog: Catalog, config: Config, directory: Path, *, adopt: bool) -> None:
    """Other runs' checkpoints are taken over (`adopt`), or refused."""
    run = catalog.authority or ""
    foreign = [entry for entry in catalog.entries() if entry.training is not None and entry.training.authority != run]
    if foreign and not adopt:
        raise ValueError(
            f"--resume: checkpoint.url = {catalog.url} holds {listed(foreign)}, and this is run {config.run.name!r} (key {run[:8]}, in "
            f"{directory}). Nothing there was changed. Give that run's own run.name and run.dir, or another checkpoint.url; or add "
            "--adopt, and they become this run's"
        )
    if foreign:
        _take_over(catalog, config, foreign)


def _leave_to_others(catalog: Catalog, step: int, saved: int, refused: Sequence[Entry]) -> None:
    """The checkpoint of step `saved` is newer than any that is whole here: every machine goes back to it."""
    unmarked = f"foreign: no {marker.MARKER}"  # it is the run's own, if what is left of it is
    _refuse_unread(catalog, step, [one for one in refused if (one.step, one.wrong) != (saved, unmarked)])
    here = next((one.wrong for one in refused if one.step == saved), "nothing of it is here")
    print(escaped(f"the checkpoint of step {saved} is downloaded from the machines that join: {here}"))
    _set_damaged_aside(catalog, [one for one in refused if one.step > saved])


def _print_choice(catalog: Catalog, entry: Entry, refused: Sequence[Entry], saved: int) -> None:
    """Say whether the run goes on from an older checkpoint than the newest, and what of it is not here."""
    if entry.step < saved or any(not catalog.unfinished(one) for one in refused):
        print(f"GOING BACK to step {entry.step}: its checkpoint is the newest that is whole")
    if entry.wrong or entry.elsewhere:
        what = entry.wrong or f"{', '.join(entry.elsewhere)} are kept by other machines"
        print(escaped(f"{entry.path}: {what}; what is needed here is downloaded from the machines that join"))


def _passed_over(catalog: Catalog, entry: Entry) -> Entry:
    """A checkpoint that no machine could load, with what is wrong with it here."""
    read = entry if entry.wrong else catalog.read(entry)
    return read if read.wrong else msgspec.structs.replace(read, wrong="damaged: no machine could load it")


def saved_by(config: Config, run: str) -> int:
    """The step of that run's newest whole checkpoint, 0 when it has saved none. For an operator who sends survivors back to it."""
    catalog = Catalog(url_of(config), run)
    training, refused = catalog.soundest(others=True)
    lost = [entry for entry in refused if not catalog.unfinished(entry)]
    for entry in lost:
        print(escaped(f"passed over {entry.path}: {entry.wrong}"))
    if training is None and lost:
        raise ValueError(
            f"{catalog.url} holds no checkpoint of this run (key {run[:8]}) that is whole: {wrongs(lost)}; "
            "put a whole copy of one there, or set checkpoint.url in the run's config.toml to where they are"
        )
    return training.step if training is not None else 0


def listed(entries: Sequence[Entry], whose_are: str = "another run's") -> str:
    """Checkpoints by whose they are: `another run's checkpoints (steps 40, 50 and 60 of run 'a' (key ...))`."""
    by_run: dict[str, list[int]] = {}
    for entry in entries:
        by_run.setdefault(whose(entry.training), []).append(entry.step)
    words = [f"step{'s' if len(steps) > 1 else ''} {_joined(sorted(steps))} of {run}" for run, steps in by_run.items()]
    return f"{whose_are} checkpoints ({'; '.join(words)})"


def wrongs(entries: Sequence[Entry]) -> str:
    """Each checkpoint, and what is wrong with it."""
    return "; ".join(f"{entry.path}: {entry.wrong}" for entry in entries)


def _refuse_unusable(catalog: Catalog, training: Training | None, refused: Sequence[Entry], saved: int) -> None:
    """Where progress would be lost without a word from the user, or overwritten later."""
    lost = [entry for entry in refused if not catalog.unfinished(entry)]
    if training is None and lost:
        raise ValueError(
            f"--resume: {catalog.url} holds {len(lost)} checkpoint{'s' if len(lost) > 1 else ''}, and none can be gone on "
            f"from: {wrongs(lost)}. Put a whole copy of one there, or use the version of Shoal that wrote them; or give the "
            "command without --resume to begin at step 0: what is there is then kept beside it"
        )
    if training is None and saved:
        raise ValueError(
            f"--resume: a checkpoint of step {saved} was saved, and none is at {catalog.url}. Put it back, or set "
            "checkpoint.url to where it is; where other machines hold copies of it, let them join (--here N, less than run.peers); "
            "or give the command without --resume to begin at step 0"
        )
    if training is not None:
        _refuse_unread(catalog, training.step, lost)


def _refuse_unread(catalog: Catalog, step: int, refused: Sequence[Entry]) -> None:
    """What another version wrote is never passed over."""
    unread = [entry for entry in refused if entry.wrong.startswith("foreign")]
    if unread:
        raise ValueError(
            f"--resume: {catalog.url} holds what this version cannot read, newer than the checkpoint of step {step}, which "
            f"is whole: {wrongs(unread)}. Use the version of Shoal that wrote it, or move it away to go on from step {step}"
        )


def kept(config: Config, run: str) -> str:
    """The name of the folder in a guest's directory with checkpoints of that run, which the run may need again; '' if there is none."""
    catalog = Catalog(url_of(config), run)
    own = any(entry.training is not None and entry.training.authority == run for entry in catalog.entries())
    inside = own and not config.checkpoint.url
    return Path(catalog.url).name if inside else ""


def _set_damaged_aside(catalog: Catalog, refused: Sequence[Entry]) -> None:
    for entry in refused:
        print(escaped(f"passed over {entry.path}: {entry.wrong}"))
        if entry.wrong.startswith("damaged"):  # or the run would take it for the one that it is about to write there
            print(escaped(f"what is left of it is now {catalog.set_aside(entry.step)}"))


def _take_over(catalog: Catalog, config: Config, others: Sequence[Entry]) -> None:
    """Other runs' checkpoints become this run's. Where it has a whole checkpoint of its own, they are renamed. Otherwise those of the
    run that saved last get this run's key, after every byte of the newest was checked."""
    own = any(not entry.wrong for entry in catalog.entries())
    taken = [] if own else _rekey(catalog, config, others)
    for entry in others:
        if entry in taken:
            continue
        if not catalog.storage.local:
            raise ValueError(f"--adopt: {entry.path} ({whose(entry.training)}) cannot be renamed there; move it away")
        print(escaped(f"--adopt: {entry.path} is now {catalog.set_aside(entry.step, 'before')}"))


def _rekey(catalog: Catalog, config: Config, others: Sequence[Entry]) -> list[Entry]:
    """The whole checkpoints of the run that saved last, which are this run's from now on."""
    assert catalog.authority is not None
    last = others[0].training
    assert last is not None
    theirs = Catalog(catalog.url, last.authority)
    training, refused = theirs.soundest()
    if training is None:
        raise ValueError(f"--adopt: none of {listed(others)} is whole: {wrongs(refused)}")
    marker.refuse_foreign(training, config)
    same_run = [entry for entry in others if entry.training is not None and entry.training.authority == last.authority]
    damaged = {entry.step for entry in refused}
    taken = [entry for entry in same_run if entry.step not in damaged and not theirs.inspect(entry.step).wrong]
    for entry in taken:
        catalog.adopt(entry.step, config.run.name)
    steps = _joined(sorted(entry.step for entry in taken))
    print(escaped(f"--adopt: the checkpoints of steps {steps} of {whose(last)} are now this run's"))
    return taken


def _joined(steps: Sequence[int]) -> str:
    words = [str(step) for step in steps]
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), words[-1]])
