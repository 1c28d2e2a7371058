"""Decorators for inner loops: numba compiles them once per machine and keeps the code beside the file, or in the user's cache.

Importing numba takes half a second, so whoever needs a compiled module imports it inside the function that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])
compiled = cast(Callable[[F], F], numba.njit(cache=True))
# Without the GIL and without a check for division by zero, which would keep a loop from being vectorised.
kernel = cast(Callable[[F], F], numba.njit(cache=True, nogil=True, error_model="numpy"))
