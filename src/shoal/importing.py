"""Functions of the user that peers import by name, "module:function": where they are, what is wrong with them. Nothing is pickled.

For model.factory and data.factory. The launcher only locates the module (and gives its directory to the peers); peers import it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
HOW = "write the function to a file, such as my_model.py beside the script or notebook, and name it my_model:build"


def malformed(reference: str) -> bool:
    return _REFERENCE.fullmatch(reference) is None


def locate(reference: str, setting: str) -> Path:
    """The directory that has the module of "module:function" in it. The module is not imported. ValueError: there is none, and where
    it was looked for."""
    top = reference.partition(":")[0].partition(".")[0]
    places = [os.getcwd(), *sys.path]
    spec = PathFinder.find_spec(top, places)
    if spec is None and top not in ("__main__", "__mp_main__"):
        spec = importlib.util.find_spec(top)  # an editable installation has a finder of its own
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    origin = folders[0] if folders else spec.origin if spec is not None else None
    if origin is None:
        searched = ", ".join(dict.fromkeys(str(Path(place).absolute()) for place in places if Path(place).is_dir()))
        raise ValueError(f"{setting} = {reference!r}: no module {top!r} in {searched}; {HOW}")
    return Path(origin).absolute().parent


def load(reference: str, setting: str) -> Callable[..., Any]:
    """The function. ValueError: it cannot be imported, or is none."""
    module, _, name = reference.partition(":")
    if (directory := str(locate(reference, setting))) not in sys.path:
        sys.path.append(directory)
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        raise ValueError(f"{setting} = {reference!r}: importing {module} failed: {error!r}") from error
    function = getattr(imported, name, None)
    if not callable(function):
        kind = "has no such name" if function is None else f"{name} is a {type(function).__name__}, not a function"
        raise ValueError(f"{setting} = {reference!r}: {imported.__file__} {kind}; name a function without arguments")
    return function  # type: ignore[no-any-return]


def reference_to(function: object, setting: str) -> str:
    """ "module:function" for a function that peers can import. ValueError: a lambda, a local function, one of a notebook's cell."""
    if isinstance(function, str):
        return function
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not callable(function) or not name:
        raise ValueError(
            f'{setting}: a {type(function).__name__} is no function; give one, or its name "module:function"'
        )
    if "<lambda>" in name:
        raise ValueError(f"{setting}: peers are processes of their own and cannot import a lambda; {HOW}")
    if not name.isidentifier():
        raise ValueError(f"{setting}: peers cannot import {name}, which is inside another object; {HOW}")
    if module == "__main__":
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script is None or not Path(script).stem.isidentifier():
            where = "a notebook or an interactive session" if script is None else script
            raise ValueError(f"{setting}: peers cannot import {name} from {where}; {HOW} (in a notebook: %%writefile)")
        module = Path(script).stem
    return f"{module}:{name}"


def peers_path(references: list[str], inherited: str) -> str:
    """PYTHONPATH of peers that import these functions, "" for none."""
    directories = [str(locate(reference, "factory")) for reference in references if reference]
    kept = [directory for directory in dict.fromkeys(directories) if "site-packages" not in Path(directory).parts]
    return os.pathsep.join([*kept, *([inherited] if inherited else [])])
