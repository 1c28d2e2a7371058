"""A model at a URL: a stage reads its own tensors alone, once on a machine; a broken line or another model harms nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send
from tests.runtime.test_node import TINY

from shoal import guest
from shoal.api import generating
from shoal.config import Config, to_tree
from shoal.model import remote, stages, weights

pytest.importorskip("aiohttp", reason="fsspec reads https with it: pip install 'shoal[http]'")
START_S = 30.0


class Server:
    """Serves a folder by HTTP with ranges, as slowly as it is told, and counts what it sends. `broken`: answers to break off."""

    def __init__(self, folder: Path) -> None:
        self.sent_bytes, self.broken, self.pause_s_per_byte = 0, 0, 0.0
        self._files = Starlette(routes=[Mount("/", StaticFiles(directory=folder))])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(self._serve, port=self.port, log_level="error", lifespan="off", interface="asgi3")
        )
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        until_s = time.monotonic() + START_S
        while not self._server.started and time.monotonic() < until_s:
            time.sleep(0.01)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        ranged = any(name == b"range" for name, _ in scope["headers"])
        breaks = ranged and self.broken > 0
        self.broken -= breaks

        async def count(message: dict[str, object]) -> None:
            body = message.get("body", b"")
            assert isinstance(body, bytes)
            self.sent_bytes += len(body)
            await asyncio.sleep(self.pause_s_per_byte * len(body))
            if breaks and body:
                raise ConnectionResetError("as if the line were cut")
            await send(message)

        await self._files(scope, receive, count)  # type: ignore[arg-type]

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in several shards."""
    whole = stages.whole(msgspec.structs.replace(TINY, run=msgspec.structs.replace(TINY.run, seed=3)))
    whole.save_pretrained(tmp_path / "there/model", max_shard_size="20KB")
    assert len(list((tmp_path / "there/model").glob("*.safetensors"))) > 2
    return tmp_path / "there/model"


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder.parent)
    yield server
    server.stop()


@pytest.fixture
def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/model"


def at(path: str, tmp_path: Path) -> Config:
    run = msgspec.structs.replace(TINY.run, dir=str(tmp_path / "runs"))
    return msgspec.structs.replace(TINY, run=run, model=msgspec.structs.replace(TINY.model, path=path))


def here(url: str, tmp_path: Path) -> Config:
    return remote.local(at(url, tmp_path), lambda text: None)


def values(config: Config, stage: int) -> dict[str, torch.Tensor]:
    return dict(stages.build(config, stage).named_parameters())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_said_of_reading_is_no_part_of_a_commands_output(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote.local(at(url, tmp_path))
    shown = capsys.readouterr()
    assert not shown.out and url in shown.err


@pytest.mark.parametrize("stage", range(2))
def test_a_stage_of_a_url_is_that_of_the_directory_and_reads_no_other_weights(
    url: str, server: Server, folder: Path, tmp_path: Path, stage: int
) -> None:
    config = here(url, tmp_path)
    server.sent_bytes = 0
    ours = values(config, stage)
    assert same(ours, values(at(str(folder), tmp_path), stage))
    own_bytes = sum(value.nbytes for value in ours.values())
    headers = 2 * sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors"))
    assert own_bytes <= server.sent_bytes <= own_bytes + headers
    assert own_bytes < 0.6 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_what_was_read_is_not_read_again(url: str, server: Server, folder: Path, tmp_path: Path) -> None:
    values(here(url, tmp_path), 1)
    server.stop()
    assert same(values(here(url, tmp_path), 1), values(at(str(folder), tmp_path), 1))


def test_several_peers_of_a_machine_read_each_tensor_once(url: str, server: Server, tmp_path: Path) -> None:
    config = here(url, tmp_path)
    server.sent_bytes = 0
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda _: values(config, 1), range(4)))
    assert all(same(each, read[0]) for each in read)
    assert server.sent_bytes < 1.5 * sum(value.nbytes for value in read[0].values())


def test_no_other_program_takes_a_part_for_the_model(url: str, folder: Path, tmp_path: Path) -> None:
    import transformers

    place = here(url, tmp_path).model.path
    values(here(url, tmp_path), 0)
    with pytest.raises(OSError, match=r"model-0000\d-of"):
        transformers.AutoModelForCausalLM.from_pretrained(place)
    remote.complete(place)
    whole = transformers.AutoModelForCausalLM.from_pretrained(place).state_dict()
    assert same(whole, transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())
    for file in folder.glob("*.safetensors"):
        assert (Path(place) / file.name).read_bytes() == file.read_bytes()


def test_a_model_in_one_file_is_read_in_parts_too(url: str, folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder)
    stages.whole(TINY).save_pretrained(folder)
    assert [file.name for file in folder.glob("*.safetensors")] == [remote.SINGLE]
    assert same(values(here(url, tmp_path), 1), values(at(str(folder), tmp_path), 1))
    assert not list(Path(here(url, tmp_path).model.path).glob("*.safetensors"))


def test_a_line_that_breaks_is_tried_again(
    url: str, server: Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = here(url, tmp_path)
    monkeypatch.setattr(remote.time, "sleep", lambda s: None)
    server.broken = remote.ATTEMPTS - 1
    assert same(values(config, 1), values(at(str(folder), tmp_path), 1))
    assert server.broken == 0


def test_a_line_that_stays_broken_is_told_and_what_was_read_stays(
    url: str, server: Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = here(url, tmp_path)
    monkeypatch.setattr(remote.time, "sleep", lambda s: None)
    values(config, 0)
    server.broken = 1000
    with pytest.raises(
        ValueError, match=r"http://127.0.0.1:\d+/model/model-0000\d-of-0000\d.safetensors cannot be read"
    ):
        values(config, 1)
    server.broken, before = 0, server.sent_bytes
    assert same(values(config, 0), values(at(str(folder), tmp_path), 0)) and server.sent_bytes == before
    assert same(values(config, 1), values(at(str(folder), tmp_path), 1))


def test_a_peer_that_ends_within_a_tensor_leaves_none_that_looks_whole(
    url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = here(url, tmp_path)
    monkeypatch.setattr(remote, "PART_BYTES", 64)
    part, read = remote._Files.part, list[int]()

    def ends(self: remote._Files, name: str, start: int, stop: int) -> bytes:
        read.append(start)
        if len(read) == 9:
            raise KeyboardInterrupt
        return part(self, name, start, stop)

    monkeypatch.setattr(remote._Files, "part", ends)
    with pytest.raises(KeyboardInterrupt):
        values(config, 1)
    monkeypatch.setattr(remote._Files, "part", part)
    monkeypatch.setattr(remote, "PART_BYTES", 1 << 20)
    assert same(values(config, 1), values(at(str(folder), tmp_path), 1))


@pytest.mark.parametrize("begun", [False, True])
def test_another_model_at_the_same_url_is_refused(url: str, folder: Path, tmp_path: Path, begun: bool) -> None:
    config = here(url, tmp_path)
    if begun:
        values(config, 1)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes() + bytes(8))
    with pytest.raises(ValueError, match=r"the model there is another by now\. To read that one: delete "):
        values(config, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json; give the URL of a directory with"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "safetensors; weights must be safetensors"),
        (lambda folder: (folder / weights.INDEX).write_text("[]"), "is no index of weights"),
        (
            lambda folder: (folder / weights.INDEX).write_text(json.dumps({"weight_map": {"a": "../../a"}})),
            "names '../../a', which is no file of that directory",
        ),
    ],
)
def test_what_is_no_model_is_refused_before_anything_is_kept(
    url: str, folder: Path, tmp_path: Path, change: object, words: str
) -> None:
    assert callable(change)
    change(folder)
    with pytest.raises(ValueError, match=words):
        here(url, tmp_path)
    assert not list((tmp_path / "runs").rglob(remote.SOURCE))


def test_a_url_that_nobody_serves_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:1/model/config\.json cannot be read"):
        here("http://127.0.0.1:1/model", tmp_path)
    with pytest.raises(ValueError, match="nonesuch://model"):
        here("nonesuch://model", tmp_path)


def test_a_tokenizer_at_a_url_needs_no_weights(url: str, folder: Path, tmp_path: Path) -> None:
    (folder.parent / "tokens").mkdir()
    (folder.parent / "tokens/tokenizer.json").write_text("{}")
    data = msgspec.structs.replace(TINY.data, tokenizer=url.replace("/model", "/tokens"))
    config = remote.local(msgspec.structs.replace(at(url, tmp_path), data=data), lambda text: None)
    assert (Path(config.data.tokenizer) / "tokenizer.json").read_text() == "{}"
    both = msgspec.structs.replace(data, tokenizer=url + "/")
    config = remote.local(msgspec.structs.replace(at(url, tmp_path), data=both), lambda text: None)
    assert config.data.tokenizer == config.model.path


def test_an_invite_says_the_url_and_a_guest_names_it_himself(url: str, tmp_path: Path) -> None:
    config = here(url, tmp_path)
    settings = guest.invite_settings(config, to_tree(config), to_tree(Config()))
    assert settings["model"]["path"] == url
    with pytest.raises(
        ValueError, match=rf"this run wants to read a model: model.path = '{url}'.* name it yourself: model.path={url}"
    ):
        guest._look_up({"model.path": url}, "text", tmp_path)


def test_nothing_is_fetched_for_a_visitor_because_an_invite_says_so(
    server: Server, url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Invite(NamedTuple):
        config: bytes = b""

    data = msgspec.structs.replace(TINY.data, tokenizer=url)
    monkeypatch.setattr(generating, "read_invite", lambda text, now: Invite())
    monkeypatch.setattr(guest, "visitor", lambda packed, settings: msgspec.structs.replace(TINY, data=data))
    server.sent_bytes = 0
    with pytest.raises(ValueError, match=f"if that is right, name it: --tokenizer {url}"):
        generating._invited("an invite", "")
    assert server.sent_bytes == 0
    assert generating._invited("an invite", url).tokenizer == url


def test_adapters_name_the_hub_that_their_base_is_from(tmp_path: Path) -> None:
    assert remote.name_of(str(tmp_path)) == str(tmp_path.resolve())
    for url, name in (("hf://owner/model", "owner/model"), ("s3://bucket/model", "s3://bucket/model")):
        (tmp_path / remote.SOURCE).write_bytes(msgspec.json.encode(remote.Source(url, {})))
        assert remote.name_of(str(tmp_path)) == name
