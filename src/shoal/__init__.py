"""Shoal trains large models on machines nobody would choose for it.

    import shoal
    trained = shoal.run("my.toml", "run.steps=100", model=my_model.build, on_step=print)
    trained.frame().loss.plot()

Names are imported when they are first used, so that `import shoal` takes no time and no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.api.deciding import forecast as forecast
    from shoal.api.deciding import plan as plan
    from shoal.api.deciding import simulate as simulate
    from shoal.api.evaluating import Evaluation as Evaluation
    from shoal.api.evaluating import evaluate as evaluate
    from shoal.api.results import Checkpoint as Checkpoint
    from shoal.api.results import Run as Run
    from shoal.api.results import Step as Step
    from shoal.api.running import RunFailed as RunFailed
    from shoal.api.running import run as run
    from shoal.config import Config as Config
    from shoal.dashboard.account import HeldOut as HeldOut

_MODULES = {
    "Checkpoint": "shoal.api.results",
    "Config": "shoal.config",
    "Evaluation": "shoal.api.evaluating",
    "HeldOut": "shoal.dashboard.account",
    "Run": "shoal.api.results",
    "RunFailed": "shoal.api.running",
    "Step": "shoal.api.results",
    "evaluate": "shoal.api.evaluating",
    "forecast": "shoal.api.deciding",
    "plan": "shoal.api.deciding",
    "run": "shoal.api.running",
    "simulate": "shoal.api.deciding",
}
__all__ = [
    "Checkpoint",
    "Config",
    "Evaluation",
    "HeldOut",
    "Run",
    "RunFailed",
    "Step",
    "evaluate",
    "forecast",
    "plan",
    "run",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
