"""`shoal join` with invites made by hand: nothing is read, nothing is written elsewhere, and what is allowed takes part."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_run import Start, assert_balanced, end, start, summary, wait_for

from shoal import guest
from shoal.transport.identity.invite import Authority

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture

# Every process of ours tells of each file that it opens, before it does.
WATCHER = """
import os, sys
seen = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def hook(event, args):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], str) and os.path.realpath(args[0]).startswith({home!r}):
        os.write(seen, (args[0] + "\\n").encode())
sys.addaudithook(hook)
"""
SMALL = {"hidden_size": 16, "layers": 3, "heads": 2, "kv_heads": 1, "intermediate_size": 24}


def hostile(title: str = "nice run", **sections: dict[str, Any]) -> str:
    """An invite that its own authority has signed, as anybody can make one."""
    tree = {"model": SMALL, "network": {"discovery": "gossip"}, **sections}
    return Authority.new().invite(("127.0.0.1:1",), time.time() + 3600, title, guest.pack(tree))


def text(path: str) -> dict[str, dict[str, Any]]:
    return {"data": {"source": "text", "path": path, "sequence": 16, "digest": ""}}


def test_a_hostile_invite_is_refused_and_reads_nothing(start: Start, tmp_path: Path) -> None:
    home = tmp_path / "secret"
    home.mkdir()
    (home / "secret.txt").write_text("my own words, nobody else's " * 40)
    (home / "tokenizer.json").write_text("{}")
    watcher = tmp_path / "watcher"
    watcher.mkdir()
    log = tmp_path / "opened"
    (watcher / "sitecustomize.py").write_text(WATCHER.format(log=str(log), home=str(home)))
    given = tmp_path / "given"
    given.mkdir()
    (given / "link.txt").symlink_to(home / "secret.txt")
    files = ("--files", "given")
    for sections, words, says in (
        (text(str(home / "secret.txt")), (), "--files DIR"),
        (text(f"{home}/*"), (), "--files DIR"),
        (text("~/secret/secret.txt"), (), "--files DIR"),
        (text("secret"), files, "data.digest"),
        (text("../secret"), files, "leads out of"),
        (text(str(home / "secret.txt")), files, "leads out of"),
        ({"data": text("link.txt")["data"] | {"digest": "0" * 64}}, files, "a link that leads out of"),
        ({"data": {"tokenizer": str(home)}}, (), "to load a tokenizer"),
        ({"model": {"path": str(home)}}, (), "to read a model"),
        ({"checkpoint": {"url": f"file://{home}/ck"}}, (), "to write and delete checkpoints"),
        ({"data": {"root": str(home)}}, (), "this invite sets data.root"),
        ({"run": {"dir": str(home)}}, (), "this invite sets run.dir"),
        ({"run": {"name": "../secret"}}, (), "run.name"),
    ):
        output = end(start("join", hostile(**sections), "run.dir=guest", *words, first=str(watcher)), code=2)
        assert says in output, output
        assert not log.exists() or log.read_text() == "", (sections, log.read_text())
    assert sorted(path.name for path in home.iterdir()) == ["secret.txt", "tokenizer.json"]
    assert not list(tmp_path.glob("guest/**/*.tokens"))


def test_a_guest_that_allows_a_directory_takes_part_with_the_runs_files(start: Start, tmp_path: Path) -> None:
    saved = f"checkpoint.url={tmp_path / 'checkpoints'}"
    host = start("run", "tiny.toml", "--here", "2", f"data.path={tmp_path / 'a.txt'}", saved)
    bootstrap = tmp_path / "runs/tiny/bootstrap.json"
    wait_for(lambda: host.poll() is not None or (bootstrap.exists() and len(json.loads(bootstrap.read_bytes())) == 2))
    invite = end(start("invite", "tiny.toml")).strip()
    assert "--files DIR" in end(start("join", invite, "run.dir=guest", saved), code=2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.txt").write_text("another text of that name " * 40)
    assert "the data here is another than the run's" in end(
        start("join", invite, "run.dir=guest", "--files", "other", saved), code=2
    )
    (tmp_path / "given").mkdir()
    (tmp_path / "given/a.txt").write_bytes((tmp_path / "a.txt").read_bytes())
    assert "the run is finished" in end(start("join", invite, "run.dir=guest", "--files", "given", saved))
    end(host)
    assert_balanced(summary(tmp_path), 4)
