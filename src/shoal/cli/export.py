"""`shoal export CHECKPOINT --adapter DIR | --merge DIR`: what training of adapters made, for every other program.

--adapter writes a directory that PEFT loads beside the same base model; --merge adds the adapters to the base model's weights and
writes a Hugging Face model directory. Neither needs the run to be over. DIR may be any fsspec URL, to which the directory is uploaded.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.launcher.files import saved
from shoal.model import remote
from shoal.runtime.checkpoints import marker

if TYPE_CHECKING:
    from shoal.config import Config


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a checkpoint directory, or that of a run, for its newest checkpoint")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--adapter", metavar="DIR|URL", help="write the adapters alone, as PEFT loads them")
    target.add_argument(
        "--merge", metavar="DIR|URL", help="write the base model with the adapters added to its weights"
    )
    parser.add_argument("--base", metavar="DIR", help="where the base model lies now, if not where training read it")


def main(args: argparse.Namespace) -> int:
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    source, target = saved.checkpoint(args.checkpoint), args.adapter or args.merge
    if not (source / marker.MARKER).is_file():
        raise ValueError(f"{source} was not written by shoal, which would export it: it has no {marker.MARKER}")
    config = saved.adapted(source, args.base)
    try:
        storage, place = fsspec.core.url_to_fs(target)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{target}: {error}") from error
    if storage.exists(place) and (not storage.isdir(place) or storage.ls(place)):
        raise ValueError(f"{target} is there already and not empty; name a new directory")
    write = write_adapter if args.adapter else merge
    with contextlib.redirect_stdout(sys.stderr):
        if isinstance(storage, LocalFileSystem):
            write(source, config, Path(place))
        else:
            with tempfile.TemporaryDirectory(prefix="shoal-export-") as here:
                write(source, config, Path(here) / "whole")
                storage.put(f"{here}/whole/", f"{place}/", recursive=True)
    print(f"{source.name}: {'adapters' if args.adapter else 'the merged model'} written to {target}")
    return 0


def write_adapter(source: Path, config: Config, target: Path) -> None:
    """See model/adapters.write. ValueError: a shard of the checkpoint is not here."""
    from safetensors import safe_open

    from shoal.model.families import hf_config
    from shoal.model.layers import adapters
    from shoal.model.stages import on_meta
    from shoal.model.weights import shard_of

    tensors = {}
    for name, shard in shard_of(str(source)).items():
        with safe_open(source / shard, framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as draft:  # a stopped export leaves nothing
        adapters.write(on_meta(hf_config(config)), config, tensors, draft)
        _reveal(Path(draft), source, target)


def merge(source: Path, config: Config, target: Path) -> None:
    """The whole model, in the dtype of its files, takes its size of memory here."""
    import transformers

    from shoal.model.families import (
        hf_config,
    )  # before PEFT: it keeps torchao from logging which GPU libraries do not load

    from peft import PeftModel  # isort: skip

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as draft:
        adapter, merged = Path(draft) / "adapter", Path(draft) / "merged"
        write_adapter(source, config, adapter)
        remote.report_to(print)
        remote.complete(config.model.path)
        base = transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype="auto", use_safetensors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of PEFT's use of transformers
            whole = PeftModel.from_pretrained(base, adapter).merge_and_unload()
        whole.config.tie_word_embeddings = getattr(
            hf_config(config), "tie_word_embeddings", False
        )  # tuned apart, they stay apart
        whole.save_pretrained(merged)
        _reveal(merged, source, target)


def _reveal(draft: Path, source: Path, target: Path) -> None:
    for name in remote.TOKENIZER:
        if (source / name).is_file():
            shutil.copy(source / name, draft / name)
    if target.exists():
        target.rmdir()
    shutil.copytree(draft, target)
