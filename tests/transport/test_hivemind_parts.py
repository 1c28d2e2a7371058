"""Of hivemind only what the network needs is imported."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "scipy", "pydantic", "hivemind.optim", "hivemind.averaging", "hivemind.moe"}


def in_a_new_process(*lines: str) -> str:
    program = "\n".join(("import logging, sys", "from shoal.transport.hivemind_parts import hivemind, load", *lines))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_network_imports_neither_torch_nor_the_rest_of_hivemind() -> None:
    loaded = in_a_new_process("load()", "hivemind('proto.p2pd_pb2')", "print(*sys.modules)").split()
    assert "hivemind.dht.node" in loaded
    assert not HEAVY & set(loaded)


def test_every_name_of_its_packages_is_had_when_it_is_asked_for() -> None:
    said = in_a_new_process(
        "print(hivemind('utils').MSGPackSerializer.__module__, hivemind('dht').DHTNode.__module__)",
        "import hivemind as whole",
        "print(hasattr(whole, 'no_such_name'), 'torch' in sys.modules, whole.DHT.__module__)",
    )
    assert said.split() == ["hivemind.utils.serializer", "hivemind.dht.node", "False", "False", "hivemind.dht.dht"]


def test_the_words_of_the_log_stay() -> None:
    assert in_a_new_process("load()", "print(logging.getLevelName(logging.WARNING))") == "WARNING\n"
