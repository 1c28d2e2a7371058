"""Which settings an invite decides on a guest's machine and which the guest decides, for every field of the configuration.

An invite is untrusted text. It sets sizes, schedule and timeouts of the run, within bounds and within the free memory here. It
cannot name a file, directory, program, data set or storage of this machine: the guest allows a directory with
`shoal join --files DIR`, below which names in an invite are looked up, or gives names on its own command line.
For build.py (`joined`) and runtime/data; docs/design/2026-11-22-guests-files.md has the reason for each field.
"""

from __future__ import annotations

import glob
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from shoal.config import Config, from_tree, overridden, slices, to_tree, token_rows
from shoal.config.sections.model import THEIRS
from shoal.core.messages import PROTOCOL
from shoal.escaping import UNDECODABLE
from shoal.host import free_bytes
from shoal.model import lent, remote
from shoal.planner.inputs.profile import LOGITS
from shoal.units import size

# From the invite, the same for every peer.
RUN = frozenset(
    """
    run.name run.seed run.peers run.stages run.layers run.steps run.inflight run.queue_limit run.heartbeat_s run.heartbeat_timeout_s
    run.min_request_timeout_s run.ready_timeout_s run.lost_stage run.averaging_memory_bytes run.lost_stage_wait_s
    run.spot_checks run.robust run.undo run.probation run.serve run.stage_seconds run.placement run.line_rates run.join_slowdown run.routes
    model.family model.hidden_size model.layers model.heads model.kv_heads model.intermediate_size model.vocab_size
    model.tied_embeddings model.boundary model.extra
    data.source data.format data.field data.packing data.weights data.wrong_rows data.split data.sequence data.digest data.document_end
    eval.every eval.samples eval.patience eval.keep_best
    train.batch train.microbatch train.dtype train.optimizer train.learning_rate train.betas train.epsilon train.moments train.weight_decay
    train.clip train.schedule train.warmup train.final_ratio train.local_steps train.local_batch train.local_warmup
    train.outer_learning_rate train.outer_momentum train.staleness train.on_nonfinite
    tune.method tune.rank tune.alpha tune.targets tune.also tune.dropout tune.rslora tune.dora tune.quantize tune.lend tune.description
    tune.beta
    network.transport network.discovery network.max_tensor_bytes network.activations network.gradients network.averaging
    network.activation_store_bytes
    checkpoint.every checkpoint.at_end checkpoint.keep checkpoint.copies
    plan.allow
    device.emulated_values
    """.split()
)
# Never from an invite: each machine decides.
MACHINE = frozenset(
    """
    run.dir run.trace_bytes data.root checkpoint.disk_bytes
    network.host network.port network.region network.delay_s network.bandwidth_Bps network.fault_injection network.up_Bps network.down_Bps
    network.links network.activation_memory_bytes network.pass_lifetime_s
    device.kind device.executor device.memory_bytes device.host_bytes device.sequences device.checkpointing device.tf32 device.emulated_s
    device.emulated_backward_s device.emulated_gradient device.kept_activations device.compile
    device.cache_bytes device.machine device.threads device.count run.log_to
    eval.prompts eval.prompt_tokens
    """.split()
)
# Names of files in an invite: looked up below --files DIR, or given on the guest's command line.
CODE = ("data.factory", "model.factory")  # functions in an invite: only ever given on the guest's own command line
FILES = ("data.path", "eval.path", "data.tokenizer", "model.path", "tune.adapter", *CODE)
TEXTS = ("data.path", "eval.path")  # files or patterns of files
PLACE = "checkpoint.url"  # written to, and deleted from: only ever given on the guest's own command line
ADAPTABLE = (MACHINE - {"data.root"}) | {*FILES, PLACE}

MOST_BYTES = 1 << 16  # of an invite's configuration, as JSON

# Tighter than the bounds in config/: what an invite may ask of somebody else's machine. Below 50 ms beats keep a core busy.
_BOUNDS = {
    "run.heartbeat_s": (0.05, 3600.0),
    "run.ready_timeout_s": (0.0, 86400.0),
    "run.lost_stage_wait_s": (0.0, 86400.0),
}
_BOUNDS |= {"checkpoint.keep": (1, 100)}  # they lie on the guest's disk where it publishes
_SIZES = frozenset(THEIRS.values()) - {"tie_word_embeddings"}
_EXTRA_MOST = 1 << 24  # a number in model.extra; the largest that a known family has is a vocabulary or a context
_PARTS_MOST = 1 << 17  # blocks times experts: each is an object in memory, on the meta device too
_NAME_MOST = 255  # characters of a file name in an invite
_MAGIC_MOST = 1  # "**" in a pattern: every further one multiplies the time that it takes


def joined(packed: bytes, overrides: Sequence[str], files: Path | None = None) -> Config:
    """The configuration of a peer that joins: what its invite tells, and what this machine decides for itself. `files`: a directory
    that the run may read below. ValueError: the invite decides what is not its to decide, or asks for more than there is here."""
    config = admitted(_tree(packed), overrides, files)
    place = Path(config.run.dir)
    there = next(each for each in (place, *place.absolute().parents) if each.exists())
    refuse_too_large(config, free_bytes(), shutil.disk_usage(there).free)
    return config


def visitor(packed: bytes, overrides: Sequence[str]) -> Config:
    """The configuration of an invited visitor, who queries the run's peers without joining."""
    return visiting(_tree(packed), overrides)


def _tree(packed: bytes) -> dict[str, dict[str, Any]]:
    protocol, _, deflated = packed.partition(b" ")
    if protocol.isdigit() and int(protocol[:9]) != PROTOCOL:
        raise ValueError(
            f"the run's peers speak protocol {int(protocol[:9])}, and shoal here speaks {PROTOCOL}: install the same version on"
            " both machines"
        )
    try:
        inflating = zlib.decompressobj(-zlib.MAX_WBITS, zdict=_usual())
        text = inflating.decompress(deflated, MOST_BYTES)
        if inflating.unconsumed_tail:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        return msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    except (ValueError, zlib.error, *UNDECODABLE) as error:
        raise ValueError(
            f"the invite's configuration cannot be read: {error}; is this the same version of shoal?"
        ) from None


def pack(tree: Mapping[str, Any]) -> bytes:
    """Settings as an invite holds them: the protocol's number, then JSON that is compressed by what the defaults look like."""
    deflating = zlib.compressobj(9, wbits=-zlib.MAX_WBITS, zdict=_usual())
    return b"%d " % PROTOCOL + deflating.compress(msgspec.json.encode(tree)) + deflating.flush()


def _usual() -> bytes:
    return msgspec.json.encode(to_tree(Config()))


def shared(config: Config) -> bytes:
    """The configuration in an invite: the run's settings that are not defaults."""
    return pack(invite_settings(config, to_tree(config), to_tree(Config())))


def admitted(tree: dict[str, Any], overrides: Sequence[str], files: Path | None = None) -> Config:
    """The guest's configuration, from the invite and this machine's overrides. `files`: the directory that the run may read below.
    ValueError: the invite sets a machine's setting, or names files that the guest does not allow."""
    config = visiting(tree, overrides)
    names = {field: str(_pop_field(tree, field) or "") for field in (*FILES, PLACE)}
    source = config.data.source
    reads = config.device.executor != "emulated"
    unused = {override.partition("=")[0].strip() for override in overrides} | _not_read(names, source, reads)
    requested = {field: name for field, name in names.items() if name and field not in unused}
    if _is_lent(config, requested, files):
        del requested["model.path"]
        _set_field(tree, "model.path", lent.PEERS)
    for field, place in _look_up(requested, source, files).items():
        _set_field(tree, field, place)
        if field in TEXTS and files is not None:
            _set_field(tree, "data.root", str(files.resolve()))
    if (
        not reads
    ):  # names stay as in the invite, for display: config/sections/data.py refuses a text source without a path
        return config
    if (source != "python" or config.eval.path) and not config.data.digest:
        raise ValueError(
            f"this invite does not say what the run's data is (data.digest), and the run reads data.source = {source!r};"
            " without it any file could be requested. Ask for an invite made by `shoal invite`"
        )
    return from_tree(overridden(tree, overrides))


def _is_lent(config: Config, requested: Mapping[str, str], files: Path | None) -> bool:
    """The model is wanted, is not here, and the run's peers give this machine its stage of it."""
    name = requested.get("model.path", "")
    if not name or not config.tune.lend or not config.tune.description or config.run.serve:
        return False
    return remote.is_url(name) or files is None or not below(files, name, "model.path").is_dir()


def _not_read(names: Mapping[str, str], source: str, reads: bool) -> set[str]:
    """Fields whose files a run with that data source does not read here."""
    if not reads:
        return set(FILES)
    bytes_only = {"data.tokenizer"} if names["data.tokenizer"] == "bytes" else set()
    return bytes_only | ({"data.path"} if source == "python" else set())


def visiting(tree: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """The configuration of a visitor, who does not join: names of files stay as in the invite and are not looked up."""
    for path in (override.partition("=")[0].strip() for override in overrides):
        if path not in ADAPTABLE and path.partition(".")[0] != "device":
            allowed = ", ".join(sorted(field for field in ADAPTABLE if not field.startswith("device.")))
            raise ValueError(
                f"{path} is the same for all peers of a run; a joining machine may set device.*, {allowed}"
            )
    _refuse_local(tree)
    try:
        config = from_tree(overridden(_emulated(_without_place(tree)), overrides))
    except ValueError as error:
        with_own = " with the settings given here" if overrides else ""
        raise ValueError(f"this invite{with_own} makes no run: {error}") from None
    _refuse_out_of_bounds(config)
    _refuse_others(config, tree)
    return config


def invite_settings(
    config: Config, tree: Mapping[str, Mapping[str, Any]], default: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The settings for an invite: the run's that are not defaults, and names of files without this machine's directories."""
    out: dict[str, dict[str, Any]] = {}
    for section, fields in tree.items():
        for field, value in fields.items():
            path = f"{section}.{field}"
            if path in MACHINE or value == default[section][field]:
                continue
            if path in FILES and not (path == "data.path" and config.data.source == "huggingface"):
                if (source := remote.source_of(value)) is not None:
                    out.setdefault(section, {})[field] = source.url
                    continue
                local = path not in ("data.tokenizer", *CODE) or Path(value).expanduser().exists()
                value = relative(value) if local else value
            out.setdefault(section, {})[field] = value
    return out


def relative(name: str) -> str:
    """A file's name for other machines: unchanged below the current directory, else without its directories."""
    pure = PurePosixPath(name)
    parts = [part for part in pure.parts if part != "."]
    if parts and (pure.is_absolute() or parts[0].startswith("~") or ".." in parts):
        magic = next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        parts = [part for part in parts[max(1, magic - 1) :] if part != ".."]
    return "/".join(parts)


def below(root: str | Path, name: str, field: str) -> Path:
    """The path of `name` below `root`. ValueError: it is outside. `refuse_outside` checks symlinks."""
    pure = PurePosixPath(name)
    if not name or len(name) > _NAME_MOST or not name.isprintable():
        raise ValueError(f"{field} = {name[:80]!r} is no name of a file below {root}")
    if pure.is_absolute() or ".." in pure.parts or name.startswith("~") or "\\" in name:
        raise ValueError(
            f"{field} = {name!r} leads out of {root}; an invite may only name what lies below the directory given with --files"
        )
    if name.count("**") > _MAGIC_MOST:
        raise ValueError(f"{field} = {name!r} has more than one '**'; name the files yourself with {field}=...")
    return Path(root) / pure


def refuse_outside(root: str | Path, paths: Iterable[Path], field: str) -> None:
    """ValueError: one of the paths is a symlink out of `root`."""
    real = Path(os.path.realpath(root))
    for path in paths:
        if not Path(os.path.realpath(path)).is_relative_to(real):
            raise ValueError(f"{field}: {path} is a link that leads out of {root}; put the file itself there")


# ------------------------------------------------------------------------------------------------------------- sizes


def refuse_too_large(config: Config, free_bytes: int | None, disk_bytes: int | None = None) -> None:
    """ValueError: the run needs more than `free_bytes` of memory or `disk_bytes` of disk. Lower bounds, before any allocation;
    executor/fit.py counts exactly later."""
    if config.device.executor == "emulated":
        return
    free, source = (
        config.device.host_bytes or free_bytes,
        "device.host_bytes" if config.device.host_bytes else "free here",
    )
    if free is not None:
        for what, needed in _needs(config):
            if needed > free:
                raise ValueError(
                    f"this invite asks for more memory than there is: {what} {size(needed)}, {source} {size(free)}; "
                    "this machine cannot take part in that run"
                )
        default = Config()
        for path, limit, default_limit in (
            ("network.max_tensor_bytes", config.network.max_tensor_bytes, default.network.max_tensor_bytes),
            ("run.averaging_memory_bytes", config.run.averaging_memory_bytes, default.run.averaging_memory_bytes),
        ):
            if limit > max(free, default_limit):
                raise ValueError(
                    f"this invite lets the run take {size(limit)} of memory ({path}), {source} {size(free)}; "
                    "ask for an invite to a run with a smaller one"
                )
    if disk_bytes is not None and config.network.activation_store_bytes > max(
        disk_bytes, Config().network.activation_store_bytes
    ):
        raise ValueError(
            f"this invite lets the run keep {size(config.network.activation_store_bytes)} of boundary tensors"
            f" (network.activation_store_bytes); {size(disk_bytes)} is free on the disk of {config.run.dir}"
        )


def _needs(config: Config) -> Iterator[tuple[str, int]]:
    model, run = config.model, config.run
    tokens = token_rows(config) // slices(config) * config.data.sequence
    yield "the tokens of one microbatch take", token_rows(config) * (config.data.sequence + 1) * 8
    if (
        model.path
        or model.factory
        or (config.device.kind not in ("auto", "cpu") and config.device.executor == "resident")
    ):
        return  # its sizes are in this machine's own files; a device has a limit of its own
    block = 2 * model.hidden_size * (model.intermediate_size + model.hidden_size)
    most = max(run.layers) if run.layers else -(-model.layers // run.stages)
    if not any("expert" in name for name in model.extra):  # whose blocks are of other sizes
        yield f"a stage of {most} blocks takes at least", 8 * most * block
    yield "the vocabulary's matrix takes at least", 8 * model.vocab_size * model.hidden_size
    yield "one block's activations take at least", 4 * tokens * max(model.hidden_size, model.intermediate_size)
    yield "the scores of one microbatch take at least", 4 * min(tokens * model.vocab_size, LOGITS)


def _refuse_out_of_bounds(config: Config) -> None:
    for path, (low, high) in _BOUNDS.items():
        section, _, field = path.partition(".")
        value = getattr(getattr(config, section), field)
        if not low <= value <= high:
            raise ValueError(f"this invite sets {path} = {value:g}; a guest takes {low:g} to {high:g}")
    _refuse_extra(config)


def _refuse_extra(config: Config) -> None:
    extra = config.model.extra
    nested = [(f"{name}.{key}", part) for name, of in extra.items() if isinstance(of, dict) for key, part in of.items()]
    for name, value in [*extra.items(), *nested]:
        if name in _SIZES and not (name == "vocab_size" and config.model.path):
            raise ValueError(f"this invite sets model.extra.{name}, which has a field of its own in [model]")
        if isinstance(value, int | float) and not abs(value) <= _EXTRA_MOST:
            raise ValueError(f"this invite sets model.extra.{name} = {value:g}; a guest takes up to {_EXTRA_MOST:,}")
        parts = config.model.layers * value if "expert" in name and isinstance(value, int | float) else 0
        if parts > _PARTS_MOST and "per_tok" not in name:
            raise ValueError(
                f"this invite asks for {config.model.layers:,} blocks with model.extra.{name} = {value:,}; a guest takes up to"
                f" {_PARTS_MOST:,} parts in all"
            )


# ------------------------------------------------------------------------------------------------------------- names


def _refuse_local(tree: Mapping[str, Any]) -> None:
    for section, fields in tree.items():
        for field in fields if isinstance(fields, Mapping) else ():
            if f"{section}.{field}" in MACHINE:
                raise ValueError(
                    f"this invite sets {section}.{field}, which every machine decides for itself; it was not made by `shoal invite`"
                )


def _refuse_others(config: Config, tree: Mapping[str, Any]) -> None:
    """ValueError: of the machine's section, what is the run's is not as the invite says."""
    values = config.device.emulated_values
    theirs = tree.get("device", {}).get("emulated_values", Config().device.emulated_values)
    if values != theirs:
        raise ValueError(
            f"device.emulated_values = {values}, but all peers of this run have {theirs}; leave device.emulated_values out"
        )


def _emulated(tree: dict[str, Any]) -> dict[str, Any]:
    """A run whose invite states the size of emulated boundary tensors has no other peers."""
    return {**tree, "device": {"executor": "emulated", **tree["device"]}} if tree.get("device") else tree


def _without_place(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the invite's checkpoint.url."""
    return {
        section: {field: value for field, value in fields.items() if f"{section}.{field}" != PLACE}
        for section, fields in tree.items()
    }


def _look_up(requested: Mapping[str, str], source: str, files: Path | None) -> dict[str, str]:
    """The places of the names in an invite. ValueError: lists names that the guest must allow, and how."""
    if files is not None and not files.is_dir():
        raise ValueError(f"--files {files}: no such directory")
    places, missing = {}, []
    for field, name in requested.items():
        online = field in (PLACE, *CODE) or remote.is_url(name) or (field == "data.path" and source == "huggingface")
        if files is None or online:
            missing.append((field, name, online))
            continue
        place = below(files, name, field)
        if field in TEXTS:
            places[field] = name  # a file, a directory or a pattern: found, and checked again, when it is read
            continue
        if not place.is_dir():
            missing.append((field, name, True))
            continue
        refuse_outside(files, [place, *place.rglob("*")], field)
        places[field] = str(place.resolve())
    if missing:
        raise ValueError(_permission(missing, source, files))
    return places


def _as_it_is(field: str, name: str, source: str) -> bool:
    """The name means the same on every machine, and may be repeated as it stands."""
    return (remote.is_url(name) and field != PLACE) or (field == "data.path" and source == "huggingface")


def _permission(missing: list[tuple[str, str, bool]], source: str, files: Path | None) -> str:
    requests = "; ".join(f"{_MEANS[field]}: {field} = {name!r}" for field, name, _ in missing)
    overrides = [f"{field}={name if _as_it_is(field, name, source) else _SUCH[field]}" for field, name, _ in missing]
    directory = [field for field, _, online in missing if not online]
    with_directory = (
        f"add --files DIR, a directory that the run may read and in which {' and '.join(directory)} will be found, or "
        if directory
        else ""
    )
    where = (
        f" (not found below {files})" if files is not None and any(field != PLACE for field, _, _ in missing) else ""
    )
    return (
        f"an invite may not name what lies on this machine or is reached in its name, and this run wants {requests}{where}. "
        f"If that is right: {with_directory}name it yourself: {' '.join(overrides)}"
    )


_MEANS = {
    "data.path": "to read data",
    "eval.path": "to read held-out data",
    "data.tokenizer": "to load a tokenizer",
    "model.path": "to read a model",
    "tune.adapter": "to read an adapter",
    "data.factory": "to import and run a Python module",
    "model.factory": "to import and run a Python module",
    PLACE: "to write and delete checkpoints",
}
_SUCH = {
    "data.path": "PATH",
    "eval.path": "PATH",
    "data.tokenizer": "NAME-OR-DIRECTORY",
    "model.path": "DIRECTORY",
    "tune.adapter": "DIRECTORY",
    PLACE: "URL",
} | dict.fromkeys(CODE, "MODULE:FUNCTION")


def _pop_field(tree: dict[str, Any], path: str) -> Any:
    section, _, field = path.partition(".")
    fields = tree.get(section)
    return fields.pop(field, None) if isinstance(fields, dict) else None


def _set_field(tree: dict[str, Any], path: str, value: str) -> None:
    section, _, field = path.partition(".")
    tree.setdefault(section, {})[field] = value
