"""Wrong inputs and mishaps, as a user has them: what is said, after how long, with which exit code, and what is lost.

    PYTHONPATH=src:. python tests/cli/test_mishaps.py        every one as a process of its own; writes docs/mishaps.md

Demands: none hangs, none prints a traceback, none loses a checkpoint, none ends with 0 after a loss.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.tiny import DATA, tiny

from shoal import guest
from shoal.cli import main as program
from shoal.exit_codes import ExitCode
from shoal.launcher.files import rundir
from shoal.runtime.checkpoints.catalog import Catalog
from shoal.runtime.records.account import CommittedStep
from shoal.transport.identity.invite import Authority

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mishaps.md"
HANGS_S = 600.0
LAB = "device.executor=emulated device.emulated_s=0.02 device.emulated_values=64"
DAY_S = 86400

Prepare = Callable[[], object]
Meddle = Callable[[subprocess.Popen[str]], object]


@dataclass(frozen=True)
class Mishap:
    what: str
    words: str
    code: int = ExitCode.USER_ERROR
    prepare: Prepare = lambda: None
    meddle: Meddle | None = None  # while it runs; such a one is a process, and slow
    lost: str = "nothing"  # "" where that depends on the moment


@dataclass(frozen=True)
class Outcome:
    said: str
    text: str
    seconds: float
    code: int
    lost: str


# ---------------------------------------------------------------------------------------------------- what is prepared


def text(name: str, content: str | bytes) -> Prepare:
    data = content.encode() if isinstance(content, str) else content
    return lambda: Path(name).write_bytes(data)


def loop() -> None:
    Path("loop.txt").symlink_to("loop.txt")


def tokenizer(ids: int) -> Prepare:
    def prepare() -> None:
        from tokenizers import Tokenizer, models

        Path("tok").mkdir()
        if ids:
            Tokenizer(models.BPE(vocab={chr(300 + i): i for i in range(ids)}, merges=[])).save("tok/tokenizer.json")

    return prepare


def model(weights: bytes | None, config: str = "") -> Prepare:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 256,
    }

    def prepare() -> None:
        Path("m").mkdir()
        Path("m/config.json").write_text(config or json.dumps(sizes | {"model_type": "llama"}))
        if weights is not None:
            Path("m/model.safetensors").write_bytes(weights)

    return prepare


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


PORT = free_port()
_held: list[contextlib.AbstractContextManager[object]] = []  # what a mishap holds until it is over


def taken_port() -> None:
    listener = socket.create_server(("127.0.0.1", PORT))
    _held.append(listener)


def invite(expires_s: float = DAY_S, change: Callable[[str], str] = str, peers: int = 1) -> Prepare:
    def prepare() -> None:
        written = Authority.new().invite((f"127.0.0.1:{PORT}",), time.time() + expires_s, "tiny", guest.pack({}), peers)
        Path("invite").write_text(change(written))
        Path("invite").chmod(0o600)

    return prepare


def altered(invite: str) -> str:
    middle = len(invite) // 2
    return invite[:middle] + ("A" if invite[middle] != "A" else "B") + invite[middle + 1 :]


def claimed() -> None:
    claim = rundir.claimed(Path("runs/tiny"))
    claim.__enter__()
    _held.append(claim)


def saved(then: Prepare = lambda: None) -> Prepare:
    """A run of six steps that has ended, with its checkpoints."""

    def prepare() -> None:
        shutil.copytree(SAVED[0], "runs/tiny", dirs_exist_ok=True)
        then()

    return prepare


def tear(names: str) -> Prepare:
    def prepare() -> None:
        for file in sorted(Path("runs/tiny/checkpoints").glob(names)):
            file.write_bytes(file.read_bytes()[:-1])

    return prepare


def move() -> None:
    shutil.copytree("runs/tiny/checkpoints", "elsewhere")


SAVED: list[Path] = []  # its directory, once it was trained


# ------------------------------------------------------------------------------------------------------------ mishaps

RUN = f"run tiny.toml {LAB}"
SHORT = [
    Mishap("a command that does not exist", "rnu tiny.toml"),
    Mishap("a section that does not exist", "run tiny.toml nett.port=1"),
    Mishap("a setting with a typo", "run tiny.toml run.stepz=10"),
    Mishap("a choice with a typo", "run tiny.toml device.kind=cdua"),
    Mishap("an option that does not exist", "run tiny.toml --reusme"),
    Mishap("an option without its value", "run tiny.toml --plan"),
    Mishap("a rate without a unit", "run tiny.toml network.bandwidth_Bps=200"),
    Mishap("a unit of something else", "run tiny.toml 'network.delay_s=80 MHz'"),
    Mishap("a time without a unit", "run tiny.toml --time soon"),
    Mishap("text for a number", "run tiny.toml run.steps=many"),
    Mishap("a list for a number", "run tiny.toml run.steps=[1,2]"),
    Mishap("a negative number", "run tiny.toml train.batch=-8"),
    Mishap("zero where one is the least", "run tiny.toml run.steps=0"),
    Mishap("a huge number", f"run tiny.toml run.steps={10**30}"),
    Mishap("a number that is none", "run tiny.toml train.learning_rate=nan"),
    Mishap("a model larger than the disk", "train tiny.toml model.hidden_size=65536 model.layers=2000"),
    Mishap("a microbatch that does not divide the batch", "run tiny.toml train.microbatch=3"),
    Mishap("more stages than layers", "run tiny.toml run.stages=9 run.peers=9"),
    Mishap("no configuration", "run"),
    Mishap("a configuration that is not there", "run nowhere.toml"),
    Mishap("a directory as configuration", "run .", prepare=lambda: None),
    Mishap("a binary file as configuration", "run c.toml", prepare=text("c.toml", bytes(range(128, 256)))),
    Mishap("half a configuration", "run c.toml", prepare=text("c.toml", "[run]\nname = ")),
    Mishap("two configurations", "train tiny.toml tiny.toml"),
    Mishap("data that is not there", "run tiny.toml data.path=nowhere.txt"),
    Mishap("a data directory without text", "run tiny.toml data.path=empty", prepare=lambda: Path("empty").mkdir()),
    Mishap("an empty data file", "run tiny.toml data.path=e.txt", prepare=text("e.txt", "")),
    Mishap("less data than a sample", "run tiny.toml data.path=e.txt", prepare=text("e.txt", "short")),
    Mishap("a binary file as text", "run tiny.toml data.path=b.txt", prepare=text("b.txt", bytes(9999))),
    Mishap("a data file that cannot be read", "run tiny.toml data.path=loop.txt", prepare=loop),
    Mishap("text as JSON lines", "run tiny.toml data.source=jsonl"),
    Mishap(
        "JSON lines without the field",
        "run tiny.toml data.source=jsonl data.path=l.jsonl",
        prepare=text("l.jsonl", "{}"),
    ),
    Mishap("a tokenizer directory that is not there", "run tiny.toml data.tokenizer=./tok"),
    Mishap("a directory without a tokenizer", "run tiny.toml data.tokenizer=tok", prepare=tokenizer(0)),
    Mishap("a tokenizer that is not in the cache, offline", "run tiny.toml data.tokenizer=some/body"),
    Mishap("a tokenizer larger than the vocabulary", "run tiny.toml data.tokenizer=tok", prepare=tokenizer(999)),
    Mishap(
        "a model directory that is not there",
        "plan c.toml model.path=nowhere --cluster m.toml",
        prepare=text("c.toml", ""),
    ),
    Mishap(
        "a model directory without weights",
        "run c.toml model.path=m run.stages=2",
        prepare=lambda: (text("c.toml", "")(), model(None)()),
    ),
    Mishap(
        "a torn file of weights",
        "run c.toml model.path=m run.stages=2",
        prepare=lambda: (text("c.toml", "")(), model(b"torn")()),
    ),
    Mishap("a model whose config.json is torn", "train model.path=m", prepare=model(None, "{")),
    Mishap(
        "a GPU where there is none",
        "run tiny.toml device.kind=cuda",
        prepare=lambda: os.environ.update(CUDA_VISIBLE_DEVICES=""),
    ),
    Mishap("a taken port", f"run tiny.toml network.port={PORT}", prepare=taken_port),
    Mishap("an address of another machine", "run tiny.toml network.host=192.0.2.1"),
    Mishap("an address that is none", "run tiny.toml network.host=no.such.host.invalid"),
    Mishap("a file where the runs should be", "run tiny.toml run.dir=a.txt"),
    Mishap("a directory that cannot be written", "run tiny.toml run.dir=/proc/runs"),
    Mishap("a run's name that leaves its directory", "run tiny.toml run.name=../x"),
    Mishap("a second start in one directory", RUN, prepare=claimed),
    Mishap("a plan that is not there", "run tiny.toml --plan nowhere.json"),
    Mishap("a plan that is no JSON", "run tiny.toml --plan a.txt"),
    Mishap(
        "machines without a link",
        "plan tiny.toml --cluster m.toml",
        prepare=text("m.toml", '[[device]]\nname = "a"\nflops = "1 TFLOP/s"\ncount = 2\n'),
    ),
    Mishap("no machines to plan for", "plan tiny.toml"),
    Mishap("any text as an invite", "join hello"),
    Mishap("half an invite", "join @invite", prepare=invite(change=lambda text: text[: len(text) // 2])),
    Mishap("an invite with a changed letter", "join @invite", prepare=invite(change=altered)),
    Mishap("an invite to a run that is over", "join @invite device.executor=emulated", prepare=invite()),
    Mishap(
        "an expired invite to a run that is over",
        "join @invite device.executor=emulated",
        prepare=invite(-DAY_S),
    ),
    Mishap(
        "more peers than an invite allows",
        "join @invite --peers 2 device.executor=emulated",
        prepare=invite(),
    ),
    Mishap("more peers here than the run has", "run tiny.toml --here 3"),
    Mishap("text from a checkpoint that is not there", "generate runs/tiny hello"),
    Mishap("the state of a run that is not there", "status runs/nothing"),
    Mishap("the trace of a run that is not there", "replay runs/nothing"),
    Mishap("chaos where nothing runs", "chaos runs/nothing --kill-every 20"),
    Mishap("a scenario that does not exist", "simulate clam"),
    Mishap("init over a file that is there", "init tiny.toml"),
]
AFTER = [  # a run that has ended
    Mishap("an invite to revoke that was never made", "revoke tiny.toml abcdef", prepare=saved()),
    Mishap(
        "--resume at another run's checkpoints",
        f"{RUN} --resume run.name=b checkpoint.url=elsewhere",
        prepare=saved(move),
    ),
    Mishap(
        "a new run where another's checkpoints are", f"{RUN} run.name=b checkpoint.url=elsewhere", prepare=saved(move)
    ),
    Mishap(
        "--resume with every checkpoint torn",
        f"{RUN} --resume run.steps=9",
        prepare=saved(tear("step-*/*.safetensors")),
        lost="6 steps since the last checkpoint",
    ),
    Mishap("--resume of a run that is over", f"{RUN} --resume", 0, saved()),
    Mishap("--resume with another model", "run tiny.toml --resume run.steps=9 model.hidden_size=32", prepare=saved()),
]


# ------------------------------------------------------------------------------------------------- while something runs

LONG = f"run tiny.toml {LAB} run.steps=100000"
TRAIN = "train tiny.toml run.steps=100000"


def when(condition: Callable[[], object], *acts: Callable[[subprocess.Popen[str]], object]) -> Meddle:
    def meddle(process: subprocess.Popen[str]) -> None:
        until_s = time.monotonic() + HANGS_S
        while process.poll() is None and not condition() and time.monotonic() < until_s:
            time.sleep(0.05)
        for act in acts:
            act(process)

    return meddle


def sends(number: signal.Signals) -> Callable[[subprocess.Popen[str]], None]:
    return lambda process: process.send_signal(number)


def committed(steps: int) -> Callable[[], bool]:
    file = Path("runs/tiny/commits.jsonl")
    return lambda: file.exists() and file.read_bytes().count(b"\n") >= steps


def there(name: str) -> Callable[[], bool]:
    return lambda: any(Path().glob(name))


def kill_peers(count: int) -> Callable[[subprocess.Popen[str]], None]:
    def kill(_: subprocess.Popen[str]) -> None:
        peers = json.loads(Path("runs/tiny/peers.json").read_bytes())["peers"]
        for peer in peers[-count:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(peer["process"]["pid"], signal.SIGKILL)

    return kill


def peers_listed(count: int) -> Callable[[], bool]:
    file = Path("runs/tiny/peers.json")
    return lambda: file.exists() and len(json.loads(file.read_bytes())["peers"]) == count


def limit_files(process: subprocess.Popen[str]) -> None:
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))


INT, TERM, HUP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
LIVE = [
    Mishap("Ctrl-C at once", LONG, 130, meddle=when(there("runs/tiny"), sends(INT))),
    Mishap("Ctrl-C while peers start", LONG, 130, meddle=when(there("runs/tiny/logs/p2.log"), sends(INT))),
    Mishap("Ctrl-C after three steps", LONG, 130, meddle=when(committed(3), sends(INT)), lost=""),
    Mishap(
        "Ctrl-C twice",
        LONG,
        130,
        meddle=when(committed(3), sends(INT), lambda _: time.sleep(0.3), sends(INT)),
        lost="",
    ),
    Mishap(
        "Ctrl-C while a checkpoint is written",
        f"{LONG} checkpoint.every=1",
        130,
        meddle=when(there("runs/tiny/checkpoints/*"), sends(INT)),
        lost="",
    ),
    Mishap("SIGTERM after three steps", LONG, 130, meddle=when(committed(3), sends(TERM)), lost=""),
    Mishap("the terminal is closed", LONG, 130, meddle=when(committed(3), sends(HUP)), lost=""),
    Mishap(
        "the launcher is killed",
        LONG,
        -9,
        meddle=when(committed(3), sends(KILL)),
        lost="",
    ),
    Mishap("a peer is killed before training", LONG, 1, meddle=when(peers_listed(2), kill_peers(1))),
    Mishap(
        "every peer is killed",
        LONG,
        1,
        meddle=when(committed(3), kill_peers(2)),
        lost="",
    ),
    Mishap("Ctrl-C while one machine reads the model", TRAIN, 130, meddle=when(there("runs/.tiny.lock"), sends(INT))),
    Mishap("Ctrl-C while one machine trains", TRAIN, 130, meddle=when(committed(3), sends(INT)), lost=""),
    Mishap(
        "no file may grow any more",
        TRAIN,
        1,
        meddle=when(committed(3), limit_files),
        lost="",
    ),
    Mishap(
        "one checkpoint is torn, --resume",
        f"{RUN} --resume run.steps=8",
        0,
        saved(tear("step-6/*.safetensors")),
        when(lambda: True),
        "nothing",
    ),
]


# ------------------------------------------------------------------------------------------------------------ trying it


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def command(words: list[str]) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "shoal.cli.main", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, env=environment(), stdout=pipe, stderr=subprocess.STDOUT, text=True)


def tried(mishap: Mishap, process: bool) -> Outcome:
    """In a fresh directory: in this process, or in one of its own as a user has it."""
    home, before = Path.cwd(), os.environ.copy()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            Path("tiny.toml").write_text(tiny())
            Path("a.txt").write_bytes(DATA)
            os.environ["HF_HUB_OFFLINE"] = "1"
            mishap.prepare()
            kept = checkpoints()
            begun_s = time.monotonic()
            text, code = (_as_process if process else _in_process)(mishap)
            seconds = time.monotonic() - begun_s
            assert kept <= checkpoints() or (mishap.words.startswith("run tiny.toml") and "torn" in mishap.what), (
                "a checkpoint is lost"
            )
            return Outcome(_last(text), text, seconds, code, _lost())
        finally:
            for held in _held:
                held.__exit__(None, None, None)
            _held.clear()
            os.chdir(home)
            os.environ.clear()
            os.environ.update(before)


def _in_process(mishap: Mishap) -> tuple[str, int]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = program.main(shlex.split(mishap.words))
        except SystemExit as ended:  # argparse
            code = int(ended.code or 0)
    return out.getvalue(), code


def _as_process(mishap: Mishap) -> tuple[str, int]:
    process = command(shlex.split(mishap.words))
    try:
        if mishap.meddle is not None:
            mishap.meddle(process)
        text, _ = process.communicate(timeout=HANGS_S)
    finally:
        process.kill()
    return text, process.returncode


def checkpoints() -> set[tuple[str, int]]:
    """Whole ones, every byte of which was checked."""
    whole = set()
    for place in {file.parent.parent for file in Path().rglob("step-*/*") if file.is_file()}:
        catalog = Catalog(str(place))
        for entry in catalog.entries():
            if not entry.wrong and not catalog.inspect(entry.step).wrong:
                whole.add((place.name, entry.step))
    return whole


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _lost() -> str:
    """Steps that were committed and that no checkpoint holds."""
    file = Path("runs/tiny/commits.jsonl")
    lines = file.read_bytes().splitlines() if file.exists() else []
    steps = msgspec.json.decode(lines[-1], type=CommittedStep).commit.step + 1 if lines else 0
    lost = steps - max([step for _, step in checkpoints()], default=0)
    return f"{lost} steps since the last checkpoint" if lost > 0 else "nothing"


def demand(mishap: Mishap, outcome: Outcome) -> None:
    """What is asked of every one."""
    assert "Traceback" not in outcome.text, outcome.text
    assert outcome.code == mishap.code, (outcome.code, outcome.text)
    assert outcome.said or mishap.code == -KILL, "nothing was said"
    assert mishap.lost in outcome.lost, (outcome.lost, outcome.text)
    assert outcome.lost == "nothing" or outcome.code != 0, "0 after a loss"


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    train_one(tmp_path_factory.mktemp("saved"))
    yield
    SAVED.clear()


def train_one(place: Path) -> None:
    """The run of `saved`, on one machine."""
    home = Path.cwd()
    os.chdir(place)
    try:
        Path("tiny.toml").write_text(tiny())
        Path("a.txt").write_bytes(DATA)
        ended = command(["run", "tiny.toml", *LAB.split()])
        text, _ = ended.communicate(timeout=HANGS_S)
        assert ended.returncode == 0, text
    finally:
        os.chdir(home)
    SAVED[:] = [place / "runs/tiny"]


@pytest.mark.parametrize("mishap", SHORT, ids=lambda mishap: mishap.what)
def test_a_wrong_input_is_refused_without_a_traceback_and_nothing_is_lost(mishap: Mishap) -> None:
    demand(mishap, tried(mishap, process=False))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("a_run")
@pytest.mark.parametrize("mishap", [*AFTER, *LIVE], ids=lambda mishap: mishap.what)
def test_a_mishap_of_a_run_hangs_nothing_and_loses_no_checkpoint(mishap: Mishap) -> None:
    demand(mishap, tried(mishap, process=True))


def stable(said: str, moment: bool = False) -> str:
    """Without what differs each time: directories, ports, keys, free room. `moment`: nor what depends on when it struck."""
    said = re.sub(rf"{tempfile.gettempdir()}/tmp\w+", "DIR", said).replace(str(PORT), "PORT")
    said = re.sub(r"\(key [a-z2-7]+\)", "(key KEY)", said)
    said = re.sub(r"has [\d.]+ [KMGT]iB free", "has N GiB free", said)
    if moment:
        said = re.sub(r"; the [\d,]+ after it are lost", "", said)
        said = re.sub(r"^\d+:\d+\b", "M:SS", re.sub(r"\b(step[ -])\d+", r"\1N", said, flags=re.IGNORECASE))
    return (said if len(said) <= 160 else f"{said[:157]}...").replace("|", "\\|")


def below(seconds: float) -> str:
    """The time within which a mishap ends, coarse enough to be alike on every writing."""
    return next(f"< {bound:g}" for bound in (5, 60, HANGS_S, float("inf")) if seconds < bound)


def row(number: int, mishap: Mishap, outcome: Outcome) -> str:
    moment = mishap.meddle is not None
    lost = outcome.lost if mishap.lost else "at most what was trained since the last checkpoint"
    words = f"`{mishap.words.replace(str(PORT), 'PORT')}`"
    cells = (number, mishap.what, words, stable(outcome.said, moment), below(outcome.seconds), outcome.code, lost)
    return f"| {' | '.join(map(str, cells))} |"


def test_the_page_is_alike_on_every_writing() -> None:
    def written(key: str, step: int, place: str, seconds: float) -> str:
        said = f"0:{step:02} run 'b' (key {key}): Step {step} is saved at {place}/step-{step}; the {step} after it are lost. {'x' * 99}"
        mishap = Mishap("Ctrl-C", f"run tiny.toml network.port={PORT}", 130, meddle=lambda _: None, lost="")
        return row(1, mishap, Outcome(said, said, seconds, 130, f"{step} steps since the last checkpoint"))

    directory = f"{tempfile.gettempdir()}/tmp"
    assert written("abc2", 7, directory + "a_b", 0.9) == written("zyxw3", 12, directory + "aaaaaa", 4.1)
    assert written("abc2", 7, directory + "a_b", 0.9) != written("abc2", 7, directory + "a_b", 61.0)


def page() -> str:
    rows, wrong = [], []
    for number, mishap in enumerate([*SHORT, *AFTER, *LIVE], 1):
        outcome = tried(mishap, process=True)
        try:
            demand(mishap, outcome)
        except AssertionError as error:
            wrong.append(f"{mishap.what}: {error}")
        rows.append(row(number, mishap, outcome))
        print(rows[-1], flush=True)
    assert not wrong, "\n".join(wrong)
    head = "| | mishap | command | last line | s | exit code | lost |\n|---|---|---|---|---|---|---|"
    return f"""# Wrong inputs and mishaps
What each says last, within how many seconds, with which exit code, and what is lost. None hangs, none prints a traceback, none loses a
checkpoint, and none ends with 0 after a loss. Written by `tests/cli/test_mishaps.py`, which tries each as a process of its own.

{head}
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        train_one(Path(place))
        PAGE.write_text(page())
