"""`shoal serve CHECKPOINT`: serve a model to `shoal generate` and `shoal chat`, by peers of which each holds one stage and trains nothing.

As `shoal run`, with the checkpoint's own model and nothing to train: peers join by invite, replace one another and move. Each reads its
stage from the checkpoint's directory, which every machine needs; that of adapters from their base model's and from theirs, unmerged.
Lasts until Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from shoal.dashboard.account import Summary
from shoal.launcher import session
from shoal.launcher.files import adapter_files, saved
from shoal.launcher.launcher import Launcher
from shoal.launcher.session import RunOptions

STAGES = 3  # unless the model has fewer blocks
REPLICAS = 2  # of each stage: one may die


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        help="a directory of a model, a checkpoint or a PEFT adapter; or of a run, for its newest checkpoint",
    )
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="a.b=c",
        help="settings, such as run.stages=4 run.peers=8 train.dtype=bfloat16 device.cache_bytes=1073741824",
    )
    parser.add_argument(
        "--here",
        type=int,
        metavar="N",
        help="start N peers on this machine (default run.peers); the others join by invite",
    )
    parser.add_argument("--base", metavar="DIR", help="of adapters: where their base model lies now")


def main(args: argparse.Namespace) -> int:
    path = saved.checkpoint(args.checkpoint)
    options = RunOptions(here=args.here, command=shlex.join(["shoal", *sys.argv[1:]]))
    prepared = session.prepare(tree(path, args.settings, args.base), args.settings, options)
    peers = prepared.config.run.peers
    faults = []
    if args.here is not None and not 1 <= args.here <= peers:
        faults.append(f"--here {args.here}: all stages are served by run.peers = {peers}; try 1 to {peers}")
    with session.begin(prepared, options, faults) as job:
        assert not isinstance(job, Summary), "nothing is resumed"
        outcome = asyncio.run(Launcher(job).run())
        print(outcome.text)
        return outcome.code


def tree(path: Path, settings: list[str], base: str | None = None) -> dict[str, Any]:
    """The configuration, as a tree, that serves the model in `path`. ValueError: no peers can serve it."""
    from shoal.model.layers import boundary

    named = dict(setting.partition("=")[::2] for setting in settings)
    run: dict[str, Any] = {"name": _name(path), "serve": True}
    sections: dict[str, Any] = {"data": {"sequence": 1}, "checkpoint": {"every": 0, "at_end": False}}
    if adapter_files.there(path):
        config = saved.adapted(path.resolve(), base or named.get("model.path"))
        sections |= {
            "model": _changed(config.model),
            "tune": _changed(config.tune),
            "train": {"dtype": config.train.dtype},
        }
        sections["model"]["path"] = str(Path(config.model.path).resolve())
        blocks = _blocks(_fields(Path(config.model.path)))
    elif base is not None:
        raise ValueError(f"--base {base}: {path} holds no adapters, but a whole model; leave --base out")
    else:
        fields = _fields(path)
        inner = fields["model"] if fields["model_type"] == boundary.MODEL_TYPE else fields
        sections["model"], blocks = {"path": str(path.resolve())}, _blocks(inner)
        if inner is not fields:  # boundary layers stand at the cuts that they were trained for
            starts = [0, *fields["before_blocks"], inner["num_hidden_layers"]]
            sections["model"]["boundary"] = fields["boundary"]
            run |= {"stages": len(starts) - 1, "layers": [b - a for a, b in pairwise(starts)]}
    run.setdefault("stages", min(STAGES, blocks))
    stages = named.get("run.stages", "")
    run["peers"] = REPLICAS * (int(stages) if stages.isdigit() else run["stages"])
    return sections | {"run": run}


def _fields(path: Path) -> dict[str, Any]:
    """Of a Hugging Face configuration. ValueError: it is none, or of a model that peers cannot serve."""
    from shoal.model import sequential
    from shoal.model.layers import boundary

    try:
        fields: dict[str, Any] = json.loads((path / "config.json").read_text())
        kind = fields["model_type"]
        if kind == boundary.MODEL_TYPE and not isinstance(fields["model"], dict):
            raise TypeError("its model is no object")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / 'config.json'} is no Hugging Face configuration: {error!r}") from error
    if kind == sequential.MODEL_TYPE:
        raise ValueError(f"{path}: a model of your own (model.factory), whose peers keep no keys and values for texts")
    return fields


def _blocks(fields: dict[str, Any]) -> int:
    return next((fields[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in fields), STAGES)


def _changed(section: msgspec.Struct) -> dict[str, Any]:
    """The settings of a section that are not defaults."""
    plain = msgspec.to_builtins(type(section)())
    return {name: value for name, value in msgspec.to_builtins(section).items() if value != plain[name]}


def _name(path: Path) -> str:
    place = path.resolve()
    of_run = f"{place.parent.parent.name}-" if place.parent.name == "checkpoints" else ""
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"serve-{of_run}{place.name}")[:100]
