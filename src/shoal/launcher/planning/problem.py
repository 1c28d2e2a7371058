"""The planning problem of a configuration: its model's shape, its work per step, its machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal import codec, config
from shoal.escaping import UNDECODABLE
from shoal.planner.inputs import cluster, memory
from shoal.planner.inputs.profile import Profile, Shape, Work, profile
from shoal.planner.strategy import plan
from shoal.planner.strategy.problem import Problem, gradient_bytes


def problem_of(
    tree: config.Config,
    cluster_file: str | None,
    wiring: Literal["best", "planned", "stochastic"] = "best",
    uneven: bool = False,
    swapping: bool = False,
) -> Problem:
    """`cluster_file`: the TOML file of the machines; without one only an emulated run has any."""
    lab = tree.device.executor == "emulated"
    if cluster_file:
        machines = cluster.read(cluster_file)
    elif lab:
        machines = _modelled(tree)
    else:
        raise ValueError("no machines: name them with --cluster FILE, a TOML file of [[device]] and [link] tables")
    counted, why_not = (None, "") if lab else _counted(tree)
    if why_not:
        print(f"FLOPs and bytes by formula, as of a plain decoder: {why_not}", file=sys.stderr)
    return Problem(
        shape=shape(tree),
        work=work(tree),
        cluster=machines,
        emulated_s=tree.device.emulated_s if lab else 0.0,
        emulated_bytes=4.0 * tree.device.emulated_values if lab else 0.0,
        emulated_gradient_bytes=4.0 * tree.device.emulated_gradient,
        wiring=wiring,
        uneven=uneven,
        swapping=swapping,
        travel=travel(tree),
        staleness=tree.train.staleness,
        audits=tree.run.spot_checks > 0,
        moments=tree.train.moments,
        muon=tree.train.optimizer == "muon",
        kept_activations=0 if lab else tree.device.kept_activations,
        local_steps=tree.train.local_steps,
        store_limits=memory.StoreLimits(tree.network.activation_store_bytes, tree.network.activation_memory_bytes),
        counted=counted,
        counted_sequences=tree.train.microbatch,
    )


def _counted(tree: config.Config) -> tuple[Profile | None, str]:
    """What each part of the model asks for, counted on the meta device; or why that is impossible."""
    from shoal.model import analysis  # imports torch and transformers, which take seconds

    try:
        return analysis.count(tree), ""
    except ValueError as error:
        return None, str(error)


def work(tree: config.Config) -> Work:
    train = tree.train
    return Work(
        microbatches=config.microbatches(train),
        sequences=train.microbatch,
        tokens=tree.data.sequence,
        value_bytes=4 if train.dtype == "float32" else 2,
        inflight=config.inflight(tree.run),
        rows=config.token_rows(tree) // train.microbatch,
        passes=config.boundary_rows(tree) // config.token_rows(tree),
    )


def refuse_other_size(given: plan.Plan, tree: config.Config, where: str) -> None:
    """ValueError when a plan is for a model of another depth or, by the gradients that its stages average, of another size. By
    formula, and only where that speaks against it by the model itself, as counting takes seconds."""
    if tree.device.executor == "emulated" or not any(stage.gradient_bytes for stage in given.stages):
        return
    from shoal.planner.strategy import strategy  # scipy: half a second that only runs with a plan pay

    def mismatches(model: Profile) -> list[str]:
        if given.layers != model.blocks:
            return [f"it is for a model of {given.layers} blocks, this one has {model.blocks}; plan anew"]
        how = tree.network.averaging
        cut = [range(stage.first, stage.end) for stage in given.stages]
        return strategy.of_another_size(given, [gradient_bytes(model, span, how) for span in cut])

    differences = mismatches(profile(shape(tree), work(tree)))
    if differences and (counted := _counted(tree)[0]) is not None:
        differences = mismatches(counted)
    if differences:
        raise ValueError(f"{where}: {differences[0]}")


def tensor_bytes(tree: config.Config) -> float:
    """The larger of a boundary tensor and its gradient, as they are kept and travel."""
    lab = tree.device.emulated_values if tree.device.executor == "emulated" else 0
    values = lab or config.boundary_rows(tree) * tree.data.sequence * shape(tree).hidden / travel(tree).narrow
    raw_bytes = 4 if lab or tree.train.dtype == "float32" else 2
    return max(
        values * codec.bytes_per_value(how, raw_bytes) for how in (tree.network.activations, tree.network.gradients)
    )


def travel(tree: config.Config) -> codec.Travel:
    """How its tensors travel; boundary layers make those of a model that computes narrower, not an emulated one's."""
    kind = tree.model.boundary
    narrow = 1 if kind == "none" or tree.device.executor == "emulated" else int(kind[-2])
    network = tree.network
    return codec.Travel(network.activations, network.gradients, network.averaging, narrow)


def shape(tree: config.Config) -> Shape:
    """The model's shape: from the configuration, or from the config.json of the directory it is read from."""
    model = tree.model
    if model.factory:
        raise ValueError(f"model.factory = {model.factory!r}: its family's shape is not known here")
    fields: Mapping[str, Any] = {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
    }
    if model.path:
        file = Path(model.path) / "config.json"
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, *UNDECODABLE) as error:
            raise ValueError(f"{file} is no Hugging Face configuration: {error}") from None
    fields = {**fields, **model.extra}
    try:
        heads = int(fields["num_attention_heads"])
        hidden = int(fields["hidden_size"])
        return Shape(
            hidden=hidden,
            layers=int(fields["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(fields.get("num_key_value_heads") or heads),
            head_dim=int(fields.get("head_dim") or hidden // heads),
            intermediate=int(fields["intermediate_size"]),
            vocabulary=int(fields["vocab_size"]),
            tied=bool(fields.get("tie_word_embeddings", False)),
        )
    except KeyError as missing:
        raise ValueError(f"{model.path}/config.json lacks {missing}; its family's shape is not known here") from None


def _modelled(tree: config.Config) -> cluster.Cluster:
    """The lab of a configuration: run.peers alike behind its modelled lines."""
    peers, line = tree.run.peers, tree.network
    devices = tuple(
        cluster.Device(name=f"p{i}", flops=1.0, up_Bps=line.bandwidth_Bps, down_Bps=line.bandwidth_Bps)
        for i in range(peers)
    )
    unlimited = np.full((peers, peers), 1e12)  # the lines alone limit
    return cluster.from_matrices(devices, np.full((peers, peers), line.delay_s), unlimited)
