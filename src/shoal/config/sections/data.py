"""[data]: where samples come from. runtime/data reads it, and finds out whether the text is there."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal import importing
from shoal.config.section import Section, without_effect
from shoal.config.sections.plan import Plan
from shoal.config.sections.train import Train

_PATH_OF = {"text": "file, directory or glob", "jsonl": "file, directory or glob", "huggingface": "data set"}


class Data(Section, frozen=True):
    """Where samples come from. Sample i is the same whatever the number of peers."""

    source: Annotated[
        Literal["python", "text", "jsonl", "huggingface", "dataset"],
        Meta(
            description="Samples are read from this kind of source; python is the text of Python's own library, dataset is"
            " data.factory's."
        ),
    ] = "python"
    path: Annotated[
        str,
        Meta(description="This names the file, directory or glob of text and jsonl, or the data set of huggingface."),
    ] = ""
    format: Annotated[
        Literal["text", "chat", "prompt", "preference"],
        Meta(
            description="Rows are text, chats (the assistant's tokens count), prompts (the completion counts), or pairs for DPO."
        ),
    ] = "text"
    field: Annotated[
        str,
        Meta(
            description='The text or chat stands in this field of a JSON line or column of a data set; "" is text or messages.'
        ),
    ] = ""
    packing: Annotated[
        bool,
        Meta(description="A sample holds as many whole chats or prompts as fit in it, in order, and not just one."),
    ] = False
    wrong_rows: Annotated[
        Literal["refuse", "skip"],
        Meta(
            description="A row that cannot be trained on ends the run before it starts, or is skipped with a warning."
        ),
    ] = "refuse"
    weights: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1e6)]],
        Meta(
            description="Samples come in these proportions from the files below these names in data.path, such as {chats = 3, code = 1};"
            " {} is all files as one corpus."
        ),
    ] = {}
    factory: Annotated[
        str,
        Meta(
            description='This function of yours, such as "my_data:samples", returns the data set: len() samples of data.sequence + 1 ids.'
        ),
    ] = ""
    split: Annotated[str, Meta(description="This split of a Hugging Face data set is read.")] = "train"
    tokenizer: Annotated[
        str, Meta(description="Text becomes tokens by this Hugging Face tokenizer, or by bytes, one token each.")
    ] = "bytes"
    sequence: Annotated[
        int,
        Meta(ge=1, le=2**20, description="A sample has this many tokens; each of the two rows of a preference pair."),
    ] = 128
    document_end: Annotated[
        int,
        Meta(
            ge=-1, le=2**24, description="Documents end with this token and do not attend to one another; -1 lets them."
        ),
    ] = -1
    root: Annotated[
        str, Meta(description="Files are read only below this directory; `shoal join --files` sets it.")
    ] = ""
    digest: Annotated[
        str,
        Meta(description='The data must have a SHA-256 that begins so, or may be anything for ""; an invite sets it.'),
    ] = ""


def implied(data: Data, named: Collection[str], model_path: str) -> Data:
    """With what follows from data.format where it is not `named`: rows come from JSON lines, and a chat is written by the tokenizer of the
    model that is tuned."""
    if data.format == "text":
        return data
    changes: dict[str, str] = {} if "source" in named else {"source": "jsonl"}
    if data.format == "chat" and model_path and "tokenizer" not in named:
        changes["tokenizer"] = model_path
    return msgspec.structs.replace(data, **changes)


def field_of(data: Data) -> str:
    """The field that a row is read from."""
    return data.field or {"text": "text", "chat": "messages"}.get(data.format, "prompt")


def paired(data: Data) -> bool:
    """A sample is a preference pair, which is compared with what the frozen base says of it."""
    return data.format == "preference"


def token_rows(data: Data) -> int:
    """Rows of tokens in a sample: a pair has a chosen and a rejected one."""
    return 2 if paired(data) else 1


def boundary_rows(data: Data) -> int:
    """Rows of a boundary tensor for a sample: of a pair those of the reference follow."""
    return 2 * token_rows(data) if paired(data) else 1


def problems(data: Data, train: Train, plan: Plan) -> Iterator[str]:
    if data.source == "dataset" and importing.malformed(data.factory):
        yield f'data.factory = {data.factory!r} names no function; write "module:function", such as "my_data:samples"'
    if data.source in _PATH_OF and not data.path:
        yield f"data.path is empty, but data.source = {data.source!r} reads it; name a {_PATH_OF[data.source]}"
    if data.weights and data.source not in ("text", "jsonl"):
        yield f"data.weights names files, and data.source = {data.source!r} has none to choose from; try data.weights={{}}"
    if data.format == "text":
        yield from without_effect(data, "data", ["packing"], "text is always packed")
    else:
        yield from _row_problems(data, train, plan)
    ignored = {
        "python": ["path", "field", "split", "factory"],
        "text": ["field", "split", "factory"],
        "jsonl": ["split", "factory"],
        "huggingface": ["factory"],
        "dataset": ["path", "field", "split", "tokenizer"],
    }
    yield from without_effect(data, "data", ignored[data.source], f"data.source = {data.source!r} does not read it")


def _row_problems(data: Data, train: Train, plan: Plan) -> Iterator[str]:
    """Of formats whose rows are more than text."""
    what = f"data.format = {data.format!r}"
    if data.source not in ("jsonl", "huggingface"):
        yield f"{what} reads rows, and data.source = {data.source!r} has none; try data.source=jsonl"
    if data.format == "chat" and data.tokenizer == "bytes":
        yield (
            f"{what} needs a tokenizer with a chat template; set data.tokenizer to a Hugging Face tokenizer, or model.path to a model"
            " that has one"
        )
    if data.format == "prompt":
        yield from without_effect(data, "data", ["field"], f"{what} reads the fields prompt and completion")
    if paired(data):
        yield from without_effect(data, "data", ["field"], f"{what} reads the fields prompt, chosen and rejected")
        why = "each answer of a preference pair is a row of its own"
        yield from without_effect(data, "data", ["packing", "document_end"], why)
    elif data.packing and data.source == "huggingface":
        yield "data.packing = true reads whole files, and data.source = 'huggingface' is streamed; try data.packing=false"
    if train.local_steps > 1 or "local_steps" in plan.allow:
        yield (
            f"{what} counts some tokens only, and the mean over those of all peers is not known in local steps;"
            " try train.local_steps=1 and no local_steps in plan.allow"
        )
