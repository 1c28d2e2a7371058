"""Every decoder of bytes from outside: what it is given, how it refuses, and what it starts from.

A target returns for bytes that it takes and raises one of its `refusals` for all others; anything else is a mistake. `seeds` are
bytes that it takes: made here, so that they are of this version. Inputs that once were mistakes lie in corpus/NAME/.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import inspect as types

from shoal import codec, guest, trace
from shoal.config import Config, Model, Tune, reading
from shoal.core import messages as m
from shoal.dashboard import account
from shoal.forecasting import churn
from shoal.launcher.chaos import schedule
from shoal.launcher.files import adapter_files, saved
from shoal.model import weights
from shoal.numerics import compress
from shoal.planner.inputs import cluster, measured
from shoal.planner.strategy import plan
from shoal.runtime import state
from shoal.runtime.checkpoints import marker, weight_files
from shoal.runtime.data import rows
from shoal.runtime.records import report
from shoal.sim.faults import edges, preemption
from shoal.transport import relay, wire
from shoal.transport.base import Blob, Limits
from shoal.transport.directory import directory, records
from shoal.transport.directory.records import TTL_S, PeerRecord
from shoal.transport.emulated import faulty
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority, read_invite
from shoal.transport.streams import handshake

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
MOST_BYTES = 1 << 16  # of an input
NOW = 1_800_000_000.0
AUTHORITY = Authority.new()
INVITE = read_invite(
    AUTHORITY.invite(("/ip4/10.0.0.1/tcp/4001/p2p/x", "10.0.0.2:77", "[::1]:9"), NOW + 600, "run"), NOW
)
ME, OTHER = Identity.new(), Identity.new()
MINE, THEIRS = INVITE.membership(ME, lambda: NOW), INVITE.membership(OTHER, lambda: NOW)
LIMITS = Limits(blob_bytes=1 << 20)
FOLDER = Path(tempfile.mkdtemp(prefix="shoal-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
DEVICE = b'[[device]]\nname = "a"\nflops = "1 TFLOP/s"\nmemory_bytes = "8 GiB"\n'
NONCE = bytes(relay.NONCE_BYTES)


class Target(msgspec.Struct, frozen=True):
    name: str
    decode: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    seeds: Callable[[], Iterator[bytes]]


# ------------------------------------------------------------------------------------------------------- from the network


def _frame(data: bytes) -> None:
    """As it is received: in pieces, into memory that grows with what has come; then as transports in one process read it."""
    message, blobs = wire.decode(data, LIMITS)
    for blob in blobs:
        if blob.codec != codec.RAW:
            compress.fault(_code(blob))
    assert wire.decode(b"".join(wire.encode(message, blobs, LIMITS).pieces(0, MOST_BYTES * 64)), LIMITS)[0] == message


def _code(blob: Blob) -> compress.Code:
    return compress.Code(blob.dtype, blob.shape, blob.codec, torch.frombuffer(bytearray(blob.data), dtype=torch.uint8))


def _streamed(data: bytes) -> None:
    for bulk in (False, True):
        incoming = wire.Arriving(LIMITS, bulk)
        stream = io.BytesIO(data)
        while not incoming.whole:
            room = incoming.room(4096)
            piece = stream.read(len(room))
            if not piece:
                break
            room[: len(piece)] = piece
            incoming.advance(len(piece))


def _hops() -> Iterator[bytes]:
    view = m.View(
        number=7,
        step=3,
        members=(m.Member("p0.0", 0), m.Member("p1.0", 1)),
        owners=(0, 1),
        phase=m.Phase.TRAINING,
        last=m.Committed(2, 5, 1.0, 2.0, ("a", "b"), ((m.Share("p0.0", (0, 1)),), (m.Share("p1.0", (0, 1)),))),
    )
    facts = edges.Facts(name="p9.0", peer="p0.0", view=view, term=3, round=5)
    for kind in edges.KINDS:
        for _, message in itertools.islice(edges.attacks(kind, facts), 2):
            blobs: tuple[Blob, ...] = ()
            if isinstance(message, m.BULK):
                blobs = (Blob("float32", (2, 8), bytes(64)), _blob("int8"), _blob("int4"))
            try:
                yield b"".join(bytes(piece) for piece in wire.encode(message, blobs, LIMITS).pieces(0, MOST_BYTES))
            except ValueError:
                continue  # an attack that no sender can send


def _blob(how: str) -> Blob:
    code = compress.encode(torch.linspace(-1, 1, 128), how)
    return Blob(code.dtype, code.shape, bytes(code.data.numpy()), code.codec)


def _hellos() -> Iterator[bytes]:
    for kind in ("control", "bulk"):
        yield handshake.encode_hello(OTHER.name, ME.name, kind, THEIRS, "10.0.0.9")  # type: ignore[arg-type]
    yield handshake.encode_rejection(handshake.HandshakeRefused("it is not welcome"))


def _record(**fields: object) -> PeerRecord:
    record = PeerRecord(THEIRS.run, OTHER.name, "127.0.0.1", 5, expires_s=NOW + TTL_S)
    return msgspec.structs.replace(record, **fields)  # type: ignore[arg-type]


def _sealed() -> Iterator[bytes]:
    yield records.seal(OTHER, THEIRS, _record())


def _call(data: bytes) -> None:
    for one in directory._decoded(data):
        records.unseal(one, MINE, NOW)


def _lists() -> Iterator[bytes]:
    grant = INVITE.grant
    yield AUTHORITY.pass_list(3, (grant,), (AUTHORITY.revoked("someone", NOW),))


def _asked() -> Iterator[bytes]:
    yield relay.request(OTHER, THEIRS, ME.key_id, NONCE, ME.name)[2:]
    yield relay.request(OTHER, THEIRS, ME.key_id, NONCE, "")[2:]


def _quiet(data: bytes) -> None:
    membership = INVITE.membership(Identity.new(), lambda: NOW)
    membership.take_grant(data)
    membership.take_notice(data)


# --------------------------------------------------------------------------------------------------------------- files


def _file(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    path = FOLDER / name

    def decode(data: bytes) -> object:
        path.write_bytes(data)
        result = read(path)
        return list(result) if isinstance(result, Iterator) else result

    return decode


def _texts(*patterns: str) -> Callable[[], Iterator[bytes]]:
    def seeds() -> Iterator[bytes]:
        for pattern in patterns:
            for file in sorted(ROOT.glob(pattern)):
                if file.stat().st_size < MOST_BYTES:
                    yield file.read_bytes()

    return seeds


def _states() -> Iterator[bytes]:
    tensors = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16), "c": torch.zeros(0)}
    yield b"".join(map(bytes, state.stream(tensors, {"step": "3"})))


def _markers() -> Iterator[bytes]:
    training = usual(types.type_info(marker.Training))
    yield marker.encoded(msgspec.structs.replace(training, format=marker.FORMAT, config=Config()))


def usual(kind: types.Type) -> Any:
    """A plain value of a type: of structs every field, of collections one entry."""
    match kind:
        case types.StructType(cls=struct, fields=fields):
            return struct(**{one.name: usual(one.type) for one in fields})
        case types.IntType(ge=least):
            return max(1, least or 0)
        case types.FloatType():
            return 1.0
        case types.BoolType():
            return True
        case types.StrType(min_length=least):
            return "x" * max(1, least or 0)
        case types.BytesType():
            return b"x"
        case types.ListType(item_type=item):
            return [usual(item)]
        case types.VarTupleType(item_type=item):
            return (usual(item),)
        case types.TupleType(item_types=items):
            return tuple(map(usual, items))
        case types.SetType(item_type=item) | types.FrozenSetType(item_type=item):
            return frozenset((usual(item),))
        case types.DictType(key_type=key, value_type=value):
            return {usual(key): usual(value)}
        case types.UnionType(types=options):
            return usual(options[0])
        case types.LiteralType(values=values):
            return values[0]
        case types.EnumType(cls=members):
            return next(iter(members))
        case types.NoneType():
            return None
    return "x"


def written(struct: type[msgspec.Struct]) -> Callable[[], Iterator[bytes]]:
    return lambda: iter((msgspec.json.encode(usual(types.type_info(struct))),))


def _traces() -> Iterator[bytes]:
    header, record, carried = (
        usual(types.type_info(kind)) for kind in (trace.Header, trace.TraceRecord, trace.TrafficRecord)
    )
    yield b"".join(map(trace.line, (header, record, carried)))


def _packed_trace(data: bytes) -> object:
    return _file(trace.read, "trace.jsonl.gz")(gzip.compress(data[:4096], 1) if data[:2] != b"\x1f\x8b" else data)


def _npz(data: bytes) -> object:
    return _file(cluster.read_matrices, "net.npz")(data)


def _matrices() -> Iterator[bytes]:
    memory = io.BytesIO()
    np.savez(memory, delay_ms=np.ones((2, 2)), bandwidth_gbps=np.ones((2, 2)), regions=np.array(["a", "b"]))
    yield memory.getvalue()


def _lines() -> Iterator[bytes]:
    for kind in report.AnyLine.__args__:
        yield report.encode(usual(types.type_info(kind)))


def _one(data: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: iter((data,))


def _line(text: bytes) -> object:
    data = reading.load(None).data
    return rows.checked(rows.parsed(text), data)


def _weights_index(data: bytes) -> object:
    (FOLDER / "model").mkdir(exist_ok=True)
    (FOLDER / "model" / weights.INDEX).write_bytes(data)
    return list(weight_files.faults(FOLDER / "model", "model.path")), weight_files.fingerprint(FOLDER / "model")


def _adapter(data: bytes) -> object:
    (FOLDER / "adapter").mkdir(exist_ok=True)
    (FOLDER / "adapter" / "adapter_config.json").write_bytes(data)
    tune = Tune(method="lora", adapter=str(FOLDER / "adapter"))
    with contextlib.suppress(ValueError):
        saved.adapted(FOLDER / "adapter")
    return list(adapter_files.faults(Config(model=Model(path=str(FOLDER)), tune=tune)))


def _torn(data: bytes) -> object:
    folder = FOLDER / "weights"
    folder.mkdir(exist_ok=True)
    (folder / weights.SINGLE).write_bytes(data)
    return weight_files.torn(folder / weights.SINGLE), weight_files.fingerprint(folder)


TARGETS = (
    Target("frame", _frame, (wire.Malformed,), _hops),
    Target("stream", _streamed, (wire.Malformed,), _hops),
    Target(
        "hello",
        lambda data: handshake.check_hello(data, OTHER.key_id, ME.name, MINE),
        (handshake.HandshakeRefused,),
        _hellos,
    ),
    Target("record", lambda data: records.unseal(data, MINE, NOW), (ValueError,), _sealed),
    Target("records", _call, (ValueError,), lambda: iter([msgspec.msgpack.encode(list(_sealed()))])),
    Target("passes", lambda data: INVITE.membership(ME).take_list(data), (ValueError,), _lists),
    Target("pass", lambda data: MINE.check(data, OTHER.name, NOW), (ValueError,), lambda: iter((THEIRS.proof,))),
    Target("grant", _quiet, (), lambda: iter((msgspec.msgpack.encode(INVITE.grant),))),
    Target("relay", lambda data: relay.checked(data, ME.key_id, NONCE, MINE), (ValueError,), _asked),
    Target("invite", lambda data: read_invite(data.decode("latin-1"), NOW), (ValueError,), lambda: iter((
        AUTHORITY.invite(("10.0.0.2:77",), NOW + 60, "run").encode(),
    ))),
    Target("configuration", guest._tree, (ValueError,), lambda: iter((guest.pack({"run": {"steps": 3}}),))),
    Target("device", lambda data: measured.device_from(data.decode("latin-1")), (ValueError,), _one(DEVICE)),
    Target("state", lambda data: state.unpack(io.BytesIO(data).read), (ValueError,), _states),
    Target("marker", marker.decoded, (marker.Unreadable,), _markers),
    Target("line", report.decode, (), _lines),
    Target("summary", _file(account.read, "summary.json"), (ValueError,), written(account.Summary)),
    Target("plan", _file(plan.load, "plan.json"), (ValueError,), written(plan.Plan)),
    Target("trace", _file(trace.read, "trace.jsonl"), (ValueError,), _traces),
    Target("trace-gz", _packed_trace, (ValueError,), _traces),
    Target("config", _file(lambda path: reading.load(path), "run.toml"), (ValueError,), _texts("configs/*.toml", "src/shoal/cli/*.toml")),
    Target("cluster", _file(cluster.read, "cluster.toml"), (ValueError,), _texts("configs/*/*.toml")),
    Target("matrices", _npz, (ValueError,), _matrices),
    Target("churn", _file(lambda path: churn.load(str(path)), "churn.toml"), (ValueError,), _one(b'life_s = "2 h"\nshape = 1.5\n')),
    Target("preemptions", _file(preemption.read, "record.csv"), (ValueError,), _one(b"0,add,a\n480000,remove,a\n")),
    Target("schedule", _file(schedule.read, "acts.toml"), (ValueError,), _one(b'[[act]]\nat = 3\nkind = "kill"\n')),
    Target("faults", _file(faulty.read, "faults.json"), (), _one(b"[]")),
    Target("row", _line, (rows.WrongRow,), _one(b'{"text": "words"}')),
    Target("index", _weights_index, (), _one(b'{"weight_map": {"a": "model-1.safetensors"}}')),
    Target("adapter", _adapter, (), _one(b'{"peft_type": "LORA", "r": 16, "lora_alpha": 32, "base_model_name_or_path": "b"}')),
    Target("safetensors", _torn, (), _states),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- mutating


_EDGES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, float("nan"), float("inf"), -1e308,
    "", "\0", "\u202e", "x" * 300, b"", b"\xff" * 40, [], {}, [[]], {"a": {}},
)  # fmt: skip


_PIECES = (
    b"\xff",
    b"\0\0\0\0",
    b"\x91" * 3000,
    b"[" * 3000,
    b'{"":' * 3000,
    b"\xdd\xff\xff\xff\xff",
    b"nan",
    b"1e400",
    b"9" * 5000,
)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Other bytes: of the same structure with one value changed where there is one, or with bytes changed, cut or repeated."""
    if chance.random() < 0.5:
        for decode, encode in (
            (msgspec.msgpack.decode, msgspec.msgpack.encode),
            (msgspec.json.decode, msgspec.json.encode),
        ):
            try:
                return bytes(encode(_changed(decode(data), chance)))[:MOST_BYTES]
            except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, ValueError, OverflowError):
                continue
    copy = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(copy) + 1)
        match chance.randrange(6):
            case 0 if copy:
                copy[at % len(copy)] ^= 1 << chance.randrange(8)
            case 1:
                del copy[at : at + chance.randrange(1, 9)]
            case 2:
                copy[at:at] = chance.choice(
                    (
                        b"\xff",
                        b"\0\0\0\0",
                        b"\x91" * 3000,
                        b"[" * 3000,
                        b'{"":' * 3000,
                        b"\xdd\xff\xff\xff\xff",
                        b"nan",
                        b"1e400",
                        b"9" * 5000,
                    )
                )
            case 3:
                copy[at:at] = copy[at : at + chance.randrange(1, 40)]
            case 4:
                del copy[at:]
            case _:
                copy[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 8)))
    return bytes(copy[:MOST_BYTES])  # fmt: skip


def _changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        rest = {k: v for k, v in value.items() if k != key}
        return rest if chance.random() < 0.1 else {**rest, key: _changed(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        at = chance.randrange(len(value))
        return (
            value[:at]
            + chance.choice(([], [_changed(value[at], chance)], [value[at], _changed([], chance)]))
            + value[at + 1 :]
        )
    return chance.choice((*_EDGES, msgspec.Raw(b"\x91" * 2000 + b"\xc0"), msgspec.Raw(b"[" * 2000 + b"]" * 2000)))


def corpus(target: Target) -> list[bytes]:
    kept = sorted((CORPUS / target.name).glob("*")) if (CORPUS / target.name).is_dir() else []
    return [*target.seeds(), *(file.read_bytes() for file in kept)]


def attempt(target: Target, data: bytes) -> bool:
    """Did it take the bytes? A mistake is raised as it is."""
    try:
        target.decode(data)
    except target.refusals:
        return False
    return True
