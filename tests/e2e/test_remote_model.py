"""Real processes tune a model that lies at a URL: killed while they read its weights, they go on where they were."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.e2e.test_run import LONG_S, Start, assert_balanced, end, start, summary, wait_for
from tests.model.test_remote import Server

from shoal import config as configuration
from shoal.config import Config
from shoal.model import remote, stages

assert start  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LONG_S)]

SHAPE = ("model.hidden_size=128", "model.intermediate_size=512", "model.layers=6")
WORDS = ("tune.method=lora", "run.stages=2", "run.peers=2", "network.discovery=gossip")
SLOW_BPS = 200_000.0


def losses(tmp_path: Path) -> list[float]:
    account = summary(tmp_path)
    assert_balanced(account, 4)
    return [float(loss) for loss in account["losses"]]


@pytest.fixture
def there(start: Start, tmp_path: Path) -> Path:
    """A model in several shards. The run's file says nothing of its shape."""
    lines = (tmp_path / "tiny.toml").read_text()
    (tmp_path / "tiny.toml").write_text(re.sub(r"\[model\].*?(?=\[)", "", lines, flags=re.S))
    shape: Config = configuration.load(None, SHAPE)
    stages.whole(shape).save_pretrained(tmp_path / "there/model", max_shard_size="1MB")
    return tmp_path / "there/model"


def test_a_run_tunes_a_model_at_a_url_also_one_that_was_killed_while_it_read(
    start: Start, tmp_path: Path, there: Path
) -> None:
    end(start("run", "tiny.toml", f"model.path={there}", *WORDS))
    expected, weights_bytes = losses(tmp_path), sum(file.stat().st_size for file in there.glob("*.safetensors"))
    server = Server(there.parent)
    try:
        url = f"http://127.0.0.1:{server.port}/model"
        server.pause_s_per_byte = 1 / SLOW_BPS
        killed = start("run", "tiny.toml", f"model.path={url}", *WORDS)
        wait_for(lambda: killed.poll() is not None or server.sent_bytes > weights_bytes / 2)
        assert killed.poll() is None
        killed.kill()
        killed.wait()
        server.pause_s_per_byte = 0.0
        said = end(start("run", "tiny.toml", f"model.path={url}", *WORDS))
        assert "first step after" in said
        assert losses(tmp_path) == pytest.approx(expected, rel=1e-6)  # two runs add in other orders
        assert losses(tmp_path)[0] == expected[0]
        assert server.sent_bytes < 1.3 * weights_bytes  # what was read before is not read again
    finally:
        server.stop()
    (place,) = (tmp_path / "runs/.cache/models").iterdir()
    assert remote.source_of(place) is not None and not list(place.glob("*" + remote.PARTIAL))
    adapter = json.loads((tmp_path / "runs/tiny/checkpoints/step-4/adapter_config.json").read_bytes())
    assert adapter["base_model_name_or_path"] == url


def test_a_guest_names_the_url_itself_and_reads_its_stage_alone(start: Start, tmp_path: Path, there: Path) -> None:
    server = Server(there.parent)
    try:
        url = f"http://127.0.0.1:{server.port}/model"
        host = start("run", "tiny.toml", f"model.path={url}", *WORDS, "--here", "1")
        bootstrap = tmp_path / "runs/tiny/bootstrap.json"
        wait_for(lambda: host.poll() is not None or bootstrap.exists())
        invite = end(start("invite", "runs/tiny")).strip()
        files = ("run.dir=guest", "data.path=a.txt")
        refused = end(start("join", "-", *files, stdin=invite), code=2)
        assert f"name it yourself: model.path={url}" in re.sub(r"\s+", " ", refused)
        guest = end(start("join", "-", *files, f"model.path={url}", stdin=invite))
        assert "the run is finished" in guest
        end(host)
        losses(tmp_path)
    finally:
        server.stop()
    (place,) = (tmp_path / "guest/.cache/models").iterdir()
    assert list(place.glob("*" + remote.PARTIAL)) and len(list(place.glob("*.safetensors"))) < len(
        list(there.glob("*.safetensors"))
    )
