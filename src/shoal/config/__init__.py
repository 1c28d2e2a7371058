"""The one typed tree of a run's configuration, shared by TOML files, `a.b=c` arguments and Python.

A module per section, named after its owner, holds the section's settings, their bounds and descriptions, and the checks that
concern it; tree.py composes them, reading.py reads and refuses, printing.py prints, describe.py knows every setting, derived.py what
follows from several. Why they do not stand in their owners' packages: docs/design/2026-11-22-settings.md.
"""

from shoal.config.derived import (
    ROUND_COPIES,
    boundary_rows,
    inflight,
    local_batch,
    masked,
    narrow_store,
    paired,
    settings,
    slices,
    token_rows,
    tokens_per_step,
)
from shoal.config.printing import quoted, text
from shoal.config.reading import from_tree, load, overridden, validate
from shoal.config.sections.checkpoint import Checkpoint
from shoal.config.sections.data import Data
from shoal.config.sections.device import Device
from shoal.config.sections.eval import Eval
from shoal.config.sections.model import Model
from shoal.config.sections.network import Network
from shoal.config.sections.plan import Plan
from shoal.config.sections.run import Run
from shoal.config.sections.train import Train, microbatches
from shoal.config.sections.tune import Tune
from shoal.config.tree import Config, to_tree

__all__ = [
    "ROUND_COPIES",
    "Checkpoint",
    "Config",
    "Data",
    "Device",
    "Eval",
    "Model",
    "Network",
    "Plan",
    "Run",
    "Train",
    "Tune",
    "boundary_rows",
    "from_tree",
    "inflight",
    "load",
    "local_batch",
    "masked",
    "microbatches",
    "narrow_store",
    "overridden",
    "paired",
    "quoted",
    "settings",
    "slices",
    "text",
    "to_tree",
    "token_rows",
    "tokens_per_step",
    "validate",
]
