"""[data]: where samples come from. runtime/data reads it, and finds out whether the text is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from shoal import importing
from shoal.config.section import Section, without_effect

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
    field: Annotated[str, Meta(description="The text stands in this field of a JSON line or column of a data set.")] = (
        "text"
    )
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
    sequence: Annotated[int, Meta(ge=1, le=2**20, description="A sample has this many tokens.")] = 128
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
        str, Meta(description='The data must have this SHA-256, or may be anything for ""; an invite sets it.')
    ] = ""


def problems(data: Data) -> Iterator[str]:
    if data.source == "dataset" and importing.malformed(data.factory):
        yield f'data.factory = {data.factory!r} names no function; write "module:function", such as "my_data:samples"'
    if data.source in _PATH_OF and not data.path:
        yield f"data.path is empty, but data.source = {data.source!r} reads it; name a {_PATH_OF[data.source]}"
    ignored = {
        "python": ["path", "field", "split", "factory"],
        "text": ["field", "split", "factory"],
        "jsonl": ["split", "factory"],
        "huggingface": ["factory"],
        "dataset": ["path", "field", "split", "tokenizer"],
    }
    yield from without_effect(data, "data", ignored[data.source], f"data.source = {data.source!r} does not read it")
