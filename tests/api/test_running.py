"""`shoal.run` in a script: one's own model and dataset, callbacks, Ctrl-C, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SOURCE = Path(__file__).parents[2] / "src"
MINE = '''
import torch
from torch import nn

class Block(nn.Module):
    """No module that Shoal knows."""
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))

def build():
    return nn.Sequential(nn.Embedding(16, 8), *(Block(8) for _ in range(3)), nn.Linear(8, 16))

class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return (torch.arange(9) + i) % 16
'''
SCRIPT = """
import json, os, sys
import shoal
import mine

CONFIG = {
    "run": {"name": "mine", "dir": sys.argv[1], "peers": 4, "stages": 2, "steps": 8, "min_request_timeout_s": 60.0},
    "data": {"sequence": 8},
    "train": {"batch": 8, "microbatch": 2, "warmup": 0, "learning_rate": 0.05, "schedule": "constant"},
    "checkpoint": {"every": 0},
    "network": {"discovery": "gossip", "host": "127.0.0.1"},
}

def main():
    seen, commits = [], []
    STEPS
    trained = shoal.run(CONFIG, *sys.argv[2:], model=mine.build, data=mine.Counting, on_step=on_step, on_commit=commits.append, quiet=True)
    frame = trained.frame() if FRAME else None
    model = trained.checkpoints[-1].model()
    import torch
    tokens = torch.stack([mine.Counting()[i] for i in range(16)])
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()
    print(json.dumps({
        "seen": [step.step for step in seen], "commits": len(commits), "thread": threads, "balanced": trained.summary.balanced,
        "losses": trained.losses, "loss": loss, "columns": list(frame.columns) if frame is not None else [], "tokens": seen[-1].tokens,
    }))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "code").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "code" / "mine.py").write_text(MINE)
    yield tmp_path
    assert not peers_of(tmp_path), "a peer was left behind"


def script(place: Path, on_step: str, *settings: str, frame: bool = False) -> subprocess.Popen[str]:
    """Started in another directory than that of its modules."""
    text = SCRIPT.replace("STEPS", on_step).replace("FRAME", str(frame))
    (place / "code" / "script.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, str(place / "code" / "script.py"), str(place / "runs"), *settings],
        cwd=place / "elsewhere",
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def peers_of(place: Path) -> list[int]:
    """Living processes of the run in `place`."""
    living = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(place) in (entry / "environ").read_text(errors="replace"):
                if b"shoal.launcher.peer" in (entry / "cmdline").read_bytes():
                    living.append(int(entry.name))
        except OSError:
            continue
    return living


COLLECT = """import threading
    threads = True
    def on_step(step):
        nonlocal threads
        seen.append(step)
        threads = threads and threading.current_thread() is threading.main_thread()"""


def test_a_script_trains_its_own_sequential_on_its_own_dataset_with_callbacks(place: Path) -> None:
    pytest.importorskip("pandas")
    process = script(place, COLLECT, frame=True)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["seen"] == list(range(1, 9)) and result["commits"] == 8
    assert result["thread"] is True, "callbacks run in the caller's thread"
    assert result["balanced"] and result["tokens"] == 8 * 8 * 8
    assert result["losses"][-1] < result["losses"][0], "it learns"
    assert result["loss"] < result["losses"][0], "the checkpoint's model has the trained weights"
    assert "loss" in result["columns"] and "gradient_norm" in result["columns"]


def test_an_exception_in_a_callback_ends_the_run_with_a_checkpoint_and_is_raised(place: Path) -> None:
    failing = """
    threads = True
    def on_step(step):
        if step.step == 2:
            raise KeyError("mine")"""
    process = script(place, failing.strip(), "run.steps=100000")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 1 and "KeyError: 'mine'" in err, out + err
    summary = json.loads((place / "runs/mine/summary.json").read_text())
    assert "a callback failed" in summary["reason"] and summary["saved"] >= 2


def test_ctrl_c_saves_ends_and_leaves_nothing_behind(place: Path) -> None:
    first = """
    threads = True
    def on_step(step):
        print("step", step.step, flush=True)"""
    process = script(place, first.strip(), "run.steps=100000")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode != 0 and "KeyboardInterrupt" in err, out + err
    summary = json.loads((place / "runs/mine/summary.json").read_text())
    assert summary["saved"] >= 1
