"""What `shoal doctor` finds on this machine alone: Python and packages, device, memory, disk, cores, limits, ports, addresses, clock.

What a command would refuse is asked where it is decided (preflight.py, devices.py); here it becomes lines. Nothing is changed.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import ipaddress
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Sequence

from shoal import host
from shoal.config import Config
from shoal.launcher import devices, preflight
from shoal.launcher.doctor.finding import Finding, bad, good, graded, judged, skipped, warning
from shoal.transport import addresses
from shoal.transport.streams.admission import DESCRIPTOR_SHARE, MAX_ADMITTED
from shoal.transport.streams.carrier import CONGESTION
from shoal.units import size

GIB = float(1 << 30)
MEMORY = (GIB, 4 * GIB)  # a peer's process without its stage; with one of a few hundred million parameters
DISK = (GIB, 10 * GIB)
# A connection takes a descriptor, and at most this share of them is taken by connections (streams/admission.py).
DESCRIPTORS = (64 / DESCRIPTOR_SHARE, min(MAX_ADMITTED, 768) / DESCRIPTOR_SHARE)
_UNSYNCHRONIZED = 5  # TIME_ERROR of <sys/timex.h>


def checks(config: Config) -> Iterator[Finding]:
    yield python()
    yield packages()
    yield from device(config)
    yield memory(host.free_bytes())
    yield from disk(config)
    yield processor(devices.cores(), os.getloadavg()[0])
    yield descriptors()
    yield from ports(config)
    yield own_addresses((*addresses.usable(socket.AF_INET), *addresses.usable(socket.AF_INET6)))
    yield clock(_clock_state())
    yield congestion(_has_bbr())


def python() -> Finding:
    detail = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if os.name != "posix":
        return bad("python", detail, "Shoal needs Linux or macOS")
    return good("python", detail)


def packages(name: str = "shoal") -> Finding:
    """Is what the package requires there, in a version that it allows?"""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return skipped("packages", f"{name} runs from files that are not installed, so nothing says what it requires")
    faults = []
    for requirement in required:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            faults.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            faults.append(f"{requirement.name} is {installed}, wanted {requirement.specifier}")
    if faults:
        return bad("packages", ", ".join(faults), f"pip install --upgrade {name}")
    return good("packages", f"{name} {version} and what it requires")


def device(config: Config) -> Iterator[Finding]:
    """Is the device there, and does it add two numbers? Imports torch."""
    if config.device.executor == "emulated":
        yield skipped("device", "device.executor = 'emulated' computes nothing")
        return
    if faults := list(preflight.device(config.device)):
        yield from (bad("device", fault) for fault in faults)
        return
    os.environ.update(devices.allocator(os.environ))
    try:
        import torch

        from shoal.executor import base, probe
    except (ImportError, OSError) as error:  # OSError: a library that its own needs
        yield bad("device", f"PyTorch cannot be imported: {error}", "install the build for this machine's device")
        return
    try:
        base.check_device(config)
        kind = base.device_of(config)
        works, free_bytes = base.alive(config), probe.memory_bytes(kind)[0]
        detail = f"PyTorch {torch.__version__} on {probe.device_name(kind)}"
    except (RuntimeError, ValueError) as error:
        yield bad("device", str(error), "check the driver, or choose device.kind=cpu")
        return
    if not works:
        yield bad("device", f"{detail} does not add two numbers", "restart the machine, or choose device.kind=cpu")
    elif kind.type == "cpu" and (drivers := devices.drivers()):
        advice = "install PyTorch's build for it, or leave it as it is to compute on the CPU"
        yield warning(
            "device", f"{detail}; the driver of a {' and a '.join(sorted(drivers))} device is not used", advice
        )
    else:
        yield good("device", detail)
    if kind.type != "cpu":
        yield graded("device memory", free_bytes, MEMORY, f"{size(free_bytes)} free", "end what else uses the device")


def memory(free_bytes: int | None) -> Finding:
    if free_bytes is None:
        return skipped("memory", "this system does not say how much is free")
    return graded(
        "memory", free_bytes, MEMORY, f"{size(free_bytes)} free", "end other programs, or use a larger machine"
    )


def disk(config: Config) -> Iterator[Finding]:
    place = next(each for each in (config.run.directory, *config.run.directory.absolute().parents) if each.exists())
    free_bytes = shutil.disk_usage(place).free
    detail = f"{size(free_bytes)} free in {place.absolute()}"
    if faults := list(preflight.room(config)):
        yield from (bad("disk", fault) for fault in faults)
    else:
        yield graded("disk", free_bytes, DISK, detail, "free some, or name another disk with run.dir")


def processor(cores: int, load: float) -> Finding:
    detail = f"{cores} core{'s' * (cores > 1)}, load average {load:.1f}"
    if load > cores:
        return warning("processor", detail, "other work slows every hop of this machine: end it, or start fewer peers")
    return good("processor", detail)


def descriptors(limits: tuple[int, int] | None = None) -> Finding:
    import resource

    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    amount = float("inf") if soft < 0 else soft
    allowed = "any number" if hard < 0 else str(hard)
    detail = f"{'no limit' if soft < 0 else soft} open at a time, {allowed} may be asked for"
    wanted = 4096 if hard < 0 else min(4096, hard)
    return graded("files", amount, DESCRIPTORS, detail, f"ulimit -n {wanted}, in the shell that starts Shoal")


def ports(config: Config) -> Iterator[Finding]:
    port = config.network.port
    detail = (
        f"TCP {port} is free" if port else "any free one (network.port = 0); a router that forwards needs a fixed one"
    )
    yield from judged("ports", preflight.address(config, port), detail)


def own_addresses(hosts: Sequence[str]) -> Finding:
    if not hosts:
        advice = "connect to a network; runs of this machine alone need none"
        return warning("addresses", "none that another machine could use", advice)
    public = [each for each in hosts if ipaddress.ip_address(each).is_global]
    known = f"{', '.join(hosts)}"
    return good(
        "addresses",
        f"{known}; {'public' if public else 'private: other networks reach it through a router, if at all'}",
    )


def clock(state: int | None) -> Finding:
    """`state`: of the kernel's clock; None: not known."""
    if state is None:
        return skipped("clock", "this system does not say whether its clock is kept right")
    if state == _UNSYNCHRONIZED:
        advice = (
            "let NTP set it (timedatectl set-ntp true): peers whose clocks differ by a minute do not find one another"
        )
        return warning("clock", "nothing keeps it right, as far as this system says", advice)
    return good("clock", "kept right by this system")


def congestion(has_bbr: bool | None) -> Finding:
    if has_bbr is None:
        return skipped("long lines", "this system does not let a program choose how TCP follows a line")
    if has_bbr:
        return good("long lines", "TCP with BBR")
    words = "sudo sysctl net.ipv4.tcp_allowed_congestion_control='reno cubic bbr', after sudo modprobe tcp_bbr"
    return warning(
        "long lines", "TCP without BBR: where 1 packet of 1,000 is lost, 100 ms away, 6 MB/s are left of 20", words
    )


def _has_bbr() -> bool | None:
    if not hasattr(socket, "TCP_CONGESTION"):
        return None
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)
        except OSError:
            return False
    return True


def _clock_state() -> int | None:
    try:
        return int(ctypes.CDLL(None).ntp_gettime(ctypes.create_string_buffer(256)))
    except (OSError, AttributeError):  # another libc
        return None
