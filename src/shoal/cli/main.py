"""The `shoal` program: which command was meant, and what becomes of its errors.

Every command is a module of this package, named in COMMANDS and imported only when it is called (`shoal --help` imports
none of them), with two functions:

    arguments(parser: argparse.ArgumentParser) -> None     declares its arguments
    main(args: argparse.Namespace) -> int                  does it; the result is the exit code

Heavy imports (torch, transformers, hivemind) belong inside `main`. What the user can mend is raised as ValueError, or
is an OSError that names a file: one line, or a list of them. Anything else is our mistake and is shown in full. exit_codes.py has the
codes.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from shoal.escaping import listed
from shoal.exit_codes import ExitCode

COMMANDS = {
    "demo": "train a small model with six local peers; nothing to download, no files needed",
    "run": "train: start local peers from a configuration and show their progress",
    "train": "train a whole model on this machine alone, even one larger than its device's memory",
    "config": "print the whole effective configuration, each setting described",
    "init": "write a configuration file to edit",
    "doctor": "check whether this machine is fit to take part, and in the run of an invite; say what to do",
    "invite": "make a signed, expiring invite to a run; list and renew them",
    "revoke": "revoke an invite or a peer of a run",
    "join": "take part in a run with an invite",
    "launch": "keep peers in a run on other machines, by SSH, Slurm or Ray",
    "status": "show the state of a run",
    "leaderboard": "show who contributed what to a run",
    "watch": "show a run as a live page in the browser, and its metrics to Prometheus",
    "export": "write a run's adapters for PEFT, or merged into their base model",
    "eval": "measure the loss and perplexity of a checkpoint on held-out text",
    "generate": "continue a text, with a checkpoint or through the peers of a living run",
    "chat": "talk with a model by its chat template, with a checkpoint or through the peers of a living run",
    "serve": "serve a checkpoint by peers of which each holds a stage, to `shoal generate` and `shoal chat`",
    "probe": "measure this machine, or the links between the peers of a run, for `shoal plan`",
    "plan": "choose how to run a model on given machines; predict its speed and what limits it",
    "forecast": "simulate hours of a run on machines that come and go: tokens, cost, where the time goes, how sure that is",
    "chaos": "inject faults into a run: kill, stop and slow peers, cut links; on a schedule, at random or from a spot record",
    "recover": "let the survivors continue when most peers of a run are lost for good",
    "simulate": "simulate a whole swarm and its faults in virtual time",
    "replay": "repeat every decision of a recorded run from its trace and compare",
    "completion": "print the completion script of a shell",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Never raises for what a user can mend."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _call(words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe (head, less) has closed it: nothing can be printed
        sys.stderr.close()
        return ExitCode.INTERRUPTED
    except (ValueError, OSError) as error:
        if "--traceback" in words:
            raise
        print(f"shoal: {listed(error)}", file=sys.stderr)
        return ExitCode.USER_ERROR


def _call(words: list[str]) -> int:
    name = next((word for word in words if not word.startswith("-")), None)
    if name not in COMMANDS:
        parser = _parser()
        parser.parse_args(words)  # prints help, the version or what is wrong, and leaves
        parser.print_help()
        return ExitCode.USER_ERROR
    words.remove(name)
    module = command(name)
    parser = argparse.ArgumentParser(f"shoal {name}", description=COMMANDS[name])
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    module.arguments(parser)
    # Settings (a.b=c) and options may come in any order, as in `shoal run my.toml --resume run.steps=5`.
    code: int = module.main(parser.parse_intermixed_args(words))
    return code


def command(name: str) -> ModuleType:
    return importlib.import_module(f"shoal.cli.{name}")


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "shoal",
        description="Train language models on a changing swarm of peers; every sample counts once.",
        epilog=f"commands:\n{listing}\n\n`shoal COMMAND --help` tells more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="shoal COMMAND [...]",
    )
    parser.add_argument("--version", action="version", version=f"shoal {_version()}")
    parser.add_argument("command", nargs="?", choices=list(COMMANDS), metavar="COMMAND", help="one of those below")
    return parser


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("shoal")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
