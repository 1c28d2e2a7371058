"""A process for one further device of a sharded stage: carries out what the leading process commands, and ends with it.

Any failure ends this process, which breaks the process group: the leading process then fails too, instead of waiting.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import traceback
from typing import IO, Any

import torch

from shoal.executor import base
from shoal.executor.inputs import BackwardInput
from shoal.executor.shards import commands
from shoal.executor.shards.commands import Apply, Backward, Build, Contribution, Forward, Gather, Load, Zero
from shoal.executor.shards.member import Member, connect


def main() -> None:
    pipe, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    start = commands.receive(pipe, commands.START)
    if start is None:
        return
    out.write(b"r")  # ready
    connect(torch.device(start.device), start.rank, start.count, start.store, start.deadline_s)
    pending: queue.SimpleQueue[commands.Command] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, pending), daemon=True).start()
    member: Member | None = None
    while True:
        command = pending.get()
        if isinstance(command, Build):
            member = None  # two stages may not fit beside each other
            gc.collect()  # blocks and their hooks refer to one another
            base.prepare_thread(command.config)
            member = Member(command, start.rank)
            out.write(b"r")
        else:
            assert member is not None
            _carry_out(member, command, start.count)


def _read(pipe: IO[bytes], pending: queue.SimpleQueue[commands.Command]) -> None:
    """Apart from the work, so that this process also ends in the middle of an exchange with a process that has ended."""
    while (command := commands.receive(pipe, commands.COMMAND)) is not None:
        pending.put(command)
    os._exit(0)


def _carry_out(member: Member, command: commands.Command, count: int) -> None:
    def rows(shape: commands.Shape | None) -> Any:
        return None if shape is None else member.scatter_rows(None, shape.rows(count, member.device))

    try:
        match command:
            case Forward(x):
                member.forward(rows(x))
            case Backward(x, grad, tokens):
                member.backward(BackwardInput(rows(x), rows(grad), rows(tokens)))
            case Zero():
                member.zero()
            case Contribution(start, stop):
                member.contribution(start, stop)
            case Apply(norm, step, scale):
                member.apply(None, norm, step, scale)
            case Gather(kind):
                member.gather(kind)
            case Load(kind):
                member.load(kind, None)
    except base.NotFinite:
        pass  # all processes found it, and the leading one answers


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001  # whatever it is, the other processes wait for this one
        traceback.print_exc()
        os._exit(1)
