"""The one typed tree of a run's configuration, shared by TOML files, `a.b=c` arguments and Python.

`load` reads a file and arguments, `from_tree` a dictionary, `validate` a tree made in Python: all three end with the
same checks, and every complaint is a ValueError saying where, what was found and what would do. Fields whose names end
in _s, _Bps or _bytes also take text with a unit ("80 ms", "200 Mbit/s", "24 GiB"). The comment beside a field is its
documentation: `text` prints the effective tree with it. What needs more than this tree is checked by its owner: whether
a model can be cut by model/stages.py, whether a data set is there by runtime/data.py.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
import math
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal import units
from shoal.core.messages import Settings

# Of a piece's fp32 values, while a round runs: my own copy; the others' parts of my chunk, or the sums; parts of the next piece that
# came early. My sums of this and the last piece are 1/n each, with parts and sums of n - 1 others: 3 together. In rows
# (core/allreduce/layout.py) the last piece's are a row's chunk of it: 3.2 at most.
ROUND_COPIES = 3


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the tree."""


class Run(Section, frozen=True):
    """The run as a whole, and how patient its peers are with one another."""

    name: str = "quickstart"
    dir: str = "runs"  # runs/NAME/ is made below it
    seed: int = 0
    peers: int = 6  # local peers that `shoal run` starts, and how many must have joined before training starts
    stages: int = 3
    layers: tuple[int, ...] = ()  # blocks of each stage, such as [2, 3, 1]; [] = as even as can be
    steps: int = 200  # optimizer steps
    inflight: int = 4  # microbatches a trainer drives at once
    queue_limit: int = 16  # tasks a peer holds before it pushes back
    beat_s: float = 0.5  # seconds between heartbeats
    silence_s: float = 4.0  # a peer silent for this long is removed
    hop_floor_s: float = 2.0  # no hop is called slow before this
    hold_s: float = (
        30.0  # longest wait for a peer that builds the state all went back to, or for sums that a joiner lacks
    )
    # A stage has lost its last replica: all go back to the newest checkpoint, or it is made from its neighbours, or the run waits
    lost: Literal["checkpoint", "neighbours", "wait"] = "checkpoint"
    trace_bytes: int = (
        1 << 28
    )  # on the disk, of each peer's trace, whose oldest part is dropped beyond it; 0 = no trace
    round_bytes: int = (
        1 << 30
    )  # memory that averaging takes at a peer, besides its result: what is larger is averaged piece by piece
    lost_wait_s: float = 5.0  # before that, a replica that was only cut off may come back with the state
    stage_seconds: tuple[
        float, ...
    ] = ()  # planned seconds per microbatch of each stage, for placing peers; --plan fills it
    seats: dict[str, int] = {}  # machines of a plan and the stage of each; --plan fills it
    widths: tuple[
        int, ...
    ] = ()  # of each seat's line, kB/s, by which the replicas of a stage share out a round; [] = evenly; --plan fills it
    routes: tuple[
        tuple[tuple[int, ...], ...], ...
    ] = ()  # for each seat and stage: numbers of the seats that serve its microbatches, in turn; --plan fills it


class Model(Section, frozen=True):
    """A Hugging Face causal language model, cut into run.stages stages of whole blocks."""

    family: str = "llama"  # a Hugging Face model_type with a pipeline plan: llama, qwen3, mistral, gemma2, ...
    path: str = ""  # a Hugging Face model directory to start from instead; "" = random from the seed
    hidden_size: int = 128
    layers: int = 6
    heads: int = 4
    kv_heads: int = 4
    intermediate_size: int = 384
    vocab_size: int = 256  # 256 = bytes; must cover the tokenizer
    tied_embeddings: bool = False
    boundary: Literal["none", "bottleneck-2x", "bottleneck-4x", "maxout-2x", "maxout-4x"] = (
        "none"  # layers at the cuts, part of the model, that make boundary tensors so much narrower
    )
    extra: dict[str, bool | int | float | str] = {}  # further fields of the Hugging Face config, passed on


class Data(Section, frozen=True):
    """Where samples come from. Sample i is the same whatever the number of peers."""

    source: Literal["python", "text", "jsonl", "huggingface"] = "python"  # python = text of Python's own library
    path: str = ""  # file, directory or glob (text, jsonl); dataset name (huggingface)
    field: str = "text"  # JSONL field or dataset column
    split: str = "train"
    tokenizer: str = "bytes"  # bytes, or a Hugging Face tokenizer by name or path
    sequence: int = 128  # tokens per sample
    within: str = (
        ""  # files are read only below this directory, which data.path is looked up in; `shoal join --files` sets it
    )
    digest: str = (
        ""  # what the data must be; an invite fills it in, so that no machine trains on other text; "" = anything
    )


class Train(Section, frozen=True):
    """What one optimizer step is. With local_steps = H one step of the run is H of them, and schedule and warmup count those."""

    batch: int = 64  # sequences per optimizer step, over the whole run
    microbatch: int = 4  # sequences per microbatch; divides batch
    dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters and boundary tensors
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    moments: Literal["float32", "8bit"] = (
        "float32"  # of AdamW, in memory, checkpoints and downloads; 8bit: a byte per value, with torchao
    )
    weight_decay: float = 0.1  # for matrices; vectors (norms, biases) have none
    clip: float = 1.0  # global norm over the whole model; 0 = off
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: int = 20  # steps
    final_ratio: float = 0.1  # learning rate at the end over its peak
    local_steps: int = (
        1  # optimizer steps that every peer makes alone between two averagings (DiLoCo); needs run.stages = 1
    )
    local_batch: int = 0  # sequences per local step of one peer; 0 = train.batch / run.peers
    round_warmup: int = 0  # local steps at the start of every round over which the learning rate rises anew
    outer_rate: float = 0.7  # of the outer Nesterov step, which local steps lead to
    outer_momentum: float = 0.9
    staleness: int = 0  # 1: a step is computed while the one before is averaged and applied, without its gradient


class Network(Section, frozen=True):
    """How this peer reaches the others."""

    transport: Literal["tls", "libp2p", "auto"] = "tls"  # libp2p for peers without an open port; auto = to those only
    discovery: Literal["dht", "gossip"] = "dht"  # dht = Kademlia over libp2p; gossip = peers tell all they know
    host: str = "127.0.0.1"  # address this peer listens on and announces
    port: int = 0  # 0 = any free port; the next one is used too, unless all is libp2p, or "tls" with "gossip"
    delay_s: float = 0.0  # modelled link, added to the real one: seconds each way
    bandwidth_Bps: float = 0.0  # modelled uplink and downlink of this peer, bytes per second; 0 = as it is
    up_Bps: float = 0.0  # the uplink, where it is another than bandwidth_Bps
    down_Bps: float = 0.0  # the downlink, likewise
    links: dict[
        str, tuple[float, float]
    ] = {}  # modelled, by the host where others listen: seconds, bytes per second (0 = as it is)
    blob_bytes: int = 1 << 30  # largest tensor accepted from a peer
    pass_s: float = 2_592_000.0  # how long the passes of `shoal run`'s own peers last; it renews them at half of that
    faults: bool = False  # `shoal chaos` may cut and slow this machine's links, and strike at chosen moments; for tests
    activations: Literal["none", "bf16", "int8", "int4"] = "none"  # how boundary tensors travel; none = as they are
    gradients: Literal["none", "bf16", "int8"] = "none"  # and their gradients
    averaging: Literal["none", "bf16", "int8"] = "none"  # and a stage's gradient among its replicas, errors fed back
    keep_bytes: int = 1 << 32  # boundary tensors a peer keeps of a step before it answers Busy
    spill_bytes: int = 1 << 30  # of these in memory; the oldest others lie in the run's directory. 0 = all in memory


class Device(Section, frozen=True):
    """What this peer computes on."""

    kind: Literal["cpu", "cuda", "mps"] = "cpu"
    executor: Literal["resident", "swapping", "emulated"] = "resident"  # swapping: for stages above memory_bytes
    memory_bytes: int = 0  # device memory for the swapping executor, whose layers take turns in it; 0 = no limit
    host_bytes: int = 0  # host memory that a peer's stage may take; 0 = what is free when it is built
    sequences: int = 0  # of a microbatch on the device at once, one slice after another for each layer; 0 = all
    emulated_s: float = 0.2  # seconds per microbatch of the emulated executor, which has no model (backward: double)
    emulated_backward_s: float = 0.0  # the same of a backward; 0 = double
    emulated_values: int = 2_097_152  # values of an emulated boundary tensor (float32)
    emulated_gradient: int = 256  # values that an emulated stage averages
    seat: str = ""  # which machine of the run's plan this is: a name of run.seats; "" = placed where it is needed most
    threads: int = 1  # CPU threads for one peer's compute; 0 = PyTorch's own choice
    probed: str = "device.toml"  # what `shoal probe` wrote on this machine, if it did; told to `shoal probe --run`


class Checkpoint(Section, frozen=True):
    """When the run is written down, and where."""

    every: int = 50  # steps; 0 = only at the end
    last: bool = True  # one at the end
    keep: int = 3  # older ones are deleted
    url: str = ""  # any fsspec URL or path; "" = checkpoints/ in the run's directory


class Plan(Section, frozen=True):
    """What `shoal plan` may choose that changes what is learned; else it plans with what network and train say."""

    allow: tuple[
        Literal["bf16", "int8", "int4", "local_steps"], ...
    ] = ()  # codes for tensors on their way, and train.local_steps, such as ["int8", "local_steps"]


class Config(Section, frozen=True):
    """The whole tree."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    network: Network = Network()
    device: Device = Device()
    checkpoint: Checkpoint = Checkpoint()
    plan: Plan = Plan()


# ------------------------------------------------------------------------------------------------------------ reading


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Defaults, then the file, then `a.b=c` arguments; checked."""
    tree: dict[str, Any] = {}
    if path is not None:
        if "=" in str(path) and not Path(path).exists():
            raise ValueError(
                f"{str(path)!r} is a setting, and a TOML file belongs before it, such as configs/quickstart.toml"
            )
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not TOML: {error}") from None
    try:
        return from_tree(overridden(tree, overrides))
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path is not None else str(error)) from None


def overridden(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The tree with `a.b=c` arguments put into it."""
    for override in overrides:
        _override(tree, override)
    return tree


def from_tree(tree: Mapping[str, Any]) -> Config:
    """A checked configuration from plain dictionaries, such as a TOML file or an invite holds."""
    config: Config = _section(Config, tree, "")
    _refuse_problems(config)
    return config


def to_tree(config: Config) -> dict[str, Any]:
    """The whole tree as plain dictionaries; `from_tree` gives the same configuration back."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    return tree


def microbatches(train: Train) -> int:
    """Of one step of the run: with local steps, of all that lead to one averaging."""
    return train.batch * train.local_steps // train.microbatch


def local_batch(config: Config) -> int:
    """Sequences per local step of one peer."""
    return config.train.local_batch or config.train.batch // config.run.peers


def narrow_shelf(config: Config, tensor_bytes: float, stages: int, inflight: int) -> str:
    """What is wrong with network.keep_bytes for boundary tensors of that size, in words; '' when it is wide enough.

    Below 2 * stages * inflight tensors servers answer Busy while they wait for one another, and a run is slow and right
    without saying why (docs/design/2026-11-21-direct-hops.md). A step that keeps fewer needs no more."""
    wanted = min(2 * stages * inflight, 3 * microbatches(config.train))
    if stages == 1 or config.network.keep_bytes >= wanted * tensor_bytes:
        return ""
    return (
        f"network.keep_bytes = {config.network.keep_bytes} holds {int(config.network.keep_bytes / tensor_bytes)} boundary"
        f" tensors of {math.ceil(tensor_bytes)} bytes; with {stages} stages and {inflight} microbatches in flight fewer than"
        f" {wanted} make the run slow; try network.keep_bytes={math.ceil(wanted * tensor_bytes)}"
    )


def slices(config: Config) -> int:
    """Parts of a microbatch that are on the device one after another."""
    return config.train.microbatch // (config.device.sequences or config.train.microbatch)


def settings(config: Config, first_step: int = 0) -> Settings:
    """What the machines need to know."""
    run, train = config.run, config.train
    return Settings(
        stages=run.stages,
        microbatches=microbatches(train),
        steps=run.steps,
        first_step=first_step,
        peers=run.peers,
        inflight=run.inflight,
        queue_limit=run.queue_limit,
        save_every=config.checkpoint.every,
        save_last=config.checkpoint.last,
        beat_s=run.beat_s,
        silence_s=run.silence_s,
        hop_floor_s=run.hop_floor_s,
        hold_s=run.hold_s,
        lost=run.lost,
        lost_wait_s=run.lost_wait_s,
        staleness=config.train.staleness,
        keep_bytes=config.network.keep_bytes,
        stage_seconds=run.stage_seconds,
        piece_values=min(run.round_bytes // ROUND_COPIES, config.network.blob_bytes) // 4,
        home=run.stages == 1 and not run.routes,
        seat=list(run.seats).index(config.device.seat) if config.device.seat else -1,
        seats=tuple(run.seats.values()),
        routes=run.routes,
        widths=run.widths,
    )


# ----------------------------------------------------------------------------------------------------------- checking


def validate(config: Config) -> None:
    """ValueError for the first thing that cannot work, types included, so that trees made in Python are checked too."""
    from_tree(to_tree(config))


def _refuse_problems(config: Config) -> None:
    for problem in _problems(config):
        raise ValueError(problem)


# Field: the smallest and the largest value that can mean anything. The upper ones only keep absurd numbers out.
_BOUNDS: dict[str, tuple[float, float]] = {
    "run.seed": (0, 2**63 - 1),
    "run.peers": (1, 4096),
    "run.stages": (1, 4096),
    "run.steps": (1, 2**53),
    "run.inflight": (1, 4096),
    "run.queue_limit": (1, 4096),
    "run.hold_s": (0, math.inf),
    "run.lost_wait_s": (0, math.inf),
    "run.round_bytes": (2**10, 2**60),
    "run.trace_bytes": (0, 2**60),
    "model.hidden_size": (1, 2**20),
    "model.layers": (1, 4096),
    "model.heads": (1, 4096),
    "model.kv_heads": (1, 4096),
    "model.intermediate_size": (1, 2**24),
    "model.vocab_size": (2, 2**24),
    "data.sequence": (1, 2**20),
    "train.batch": (1, 2**24),
    "train.microbatch": (1, 2**20),
    "train.weight_decay": (0, math.inf),
    "train.clip": (0, math.inf),
    "train.warmup": (0, 2**53),
    "train.final_ratio": (0, 1),
    "train.local_steps": (1, 2**20),
    "train.staleness": (0, 1),
    "train.local_batch": (0, 2**24),
    "train.round_warmup": (0, 2**20),
    "train.outer_momentum": (0, 1),
    "network.port": (0, 65535),
    "network.delay_s": (0, math.inf),
    "network.bandwidth_Bps": (0, math.inf),
    "network.up_Bps": (0, math.inf),
    "network.down_Bps": (0, math.inf),
    "network.keep_bytes": (1, 2**50),
    "device.emulated_s": (0, math.inf),
    "device.emulated_backward_s": (0, math.inf),
    "device.emulated_values": (1, 2**40),
    "device.emulated_gradient": (1, 2**40),
    "device.memory_bytes": (0, 2**50),
    "device.host_bytes": (0, 2**60),
    "device.sequences": (0, 2**20),
    "device.threads": (0, 1024),
    "checkpoint.every": (0, 2**53),
    "checkpoint.keep": (1, 2**20),
}
_POSITIVE = (
    "run.beat_s",
    "run.silence_s",
    "network.pass_s",
    "run.hop_floor_s",
    "train.learning_rate",
    "train.epsilon",
    "train.outer_rate",
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _problems(config: Config) -> Iterator[str]:
    yield from _out_of_bounds(to_tree(config))
    if not config.model.path:
        yield from _model_problems(config)
    run, data, train = config.run, config.data, config.train
    if not _NAME.fullmatch(run.name):
        yield f"run.name = {run.name!r} cannot name a directory; try letters, digits, '-', '_' and '.'"
    if run.peers < run.stages:
        yield f"run.peers = {run.peers} cannot serve run.stages = {run.stages}; try {run.stages} peers or more"
    if run.stage_seconds and (len(run.stage_seconds) != run.stages or min(run.stage_seconds) <= 0):
        yield (
            f"run.stage_seconds = {list(run.stage_seconds)} must be above 0, one for each of run.stages = {run.stages}; "
            "try run.stage_seconds=[]"
        )
    if run.layers and (len(run.layers) != run.stages or min(run.layers) < 1):
        yield (
            f"run.layers = {list(run.layers)} must be 1 or more, one for each of run.stages = {run.stages}; "
            "try run.layers=[]"
        )
    if run.silence_s < 3 * run.beat_s:
        yield f"run.silence_s = {run.silence_s} is under three beats of run.beat_s = {run.beat_s}; try {8 * run.beat_s}"
    if data.source != "python" and not data.path:
        yield f"data.path is empty, but data.source = {data.source!r} reads it; name a {_PATH_OF[data.source]}"
    if train.batch % train.microbatch:
        near = _nearest_divisor(train.batch, train.microbatch)
        yield f"train.microbatch = {train.microbatch} does not divide train.batch = {train.batch}; try {near}"
    elif microbatches(train) >= 2**20:
        yield f"train.batch = {train.batch} is too many microbatches of {train.microbatch}; try larger ones"
    if config.model.boundary != "none" and run.stages == 1:
        yield f"model.boundary = {config.model.boundary!r} stands at cuts, and run.stages = 1 has none; try run.stages=2"
    if config.model.boundary != "none" and config.device.executor == "swapping":
        yield "device.executor = 'swapping' does not run model.boundary layers; try device.executor='resident'"
    if not all(0 <= beta < 1 for beta in train.betas):
        yield f"train.betas = {list(train.betas)} must each be at least 0 and below 1; try [0.9, 0.95]"
    if config.device.sequences and train.microbatch % config.device.sequences:
        near = _nearest_divisor(train.microbatch, config.device.sequences)
        yield f"device.sequences = {config.device.sequences} does not divide train.microbatch = {train.microbatch}; try {near}"
    yield from _local_problems(config)
    if train.staleness and train.local_steps > 1:
        yield "train.staleness = 1 with train.local_steps above 1, which already hide the averaging; try train.staleness=0"
    if train.moments == "8bit" and run.lost == "neighbours":
        yield "run.lost = 'neighbours' blends moments, which 8-bit codes do not allow; try run.lost=checkpoint"
    yield from _plan_problems(config)
    if config.network.links and config.network.transport != "tls":
        yield "network.links are by host, which network.transport = 'libp2p' does not know; try network.transport=tls"
    yield from _size_problems(config)


_PATH_OF = {"text": "file, directory or glob", "jsonl": "file, directory or glob", "huggingface": "data set"}


def _model_problems(config: Config) -> Iterator[str]:
    """Of a model made from the tree; one that is read from a directory has its own numbers."""
    run, model = config.run, config.model
    if run.stages > model.layers:
        yield f"run.stages = {run.stages} is more than model.layers = {model.layers}; try {model.layers} or fewer"
    elif run.layers and sum(run.layers) != model.layers and config.device.executor != "emulated":
        yield (
            f"run.layers = {list(run.layers)} is {sum(run.layers)} blocks together, but model.layers = {model.layers}; "
            "they must be as many"
        )
    if model.hidden_size % model.heads:
        near = _nearest_divisor(model.hidden_size, model.heads)
        yield f"model.heads = {model.heads} does not divide model.hidden_size = {model.hidden_size}; try {near}"
    if model.heads % model.kv_heads:
        near = _nearest_divisor(model.heads, model.kv_heads)
        yield f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}; try {near}"
    factor = {"none": 1}.get(model.boundary) or int(model.boundary[-2])
    if model.hidden_size % factor:
        yield f"model.boundary = {model.boundary!r} does not divide model.hidden_size = {model.hidden_size}"
    if config.data.tokenizer == "bytes" and model.vocab_size < 256:
        yield f"model.vocab_size = {model.vocab_size} does not cover data.tokenizer = 'bytes'; try 256"


def _local_problems(config: Config) -> Iterator[str]:
    run, train = config.run, config.train
    if train.local_steps == 1:
        return
    if run.stages > 1:  # a local step needs the whole model's gradient, which no peer of a pipeline has
        yield f"train.local_steps = {train.local_steps} needs the whole model on every peer; try run.stages=1"
    if config.device.executor == "emulated":
        yield f"train.local_steps = {train.local_steps} needs a model to step; try device.executor=resident"
    if train.round_warmup > train.local_steps:
        yield (
            f"train.round_warmup = {train.round_warmup} does not end within train.local_steps = {train.local_steps}; "
            f"try {train.local_steps // 4}"
        )
    own = local_batch(config)
    if not own or own % train.microbatch:
        told = (
            f"train.local_batch = {own}"
            if train.local_batch
            else f"train.batch / run.peers = {train.batch / run.peers:g}"
        )
        near = train.microbatch * max(1, round(own / train.microbatch))
        yield f"{told} is no multiple of train.microbatch = {train.microbatch}; try train.local_batch={near}"


def _plan_problems(config: Config) -> Iterator[str]:
    run, seat = config.run, config.device.seat
    names, stages = list(run.seats), tuple(run.seats.values())
    if seat and seat not in run.seats:
        near = difflib.get_close_matches(seat, names, n=1) or names[:6]
        yield f"device.seat = {seat!r} is no machine of run.seats; try {' or '.join(near) if near else 'device.seat='}"
    if not run.seats:
        if run.routes:
            yield "run.routes without run.seats; try run.routes=[]"
        if run.widths:
            yield "run.widths without run.seats; try run.widths=[]"
        return
    if run.widths and (len(run.widths) != len(names) or min(run.widths) < 0):
        yield f"run.widths = {list(run.widths)} must be 0 or more, one for each of {len(names)} run.seats; try run.widths=[]"
    empty = set(range(run.stages)) - set(stages)
    if empty or not all(0 <= stage < run.stages for stage in stages):
        yield f"run.seats = {dict(run.seats)} must serve all stages from 0 to {run.stages - 1} and no other"
    for number, ways in enumerate(run.routes):
        right = len(ways) == run.stages and all(ways) and len(run.routes) == len(names)
        if not right or any(
            not 0 <= at < len(names) or stages[at] != stage for stage, way in enumerate(ways) for at in way
        ):
            yield (
                f"run.routes[{number}] = {[list(way) for way in ways]} must name seats 0 to {len(names) - 1} of each of"
                f" run.stages = {run.stages} stages, one list for each, and there is one entry for each seat"
            )


def _size_problems(config: Config) -> Iterator[str]:
    """A boundary tensor must pass the limit that every peer sets on what it accepts."""
    model, train, limit = config.model, config.train, config.network.blob_bytes
    if config.device.executor == "emulated":
        need = 4 * config.device.emulated_values
    else:
        width = 0 if model.path else model.hidden_size * (4 if train.dtype == "float32" else 2)
        need = train.microbatch * (config.data.sequence + 1) * max(width, 8)  # 8: tokens travel as int64
    if limit < need:
        yield f"network.blob_bytes = {limit} refuses boundary tensors of {need} bytes; try {need} or more"


def _out_of_bounds(tree: Mapping[str, Any]) -> Iterator[str]:
    for path, (low, high) in _BOUNDS.items():
        value = _at(tree, path)
        if not low <= value <= high:
            span = f"{low:,} or more" if high == math.inf else f"{low:,} to {high:,}"
            yield f"{path} = {value} is out of range; try {span.replace(',', '_')}"
    for path in _POSITIVE:
        if _at(tree, path) <= 0:
            yield f"{path} = {_at(tree, path)} must be above 0; try {_at(to_tree(Config()), path)}"


def _at(tree: Mapping[str, Any], path: str) -> Any:
    return functools.reduce(lambda node, key: node[key], path.split("."), tree)


def _nearest_divisor(whole: int, wanted: int) -> int:
    return min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: (abs(d - wanted), d))


# ------------------------------------------------------------------------------------------------------ trees to values


def _override(tree: dict[str, Any], argument: str) -> None:
    """Put one `a.b=c` into the tree. Only what is plainly a number, list or truth value is not taken as text."""
    path, sign, written = argument.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise ValueError(f"{argument!r} is not a setting; write section.field=value, such as run.steps=100")
    node = tree
    for i, key in enumerate(keys[:-1]):
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ValueError(f"{'.'.join(keys[: i + 1])} is a value, not a section, so {path} cannot be set")
        node = child
    node[keys[-1]] = written if _is_text(keys) else _literal(written)


def _is_text(keys: list[str]) -> bool:
    """Does that field hold text? Then 'run.name=7' is the name 7."""
    section = _fields(Config).get(keys[0])
    field = _fields(section).get(keys[1]) if section is not None and len(keys) == 2 else None
    return field is str or typing.get_origin(field) is Literal


def _literal(written: str) -> Any:
    try:
        return tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        return written


def _section(kind: type[msgspec.Struct], tree: object, path: str) -> Any:
    """The struct `kind` from a dictionary; `path` is where it stands, for the complaints."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"{path or 'the configuration'} = {tree!r} is a value; it must be a section [{path}]")
    fields = _fields(kind)
    values = {}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            raise ValueError(f"{where} is not a setting{_suggestion(str(key), path, fields)}")
        field = fields[key]
        if isinstance(field, type) and issubclass(field, msgspec.Struct):
            values[key] = _section(field, value, where)
        else:
            values[key] = _value(field, value, where)
    return kind(**values)


def _value(kind: Any, value: Any, where: str) -> Any:
    ending = units.suffix(where)
    if ending and isinstance(value, str):
        try:
            value = units.parse(value, ending)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if kind is int and value.is_integer():
            value = int(value)
    try:
        value = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ValueError(f"{where} = {value!r} {_wanted(kind, value)}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} = {value} is not a finite number")
    return value


def _wanted(kind: Any, value: object) -> str:
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"must be {' or '.join(map(repr, choices))}{hint}"
    inner = typing.get_args(kind)[:1]
    if inner and typing.get_origin(kind) is tuple and typing.get_origin(inner[0]) is Literal:
        return f"must be a list of {', '.join(map(repr, typing.get_args(inner[0])))}"
    return f"must be {_KINDS.get(kind, 'a section of plain values')}"


_KINDS: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple[float, float]: "two numbers, such as [0.9, 0.95]",
}


def _suggestion(key: str, path: str, fields: Mapping[str, Any]) -> str:
    """The likeliest meaning: a field of that section, else one of that name in another section."""
    near = difflib.get_close_matches(key, fields, n=1)
    if near:
        return f"; did you mean {f'{path}.' if path else ''}{near[0]}?"
    known = [f"{section}.{field}" for section, kind in _fields(Config).items() for field in _fields(kind)]
    elsewhere = [name for name in known if difflib.get_close_matches(key, [name.partition(".")[2]], cutoff=0.8)]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; {f'[{path}]' if path else 'the configuration'} has {', '.join(fields)}"


def _fields(kind: type[Any]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


# ----------------------------------------------------------------------------------------------------------- printing


def text(config: Config) -> str:
    """The whole effective tree as TOML with its comments; `load` reads it back."""
    lines = []
    for section in _fields(Config):
        values = getattr(config, section)
        kind = type(values)
        lines += [f"# {(kind.__doc__ or '').strip()}", f"[{section}]"]
        for field in _fields(kind):
            comment = comments().get(f"{section}.{field}", "")
            line = f"{field} = {_toml(getattr(values, field))}"
            lines.append(f"{line}  # {comment}" if comment else line)
        lines.append("")
    return "\n".join(lines)


@functools.cache
def comments() -> dict[str, str]:
    """What each field says about itself, by path: the comment at the end of its line in this file."""
    source = Path(__file__).read_text(encoding="utf-8")
    lines = source.splitlines()
    of_class = {kind.__name__: section for section, kind in _fields(Config).items()}
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name not in of_class:
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.end_lineno is not None:
                rest = lines[field.end_lineno - 1][field.end_col_offset :]
                found[f"{of_class[node.name]}.{field.target.id}"] = rest.partition("#")[2].strip()
    return found


def quoted(text: str) -> str:
    """As TOML writes it, also as a key."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)
