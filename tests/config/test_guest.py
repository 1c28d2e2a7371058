"""What an invite may decide on a guest's machine: for every field somebody has said so, and nothing else gets through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal import guest
from shoal.config import Config, from_tree, overridden, to_tree
from shoal.core.messages import PROTOCOL
from shoal.model import lent
from shoal.runtime.data.dataset import open_dataset

DIGEST = "0" * 64
TEXT = {"source": "text", "path": "texts/a.txt", "digest": DIGEST, "sequence": 16}
EMULATED = ("device.executor=emulated",)


def invite_tree(**sections: dict[str, Any]) -> bytes:
    return guest.pack(sections)


def test_every_field_of_the_configuration_is_decided() -> None:
    fields = {f"{section}.{field}" for section, values in to_tree(Config()).items() for field in values}
    groups = (guest.RUN, guest.MACHINE, {*guest.FILES, guest.PLACE})
    assert set().union(*groups) == fields
    assert sum(map(len, groups)) == len(fields), "each in one group"


@pytest.mark.parametrize("path", sorted(guest.MACHINE))
def test_what_each_machine_decides_is_not_taken_from_an_invite(path: str) -> None:
    section, _, field = path.partition(".")
    value = to_tree(Config())[section][field]
    with pytest.raises(ValueError, match=f"this invite sets {path}"):
        guest.joined(invite_tree(**{section: {field: value}}), [])


def test_a_run_on_pythons_own_library_needs_no_files() -> None:
    config = guest.joined(invite_tree(run={"steps": 7}, data={"digest": DIGEST}), ["network.host=::1"])
    assert (config.run.steps, config.network.host) == (7, "::1")
    assert (config.data.path, config.data.root) == ("", "")
    with pytest.raises(ValueError, match=r"this invite makes no run: data\.path = '~/secret' has no effect"):
        guest.joined(invite_tree(data={"digest": DIGEST, "path": "~/secret"}), [])


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"data": TEXT}, "data.path = 'texts/a.txt'.*--files DIR.*data.path=PATH"),
        ({"data": TEXT | {"path": "/etc/passwd"}}, "data.path = '/etc/passwd'"),
        ({"data": {"source": "huggingface", "path": "someone/private", "digest": DIGEST}}, "data.path=someone/private"),
        ({"data": {"tokenizer": "gpt2"}}, "to load a tokenizer.*data.tokenizer=NAME-OR-DIRECTORY"),
        ({"model": {"path": "llama"}}, "to read a model.*model.path=DIRECTORY"),
        (
            {"model": {"path": "llama"}, "tune": {"method": "lora", "adapter": "theirs"}},
            "to read an adapter.*model.path=DIRECTORY tune.adapter=DIRECTORY",
        ),
        ({"checkpoint": {"url": "s3://bucket/x"}}, "to write and delete checkpoints.*checkpoint.url=URL"),
    ],
)
def test_what_was_not_allowed_is_refused_with_the_way_to_allow_it(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        guest.joined(invite_tree(**sections), [])


def test_the_size_of_emulated_tensors_is_the_runs() -> None:
    config = overridden(to_tree(Config()), [*EMULATED, "device.emulated_values=64"])
    tree = guest.invite_settings(from_tree(config), config, to_tree(Config()))
    assert tree == {"device": {"emulated_values": 64}}
    text = invite_tree(**tree)
    assert guest.visitor(text, []).device.executor == "emulated"
    assert guest.joined(text, []).device.emulated_values == 64
    guest.joined(text, [*EMULATED, "device.emulated_values=64"])
    for invite in (text, invite_tree()):
        with pytest.raises(ValueError, match=r"device\.emulated_values = 7, but all peers of this run have"):
            guest.joined(invite, [*EMULATED, "device.emulated_values=7"])


@pytest.mark.parametrize("name", ["/etc/passwd", "~/x", "../x", "a/../../x", "a\\..\\x", "a\nb", "**/**/**", "x" * 300])
def test_no_name_leads_out_of_the_directory_that_was_given(tmp_path: Path, name: str) -> None:
    config = guest.joined(invite_tree(data=TEXT | {"path": "x"}), [], tmp_path)
    data = msgspec.structs.replace(config.data, path=name)
    with pytest.raises(ValueError, match=r"data\.path"):
        open_dataset(msgspec.structs.replace(config, data=data))
    with pytest.raises(ValueError, match=r"data\.path"):
        guest.joined(invite_tree(data=TEXT | {"path": name}), [], tmp_path)


@pytest.mark.parametrize("name", ["texts", "texts/link.txt", "texts/*.txt", "**/*.txt", "out", "out/*"])
def test_no_link_leads_out_of_it_either(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/secret.txt").write_text("what is nobody's business " * 9)
    given = tmp_path / "given"
    (given / "texts").mkdir(parents=True)
    (given / "texts/a.txt").write_text("what may be read " * 9)
    (given / "texts/link.txt").symlink_to(tmp_path / "secret/secret.txt")
    (given / "out").symlink_to(tmp_path / "secret")
    config = guest.joined(invite_tree(data=TEXT | {"path": name}), [], given)
    with pytest.raises(ValueError, match="leads out of"):
        open_dataset(config, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists(), "nothing was tokenised"


def test_names_are_looked_up_below_the_directory_and_give_the_same_samples(tmp_path: Path) -> None:
    given = tmp_path / "given[1]"  # not a pattern
    (given / "texts").mkdir(parents=True)
    for name in "abc":
        (given / f"texts/{name}.txt").write_text(f"{name} is a text " * 9)
    for path in ("texts", "texts/*.txt", "**/b.txt", "texts/a.txt"):
        tree = {"data": TEXT | {"path": path}}
        guests = open_dataset(guest.joined(guest.pack(tree), [], given))
        prefix = str(given).replace("[", "[[]") if "*" in path else str(given)
        own = open_dataset(from_tree({"data": TEXT | {"path": f"{prefix}/{path}"}}))
        assert guests.digest == own.digest


def test_a_model_and_a_tokenizer_are_looked_up_there_too(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text("{}")
    tree = invite_tree(model={"path": "llama"}, data={"tokenizer": "llama"})
    config = guest.joined(tree, [], tmp_path)
    assert config.model.path == config.data.tokenizer == str((tmp_path / "llama").resolve())
    (tmp_path / "llama/weights").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="leads out of"):
        guest.joined(tree, [], tmp_path)


def test_a_vocabulary_that_was_resized_and_a_rope_are_taken_from_an_invite(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    extra = {"vocab_size": 300, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    tree = {"path": "llama", "extra": extra}
    assert guest.joined(invite_tree(model=tree, data={"digest": DIGEST}), [], tmp_path).model.extra == extra
    with pytest.raises(ValueError, match=r"a guest takes up to 16,777,216"):
        guest.joined(invite_tree(model=tree | {"extra": {"vocab_size": 2**25}}, data={"digest": DIGEST}), [], tmp_path)


def test_a_guest_names_things_on_its_own_command_line() -> None:
    words = ["data.path=~/mine", "data.tokenizer=gpt2", "model.path=/m", "checkpoint.url=/c"]
    sections = {
        "data": TEXT | {"tokenizer": "other"},
        "model": {"path": "theirs"},
        "checkpoint": {"url": "s3://theirs"},
    }
    config = guest.joined(invite_tree(**sections), words)
    assert (config.data.path, config.data.tokenizer, config.data.root) == ("~/mine", "gpt2", "")
    assert (config.model.path, config.checkpoint.url) == ("/m", "/c")


def test_an_invite_without_a_digest_gets_no_files(tmp_path: Path) -> None:
    sections = {"data": {"source": "text", "path": "a.txt"}}
    for words, files in (((), tmp_path), (("data.path=a.txt",), None)):
        with pytest.raises(ValueError, match=r"data\.digest"):
            guest.joined(invite_tree(**sections), words, files)


def test_whoever_reads_nothing_is_asked_for_nothing() -> None:
    assert guest.joined(invite_tree(data=TEXT), EMULATED).device.executor == "emulated"
    assert guest.visitor(invite_tree(data=TEXT, checkpoint={"url": "s3://x"}), []).checkpoint.url == ""


@pytest.mark.parametrize("name", ["../../etc", "..", "/tmp/x", ".hidden", "a/b", "a\n", "a\x1b[2J"])
def test_the_runs_name_stays_below_its_directory(name: str) -> None:
    with pytest.raises(ValueError, match=r"run\.name"):
        guest.joined(invite_tree(run={"name": name}), [])


@pytest.mark.parametrize(
    "sections",
    [
        {
            "model": {"hidden_size": 2**20, "heads": 1, "kv_heads": 1, "intermediate_size": 2**24},
            "network": {"max_tensor_bytes": 2**40},
        },
        {
            "model": {"vocab_size": 2**24, "hidden_size": 2**17, "heads": 1, "kv_heads": 1},
            "network": {"max_tensor_bytes": 2**40},
        },
        {
            "data": {"sequence": 2**20},
            "train": {"batch": 2**20, "microbatch": 2**20},
            "network": {"max_tensor_bytes": 2**60},
        },
        {"network": {"max_tensor_bytes": 2**60}},
        {"network": {"activation_store_bytes": 2**50}},
        {"run": {"averaging_memory_bytes": 2**60}},
        {"run": {"heartbeat_s": 1e-9}},
        {"run": {"ready_timeout_s": 1e12}},
        {"checkpoint": {"keep": 2**20}},
        {"model": {"extra": {"num_hidden_layers": 10**12}}},
        {"model": {"extra": {"max_position_embeddings": 10**12}}},
        {"model": {"extra": {"num_local_experts": 2**20}}},
        {"model": {"extra": {"rope_parameters": {"factor": 1e12}}}},
        {"model": {"extra": {"vocab_size": 300}}},
    ],
)
def test_a_run_larger_than_this_machine_is_refused_in_words(sections: dict[str, Any]) -> None:
    """By arithmetic: were any of it made, this test would not end."""
    with pytest.raises(ValueError, match="this invite"):
        guest.joined(invite_tree(**sections), [])


@pytest.mark.parametrize(
    "text", [b'{"a":{"b":' + b"[" * 4000, b"\xff", b"[]", b'{"run":7}', b'{"run":{"peers":"many"}}', b" " * 100_000]
)
def test_what_is_no_configuration_is_refused_in_words(text: bytes) -> None:
    for data in (text, guest.pack(msgspec.Raw(text)), guest.pack(msgspec.Raw(text))[:-2]):
        with pytest.raises(ValueError):
            guest.joined(data, [])


def test_an_invite_tells_names_without_the_way_to_them() -> None:
    for own, others in (
        ("/home/me/texts/a.txt", "a.txt"),
        ("~/texts/**/*.txt", "texts/**/*.txt"),
        ("../a.txt", "a.txt"),
        ("./texts/a.txt", "texts/a.txt"),
        ("texts/*.txt", "texts/*.txt"),
    ):
        config = from_tree({"data": {"source": "text", "path": own}, "device": {"threads": 3}, "run": {"dir": "/x"}})
        assert guest.shared(config) == guest.pack({"data": {"source": "text", "path": others}})


def test_an_invite_of_another_version_says_so_at_once() -> None:
    text = b"%d " % (PROTOCOL + 1) + b"whatever that version writes"
    with pytest.raises(
        ValueError, match=f"speak protocol {PROTOCOL + 1}, and shoal here speaks {PROTOCOL}: install the same"
    ):
        guest.joined(text, [])


LENT = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64}


def lending(fields: dict[str, Any], **tune: Any) -> bytes:
    text = msgspec.json.encode({"config": json.dumps(fields)}).decode()
    return invite_tree(model={"path": "llama"}, tune={"method": "lora", "lend": True, "description": text} | tune)


def test_a_model_that_is_not_here_is_lent_by_the_runs_peers(tmp_path: Path) -> None:
    place = [f"run.dir={tmp_path}"]
    joined = guest.joined(lending(LENT), place)
    assert joined.model.path == lent.PEERS
    config = lent.local(joined)
    assert json.loads((Path(config.model.path) / "config.json").read_bytes()) == LENT and lent.borrowed(
        config.model.path
    )
    (tmp_path / "llama").mkdir()
    assert guest.joined(lending(LENT), place, tmp_path).model.path == str((tmp_path / "llama").resolve()), "it is here"
    assert guest.joined(lending(LENT), [*place, "model.path=/mine"]).model.path == "/mine"
    for tune in ({"lend": False}, {"description": ""}):
        with pytest.raises(ValueError, match=r"name it yourself: model\.path=DIRECTORY"):
            guest.joined(lending(LENT, **tune), place)
        with pytest.raises(ValueError, match="gives no frozen weights away"):
            lent.local(guest.joined(lending(LENT, **tune), [*place, "model.path=peers"]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "llama", "hidden_size": 2**25}, "a guest takes up to 16,777,216"),
        ({"model_type": "llama", "rope": {"factor": [1e30]}}, "a guest takes up to"),
        (
            {"model_type": "llama", "num_hidden_layers": 2**12, "num_local_experts": 2**8},
            "a guest takes up to 131,072 parts",
        ),
        ({"hidden_size": 3}, "no model_type"),
    ],
)
def test_a_description_beyond_all_bounds_is_refused(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        lent.local(guest.joined(lending(fields), [f"run.dir={tmp_path}"]))
    assert not list(tmp_path.rglob("config.json"))


def test_a_description_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("", "{", '{"config": 3}', '{"config": "["}'):
        with pytest.raises(ValueError, match=r"cannot be read|gives no frozen|name it yourself"):
            lent.local(guest.joined(lending(LENT, description=text), [f"run.dir={tmp_path}"]))
