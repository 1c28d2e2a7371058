"""A checkpoint's scores in the tasks of EleutherAI's lm-evaluation-harness, which every published model is measured with.

A thin adapter: the harness runs its own tasks on the model that Shoal loads (adapters in their base model). For `shoal eval --tasks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.api.generating import Local
from shoal.launcher.files import saved

MISSING = "lm-evaluation-harness is not installed: pip install 'shoal[lm-eval]'"


class Score(msgspec.Struct, frozen=True):
    """One metric of one task, as the harness names it: `acc`, `exact_match`. `error`: its standard error; None where it has none."""

    task: str
    metric: str
    value: float
    error: float | None
    samples: int


def scores(
    place: str | Path,
    tasks: Sequence[str],
    *,
    folder: str | Path | None = None,
    shots: int | None = None,
    samples: int = 0,
    base: str | None = None,
    device: str = "cpu",
    batch: int = 8,
) -> list[Score]:
    """The model of a run's newest checkpoint, a checkpoint, or any model directory, in each of the tasks.

    folder: with tasks of one's own, as the harness describes them in YAML. shots: examples before each question; None: as the task says.
    samples: at most so many of each task; 0 takes all. base: where the base model of adapters lies now. The whole model is on `device`.
    ValueError: the harness is not installed, an unknown task, no checkpoint, or a model that cannot be loaded."""
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ValueError(MISSING) from None
    manager = TaskManager(include_path=str(folder) if folder else None)
    if folder and not Path(folder).is_dir():
        raise ValueError(f"{folder}: no directory of tasks is there")
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ValueError(
            f"the harness knows no task {', '.join(unknown)}; `lm-eval ls tasks` lists its own, --tasks-in DIR adds others"
        )
    model = Local(saved.checkpoint(str(place)), base, device)
    found = lm_eval.simple_evaluate(
        HFLM(
            pretrained=model.model,
            tokenizer=model.tokenizer,
            device=device,
            batch_size=batch,
            prefix_token_id=_before_text(model.tokenizer),
        ),
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=shots,
        limit=samples or None,
        log_samples=False,
        bootstrap_iters=0 if samples == 1 else 1000,
    )
    return [score for task, results in sorted(found["results"].items()) for score in _scores(task, results)]


def _before_text(tokenizer: Any) -> int:
    """The token before a text without context. Bytes have neither end nor beginning: NUL stands between documents."""
    return next((each for each in (tokenizer.bos_token_id, tokenizer.eos_token_id) if each is not None), 0)


def _scores(task: str, results: dict[str, Any]) -> list[Score]:
    """The harness writes `acc,none` and `acc_stderr,none` for a metric and its filter."""
    made = []
    for name, value in results.items():
        metric, _, filtered = name.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = results.get(f"{metric}_stderr,{filtered}")
        shown = metric if filtered == "none" else f"{metric} ({filtered})"
        made.append(Score(task, shown, float(value), error if isinstance(error, float) else None, _count(results)))
    return made


def _count(results: dict[str, Any]) -> int:
    count = results.get("sample_len", 0)
    return int(count) if isinstance(count, int) else 0
