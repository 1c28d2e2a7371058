"""`shoal launch POOL RUN`: keep N peers in a run on other machines, and replace those that die.

RUN is a configuration, whose run then begins with one peer on this machine (launcher/pools/founder.py), or the invite to a run that
somebody has begun. Ctrl-C drains all peers; a launcher that is killed leaves run and peers as they are, and the same command takes over.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal import guest
from shoal.exit_codes import ExitCode
from shoal.launcher.invite_text import INVITE_VARIABLE, invite_text, without_invite
from shoal.launcher.pools import notice
from shoal.launcher.pools.founder import Founder
from shoal.launcher.pools.pool import Keeper, Peers, Pool

POOLS = ("local", "ssh", "slurm", "ray")
RUN_CHARS = 12  # of a run's id, in names of files, jobs and actors
FOUNDERS = ("network.host", "network.port", "run.dir")  # settings that are this machine's alone


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", choices=POOLS, metavar="POOL", help=f"where the peers run: {', '.join(POOLS)}")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG | @FILE | - | a.b=c",
        help=f"a TOML file, to begin its run with one peer on this machine; or the file with an invite, - to pipe it in, else"
        f" {INVITE_VARIABLE}. Then settings, which `shoal join` gets, too, where they are a machine's",
    )
    parser.add_argument(
        "--peers", type=int, metavar="N", help="keep N peers in the run (ssh: one for each host; else 1)"
    )
    parser.add_argument(
        "--files", metavar="DIR", help="a directory of the machines, below which the run may read files"
    )
    parser.add_argument("--shoal", metavar="COMMAND", help="what `shoal` is called on the machines")
    parser.add_argument("--hosts", metavar="FILE", help="ssh: hosts with commas between, or a file with one a line")
    parser.add_argument("--ssh", default="ssh", metavar="COMMAND", help="ssh: the command, with options")
    parser.add_argument(
        "--sbatch", default="", metavar="OPTIONS", help="slurm: more of sbatch's, such as '-p spot -G 1'"
    )
    parser.add_argument("--ray", default="", metavar="HOST:PORT", help="ray: the cluster (RAY_ADDRESS; this machine's)")
    parser.add_argument("--cpus", type=float, default=1, metavar="N", help="ray: cores for each peer (1)")
    parser.add_argument("--gpus", type=float, default=0, metavar="N", help="ray: GPUs for each peer (0)")
    parser.add_argument(
        "--notice", choices=notice.CLOUDS, default="", help="leave when this cloud says that it takes the machine away"
    )
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)  # number of the first peer


def main(args: argparse.Namespace) -> int:
    settings, hosts, say = without_invite(args.words), _hosts(args), _teller()
    count = args.peers if args.peers is not None else max(1, len(hosts))
    if count < 1:
        raise ValueError(f"--peers {count}: at least one takes part")
    if args.pool == "ray":
        _connect_ray(args)  # before a run begins
    config = _config(args.words, settings)
    founder = Founder(config, settings) if config else None
    text = invite_text(args.words) if founder is None else _found(founder, count, say)
    if founder is not None and not text:
        return founder.outcome()
    pool = _pool(args, _peers(args, text, settings, founder is not None), hosts)
    keeper = Keeper(pool, range(args.first, args.first + count), say)
    own_notice = notice.reader(args.notice if args.pool == "local" else "")
    code = keeper.run(own_notice, _founders_end(founder, say))
    return code if founder is None else _with_account(founder, code)


def _config(words: Sequence[str], settings: Sequence[str]) -> str:
    """The file that is named as a configuration; '' for an invite."""
    names = [word for word in words if word not in settings and not word.startswith("@")]
    return names[0] if len(names) == 1 and Path(names[0]).is_file() else ""


def _with_account(founder: Founder, code: int) -> int:
    """Print it once the founder has ended, too."""
    if code == ExitCode.OK:
        return founder.outcome()
    founder.end()
    founder.outcome()
    return code


def _hosts(args: argparse.Namespace) -> list[str]:
    from shoal.launcher.pools.ssh import read_hosts

    if args.pool != "ssh":
        return []
    if args.hosts is None:
        raise ValueError("shoal launch ssh needs --hosts FILE, with one host a line")
    return read_hosts(args.hosts)


def _found(founder: Founder, count: int, say: Callable[[str], None]) -> str:
    """An invite to the run of a configuration, which begins unless it lives; '' when it has ended."""
    if founder.lives and founder.invite:
        say(f"{founder.directory} is being trained: this launcher takes over its peers")
        return founder.invite
    say(f"the run begins with one peer on this machine; its output is in {founder.log}")
    # Replaced peers count until the run has noticed that they are dead.
    return founder.start(2 * count + 16)


def _peers(args: argparse.Namespace, text: str, settings: Sequence[str], founded: bool) -> Peers:
    from shoal.transport.identity.invite import read_invite

    invite = read_invite(text, 0.0)
    names = {setting: setting.partition("=")[0] for setting in settings}
    ours = [each for each, name in names.items() if not founded or (name in guest.ADAPTABLE and name not in FOUNDERS)]
    bases = [each.partition("=")[2] for each, name in names.items() if name == "run.dir"]
    # Of ray: the Python of each actor, which may lie elsewhere on each machine.
    there = {"ssh": "shoal", "ray": ""}.get(args.pool, shlex.join((sys.executable, "-m", "shoal.cli.main")))
    return Peers(
        run=invite.run[:RUN_CHARS],
        invite=text.strip(),
        shoal=tuple(shlex.split(args.shoal or there)),
        words=(
            *(each for each in ours if names[each] != "run.dir"),
            *(("--files", args.files) if args.files else ()),
        ),
        base=bases[-1] if bases else "runs",
        notice=args.notice,
    )


def _pool(args: argparse.Namespace, peers: Peers, hosts: Sequence[str]) -> Pool:
    match args.pool:
        case "ssh":
            from shoal.launcher.pools.ssh import SshPool

            return SshPool(peers, hosts, shlex.split(args.ssh))
        case "slurm":
            from shoal.launcher.pools.slurm import SlurmPool

            return SlurmPool(peers, shlex.split(args.sbatch))
        case "ray":
            from shoal.launcher.pools.ray_actors import RayPool

            return RayPool(peers, args.cpus, args.gpus)
    from shoal.launcher.pools.local import LocalPool

    return LocalPool(peers)


def _connect_ray(args: argparse.Namespace) -> None:
    """ValueError: Ray is not installed, no cluster answers, or what a peer gets of it is not a number of cores or GPUs."""
    if args.cpus < 0 or args.gpus < 0 or args.cpus + args.gpus == 0:
        raise ValueError(
            f"--cpus {args.cpus:g} --gpus {args.gpus:g}: a peer needs cores or GPUs, and never fewer than 0"
        )
    try:
        from shoal.launcher.pools.ray_actors import connect
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ValueError("shoal launch ray needs Ray, here and on every machine: pip install 'shoal[ray]'") from None
    connect(args.ray)


def _teller() -> Callable[[str], None]:
    began_s = time.monotonic()

    def say(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began_s), 60)
        print(f"{minutes}:{seconds:02}  {text}", flush=True)

    return say


def _founders_end(founder: Founder | None, say: Callable[[str], None]) -> Callable[[], None]:
    """Says once that the founder has ended before the run."""
    said = founder is None

    def look() -> None:
        nonlocal said
        if not said and founder is not None and founder.failed:
            said = True
            say(f"the founder has ended, the peers go on without it: {founder.last_words()}")

    return look
