"""Shoal beside torch.distributed.pipelining on one machine: the same model, batch and microbatches in six processes.

    python benchmarks/pipelining.py [--rounds 3] [--steps 20] [a.b=c ...]

Both train configs/quickstart.toml: three stages of two replicas. The other one is what PyTorch offers where nothing fails: Schedule1F1B
over gloo, all activations kept, plain TCP without encryption, one all-reduce of the gradient between the two replicas of a stage and one
of the norm, fused AdamW; its processes know each other from the start, and the first that dies ends the run. Shoal handles faults, encrypts
and keeps its account. Each multiplies as it does by default: on processors that are not Intel's, Shoal asks oneDNN
(model/layers/linear.py) and torch MKL.
Rounds alternate, since what else the machine does changes what either reaches. Value: the median over the rounds of Shoal's tokens per
second over the other's in the same round; start-up and the first two steps of each are not counted. The seconds of processor time that a
step takes depend less on what else the machine does, and are in the record too.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from overhead import environment
from report import at_least, parse, report
from shoal import config as configuration
from shoal.config import Config
from shoal.model.families import hf_config

QUICKSTART = Path(__file__).resolve().parents[1] / "configs/quickstart.toml"
WANTED = 1.0
WARM_UP = 2  # steps


class Seconds(NamedTuple):
    step: float
    processors: float  # of all processes, for a step


class Part(nn.Module):
    """The blocks of one stage, without what Hugging Face's model computes around them."""

    def __init__(self, config: Config, stage: int) -> None:
        super().__init__()
        hf = hf_config(config)
        assert isinstance(hf, LlamaConfig)
        hf._attn_implementation = "sdpa"
        count = hf.num_hidden_layers // config.run.stages
        first, last = stage == 0, stage == config.run.stages - 1
        self.embed = nn.Embedding(hf.vocab_size, hf.hidden_size) if first else None
        self.layers = nn.ModuleList([LlamaDecoderLayer(hf, stage * count + index) for index in range(count)])
        self.rotary = LlamaRotaryEmbedding(hf)
        self.norm = LlamaRMSNorm(hf.hidden_size) if last else None
        self.head = nn.Linear(hf.hidden_size, hf.vocab_size, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x if self.embed is None else self.embed(x)
        positions = self.rotary(hidden, torch.arange(hidden.shape[1])[None])
        for layer in self.layers:
            result = layer(hidden, position_embeddings=positions, attention_mask=None)
            hidden = result[0] if isinstance(result, tuple) else result
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pipelined(rank: int, config: Config, steps: int, port: int, answer: SimpleQueue[Seconds]) -> None:
    """One of the processes: its stage's steps. The first one answers with the seconds of all but the first steps, and with those of
    the processors."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    stages, peers = config.run.stages, config.run.peers
    replicas = peers // stages
    dist.init_process_group("gloo", rank=rank, world_size=peers)
    replica, stage = divmod(rank, stages)
    pipelines = [dist.new_group(list(range(r * stages, (r + 1) * stages))) for r in range(replicas)]
    of_stage = [dist.new_group(list(range(s, peers, stages))) for s in range(stages)]
    torch.manual_seed(0)
    part = Part(config, stage)
    optimizer = torch.optim.AdamW(part.parameters(), lr=config.train.learning_rate, fused=True)
    piece = PipelineStage(part, stage, stages, torch.device("cpu"), group=pipelines[replica])
    batch = config.train.batch // replicas
    schedule = Schedule1F1B(piece, batch // config.train.microbatch, loss_fn=loss)
    begun = processor_s = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            dist.barrier()
            begun, processor_s = time.monotonic(), -time.process_time()
        tokens = torch.randint(0, part.head.out_features if part.head else 256, (batch, config.data.sequence + 1))
        if stage == 0:
            schedule.step(tokens[:, :-1].contiguous())
        elif stage == stages - 1:
            schedule.step(target=tokens[:, 1:].contiguous())
        else:
            schedule.step()
        gradients = [value.grad for value in part.parameters() if value.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=of_stage[stage])
        flat /= replicas
        norm_sq = flat.square().sum()
        dist.all_reduce(norm_sq, group=pipelines[replica])
        flat *= min(1.0, config.train.clip / (float(norm_sq) ** 0.5 + 1e-6))
        for gradient, values in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
        optimizer.step()
        optimizer.zero_grad()
    used = torch.tensor([processor_s + time.process_time()])
    dist.all_reduce(used)
    if rank == 0:
        answer.put(Seconds((time.monotonic() - begun) / steps, float(used) / steps))
    dist.destroy_process_group()


def other(config: Config, steps: int) -> Seconds:
    """A step of torch.distributed.pipelining."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answer: SimpleQueue[Seconds] = mp.get_context("spawn").SimpleQueue()
    mp.spawn(pipelined, args=(config, steps, port, answer), nprocs=config.run.peers)
    return answer.get()


def shoal(words: list[str], steps: int) -> Seconds:
    """A step of Shoal, checkpoints left out."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.steps={WARM_UP + steps + 1}", "checkpoint.every=0", "checkpoint.at_end=false", *words]
        command = [sys.executable, "-m", "shoal.cli.main", "run", str(QUICKSTART), *settings]
        commits = Path(folder) / "runs/quickstart/commits.jsonl"
        with subprocess.Popen(command, cwd=folder, env=environment(), stdout=sys.stderr) as run:
            used = [_at_commit(commits, count, run) for count in (WARM_UP, WARM_UP + steps)]
        if run.returncode:
            raise subprocess.CalledProcessError(run.returncode, command)
        times_s = [json.loads(line)["heard_s"] for line in commits.read_bytes().splitlines()]
    return Seconds((times_s[-2] - times_s[WARM_UP - 1]) / steps, (used[1] - used[0]) / steps)


def _at_commit(commits: Path, count: int, run: subprocess.Popen[bytes]) -> float:
    """Processor seconds of the run's processes so far, when so many commits are known."""
    while not commits.exists() or commits.read_bytes().count(b"\n") < count:
        if run.poll() is not None:
            return 0.0
        time.sleep(0.02)
    return _processor_s(run.pid)


def _processor_s(process: int) -> float:
    """Of a process and all that it has started, so far (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    own_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own_s + sum(_processor_s(int(child)) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="a.b=c")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of each run, besides the first two")
    asked = parse(parser)
    config = configuration.load(QUICKSTART, asked.settings)
    tokens = config.train.batch * config.data.sequence
    ours: list[Seconds] = []
    others: list[Seconds] = []
    for number in range(asked.rounds):
        others.append(other(config, asked.steps))
        ours.append(shoal(asked.settings, asked.steps))
        own, its = ours[-1], others[-1]
        print(
            f"round {number}: {tokens / own.step:.0f} of {tokens / its.step:.0f} tokens/s: {its.step / own.step:.3f};"
            f" processors {own.processors:.2f} s, {its.processors:.2f} s a step",
            file=sys.stderr,
        )
    ratios = [its.step / own.step for own, its in zip(ours, others, strict=True)]
    setting = {
        "peers": config.run.peers,
        "stages": config.run.stages,
        "tokens": tokens,
        "tokens_per_s": [round(tokens / own.step) for own in ours],
        "other_tokens_per_s": [round(tokens / its.step) for its in others],
        "ratios": [round(ratio, 3) for ratio in ratios],
        "processor_s": [round(own.processors, 3) for own in ours],
        "other_processor_s": [round(its.processors, 3) for its in others],
    }
    report(
        "pipelining",
        statistics.median(ratios),
        "of torch.distributed.pipelining",
        at_least(WANTED),
        setting,
        asked.record,
    )


if __name__ == "__main__":
    main()
