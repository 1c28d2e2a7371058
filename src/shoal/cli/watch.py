"""`shoal watch [RUN]`: a run as a live page in the browser, and its metrics for Prometheus. Looks at a run's directory; changes nothing.

dashboard/page serves it. Also of a run that has ended or died.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.launcher.files.standing import directory_of
from shoal.launcher.watching import page
from shoal.launcher.watching.reader import RunReader

if TYPE_CHECKING:
    import uvicorn

PORT = 7425
TOKEN = "page.token"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", default="runs", help="the run's directory or its TOML file; else the newest in runs/"
    )
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings given to `shoal run`, such as run.name")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="listen there, such as 0.0.0.0 for other machines, which need the token in the printed address (default %(default)s)",
    )
    parser.add_argument("--port", type=int, help=f"default {PORT}, or any free port where that is in use")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # ends with that process: `shoal run --page`


def main(args: argparse.Namespace) -> int:
    import asyncio

    page.require()
    directory = directory_of(args.run, args.settings)
    server, address = server_of(directory, args.host, args.port)
    print(f"{directory} is shown at {address}; Ctrl-C ends this, not the run", flush=True)
    asyncio.run(_serve(*server, args.parent))
    return 0


def server_of(directory: Path, host: str, port: int | None) -> tuple[tuple[uvicorn.Server, socket.socket], str]:
    """What serves the page, and the address to open."""
    import uvicorn

    from shoal.dashboard.page.app import application

    reader = RunReader(directory)
    reader.read()  # what is wrong with the directory is said here
    local = is_loopback(host)
    token = "" if local else token_of(directory)
    hosts = ["localhost", "127.0.0.1", "[::1]", host] if local else ["*"]
    app = application(reader.read, lambda: reader.series, token=token, hosts=hosts)
    bound = _listen(host, port)
    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    name = f"[{host}]" if ":" in host else socket.gethostname() if host in ("0.0.0.0", "") else host
    return (
        uvicorn.Server(settings),
        bound,
    ), f"http://{name}:{bound.getsockname()[1]}/{f'?token={token}' if token else ''}"


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


async def _serve(server: uvicorn.Server, bound: socket.socket, parent: int | None) -> None:
    import asyncio

    serving = asyncio.create_task(server.serve([bound]))
    while parent is not None and not serving.done():
        await asyncio.wait([serving], timeout=1.0)
        server.should_exit = server.should_exit or os.getppid() != parent
    await serving


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (PORT, 0) if port is None else (port,):
        try:
            return socket.create_server((host, candidate), family=family)
        except OSError as error:
            reason = f"{host} port {candidate}: {error.strerror}"
    raise ValueError(f"{reason}; try another --port")


def token_of(directory: Path) -> str:
    """The page's secret: kept beside the run, so that its address stays the same."""
    path = directory / TOKEN
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(24))
    except FileExistsError:
        pass
    except OSError as error:
        print(f"{path}: {error.strerror}; the page's address holds a new token each time", file=sys.stderr)
        return secrets.token_urlsafe(24)
    token = path.read_text().strip()
    if not token:
        raise ValueError(f"{path} is empty; remove it to get a new token")
    return token
