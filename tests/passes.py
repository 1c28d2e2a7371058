"""Counts how often the host goes over the bytes of a tensor on its way through a peer.

Every thread has a model of its core's second-level cache: 1 MiB of pages; the page used longest ago leaves. A page that is touched
and not in it comes from memory; so a fragment that is copied three times while it is in the cache counts once. Touched is what
PyTorch's operators read and write, what NumPy is given as a buffer, and what TLS and sockets copy. Besides, the bytes of all those
calls are counted, cached or not. The kernel's own copies and the stage's computing are left out.
"""

from __future__ import annotations

import ssl
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.numerics import pieces
from shoal.runtime.tasks.lane import Lane
from shoal.transport.streams.channel import Channel
from shoal.transport.streams.engine import Connection

PAGE = 4096
CACHE_PAGES = (1 << 20) // PAGE


class Passes:
    """`memory`: bytes that came from memory or went there; `calls`: bytes that the calls touched. By what touched them."""

    def __init__(self) -> None:
        self.memory: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.others: set[threading.Thread] = set()  # of other peers in this process
        self._local = threading.local()

    def clear(self) -> None:
        self.memory.clear()
        self.calls.clear()

    def touch(self, what: str, address: int, nbytes: int) -> None:
        """One pass over a buffer; `address` is any number for one that has none."""
        self.memory[what] += self.missed(address, nbytes)

    def missed(self, address: int, nbytes: int) -> int:
        """Bytes that are not in this thread's cache, and are from now on."""
        missed = 0
        cache: OrderedDict[int, None] = self._local.__dict__.setdefault("cache", OrderedDict())
        for page in range(address // PAGE, -(-(address + nbytes) // PAGE)):
            if page in cache:
                cache.move_to_end(page)
                continue
            missed += PAGE
            cache[page] = None
            if len(cache) > CACHE_PAGES:
                cache.popitem(last=False)
        return missed

    def buffer(self, what: str, data: Any, nbytes: int | None = None) -> None:
        view = memoryview(data).cast("B")[:nbytes]
        if view.nbytes:
            self.touch(what, _frombuffer(view, np.uint8).ctypes.data, view.nbytes)


_frombuffer = np.frombuffer


class Watch(TorchDispatchMode):
    """Shows the operators of this thread."""

    def __init__(self, passes: Passes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated by torch
        self._passes = passes

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func):
            tensors = {
                each.data_ptr(): each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)
            }
            self._passes.calls[str(func)] += max((each.nbytes for each in tensors.values()), default=0)
            missed = [self._passes.missed(address, each.nbytes) for address, each in tensors.items()]
            self._passes.memory[str(func)] += max(missed, default=0)  # reading one and writing another is one pass
        return result


class Counted:
    """Stands for an object, whose methods named in `methods` are counted: each gets the arguments and the result."""

    def __init__(self, whole: Any, **methods: Callable[..., None]) -> None:
        self._whole, self._methods = whole, methods

    def __getattr__(self, name: str) -> Any:
        method, counted = getattr(self._whole, name), self._methods.get(name)
        if counted is None:
            return method

        def call(*args: Any) -> Any:
            result = method(*args)
            counted(result, *args)
            return result

        return call


def watch_channels(monkeypatch: pytest.MonkeyPatch, counter: Passes, contexts: Container[ssl.SSLContext]) -> None:
    """TLS connections that are made from now on with one of `contexts`, those of the watched peer, show their copies."""
    construct = Channel.__init__

    def constructed(self: Channel, connection: Connection, context: ssl.SSLContext, server_side: bool) -> None:
        construct(self, connection, context, server_side)
        if context not in contexts:
            return
        number = 1 << 32  # of the buffers of this connection, which are used from their beginning again and again

        def seen(what: str, nbytes: int, buffer: int, data: Any = None) -> None:
            counter.calls[what] += nbytes
            counter.touch(what, number + buffer * (4 << 20), nbytes)
            if data is not None:
                counter.buffer(what, data, nbytes)

        self._sock = Counted(
            self._sock,
            recv_into=lambda got, data: seen("recv", got, 0),
            send=lambda sent, data: seen("send", sent, 3),
        )
        self._in = Counted(self._in, write=lambda got, data: seen("BIO in", len(data), 1))
        self._out = Counted(self._out, read=lambda data: seen("BIO out", len(data), 3))
        self._tls = Counted(
            self._tls,
            read=lambda got, most, data=None: seen("decrypt", got, 1, data) if data is not None else None,
            write=lambda written, data: seen("encrypt", len(data), 2, data),
        )

    monkeypatch.setattr(Channel, "__init__", constructed)


def watch_buffers(monkeypatch: pytest.MonkeyPatch, passes: Passes) -> None:
    """What NumPy and compiled loops are given to look at."""

    def frombuffer(data: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() not in passes.others:
            passes.calls["numpy"] += memoryview(data).nbytes
            passes.buffer("numpy", data)
        return _frombuffer(data, *args, **kwargs)

    each = pieces.each

    def compiled(work: Any, *columns: Any) -> Any:
        arrays = [[one for one in column if isinstance(one, np.ndarray)] for column in columns]
        missed = [sum(passes.missed(one.ctypes.data, one.nbytes) for one in column) for column in arrays]
        passes.memory["compiled"] += max(missed)
        passes.calls["compiled"] += max(sum(one.nbytes for one in column) for column in arrays)
        return each(work, *columns)

    monkeypatch.setattr(np, "frombuffer", frombuffer)
    monkeypatch.setattr(pieces, "each", compiled)


def watch_lanes(monkeypatch: pytest.MonkeyPatch, passes: Passes) -> None:
    construct = Lane.__init__

    def constructed(self: Lane, name: str, begin: Callable[[], None]) -> None:
        def watched() -> None:
            Watch(passes).__enter__()  # for as long as the thread lives
            begin()

        construct(self, name, watched)

    monkeypatch.setattr(Lane, "__init__", constructed)
