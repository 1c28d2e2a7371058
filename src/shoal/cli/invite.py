"""`shoal invite CONFIG`: a signed, expiring text that lets one more machine take part in a run that is being trained here."""

from __future__ import annotations

import argparse
import time

import msgspec

from shoal import config as configuration
from shoal import units
from shoal.cli import rundir


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="the TOML file of the run")
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings given to `shoal run`, such as run.name")
    parser.add_argument(
        "--for", dest="lifetime", default="7 d", metavar="TIME", help='how long it is good, such as "12 h"'
    )


def main(args: argparse.Namespace) -> int:
    from shoal import build
    from shoal.transport.invite import Authority

    lifetime_s = units.parse(args.lifetime, "_s")
    if lifetime_s <= 0:
        raise ValueError(f"--for {args.lifetime!r} is over already; try '7 d'")
    directory = rundir.place(configuration.load(args.config, args.settings))
    config = configuration.load(directory / "config.toml") if (directory / "config.toml").exists() else None
    bootstrap = directory / "bootstrap.json"
    if config is None or not bootstrap.exists():
        raise ValueError(f"{directory}: no run has been started there; start it with: shoal run {args.config}")
    addresses = msgspec.json.decode(bootstrap.read_bytes(), type=tuple[str, ...])
    if not addresses:
        raise ValueError(
            f"{directory}: none of the run's peers listens (any more); start it with: shoal run {args.config}"
        )
    if config.device.executor != "emulated":
        data = msgspec.structs.replace(config.data, digest=build.data(config).digest)
        config = msgspec.structs.replace(config, data=data)  # so that no machine trains on other text
    authority = Authority.load(directory / "authority.key")
    print(authority.invite(addresses, time.time() + lifetime_s, config.run.name, build.shared(config)))
    return 0
