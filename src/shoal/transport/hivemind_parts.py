"""hivemind's modules, imported late, one by one and in one place: for daemon.py and dht.py.

Its packages import all that they have, torch and an optimizer included: two seconds, 60 MB. Shoal uses the libp2p bindings and the
Kademlia table. So each name of a package is imported from its module when it is first asked for (`_OnDemand`), no torch is imported, and
a peer listens and is connected while another thread imports torch. hivemind's log of its own is taken away.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("hivemind", "hivemind.utils", "hivemind.dht")
_once = threading.Lock()


def load() -> None:
    """Import what every use needs, and undo what that does to the logs of the whole process."""
    with _once:
        if "hivemind.p2p" in sys.modules:
            return
        for name in PACKAGES:
            if name not in sys.modules:  # else the user's own code has imported all of it
                _on_demand(name)
        warning = logging.getLevelName(logging.WARNING)
        importlib.import_module("hivemind.utils.logging").use_hivemind_log_handler("nowhere")
        logging.addLevelName(logging.WARNING, warning)
        logging.getLogger("hivemind").setLevel(logging.ERROR)
        importlib.import_module("hivemind.dht.node")
        importlib.import_module("hivemind.p2p")


def hivemind(name: str) -> Any:
    """One of its modules."""
    load()
    return importlib.import_module(f"hivemind.{name}")


class _OnDemand(ModuleType):
    """A package of which each name is imported when it is first asked for."""

    sources: dict[str, tuple[str, str]]  # by name: the module that has it, and its name there

    def __getattr__(self, name: str) -> Any:
        if name not in self.sources:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, original = self.sources[name]
        value = getattr(importlib.import_module(module), original)
        setattr(self, name, value)
        return value


def _on_demand(name: str) -> None:
    """The package, without running its __init__, which only imports names from its modules."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _OnDemand
    assert isinstance(module, _OnDemand)
    module.sources = _sources(Path(spec.origin).read_text(encoding="utf-8"))
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)


def _sources(text: str) -> dict[str, tuple[str, str]]:
    """Where the __init__ of a package has its names from."""
    imports = [each for each in ast.parse(text).body if isinstance(each, ast.ImportFrom) and each.module]
    return {alias.asname or alias.name: (each.module or "", alias.name) for each in imports for alias in each.names}
