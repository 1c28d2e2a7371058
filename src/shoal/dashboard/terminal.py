"""The live view of a run: step, loss, tokens/s, the stages with their peers and load, the latest events with their reasons.

For `shoal run` and `shoal status`, which pass Snapshots, plain values. A terminal shows one screen, redrawn with each
snapshot; other outputs (a pipe, a CI log) get each new event once and a line of progress every few seconds.
"""

from __future__ import annotations

from types import TracebackType

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal import units
from shoal.dashboard import plot
from shoal.dashboard.account import HeldOut
from shoal.escaping import escaped, escaped_lines
from shoal.traffic import KINDS, StoredBytes, Traffic

PLAIN_EVERY_S = 5.0  # between lines of progress when there is no terminal
_EVENTS_MIN = 3
_CURVE_ROWS = 5
WIDE = 100  # columns of the table of bytes sent together with bytes held
_STYLES = {
    "commit": "dim",
    "removed": "red",
    "trouble": "red",
    "unsaved": "bold red",
    "stopped": "bold red",
    "refused": "red",
    "stall": "yellow",
    "skipped": "bold red",
    "spike": "yellow",
    "network": "yellow",
    "recovered": "yellow",
    "joined": "green",
}


class PeerLine(msgspec.Struct, frozen=True):
    """One peer in its stage's line."""

    label: str  # a short name, unique on the screen
    stage: int | None = None  # None: not assigned yet
    ready: bool = False  # its parameters are those of the step being trained
    leading: bool = False
    queue_s: float = 0.0  # seconds of work waiting there
    rate: float = 0.0  # microbatches per second when busy
    sent: Traffic = Traffic()
    received: Traffic = Traffic()
    kept: StoredBytes = StoredBytes()
    silent_s: float = 0.0  # since its process reported; of one that has ended: since then
    ended: str = ""  # "left": in good order; "gone": it died or was killed
    slow: str = ""  # why it is called slow
    join_s: float = 0.0  # from its start until it was ready; 0: not known, or not yet
    machine: str = ""  # another machine's peer: its address; its rate and bytes are not known here
    region: str = ""  # where its machine is; '' is not known


class Happening(msgspec.Struct, frozen=True):
    """A decision and its reason. `serial` numbers them within the run, so that each is printed once."""

    serial: int
    elapsed_s: float
    kind: str  # as in core.messages.Note
    text: str
    label: str = ""  # of the peer it concerns or that decided


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    name: str
    elapsed_s: float
    step: int  # committed so far
    steps: int  # 0: nothing is trained
    stages: int  # 0: a machine alone, without peers
    state: str = ""  # shown while no step is trained: 'waiting for 2 more peers', 'writing ...'
    stopped: str = ""  # since when and why nothing can be trained, or that the run is dead
    advice: str = ""  # what to do then
    survives: str = ""  # how many losses the run survives now
    first_step: int = 0  # where this run (or its resumption) started
    losses: tuple[float, ...] = ()  # of the committed steps
    heldout: HeldOut | None = None  # as last measured, and the best
    reward_accuracy: float | None = None  # of the newest step's preference pairs
    tokens_per_s: float = 0.0
    step_s: float = 0.0  # between two recent commits; 0: fewer than two of this session
    issued: int = 0
    committed: int = 0
    redone: int = 0
    counted_twice: int = 0
    lost: int = 0  # microbatches of committed steps that a stage lacks
    undone: int = 0  # microbatches, by going back to a checkpoint
    skipped: int = 0  # of those committed, in steps that changed nothing
    joined: int = 0  # peers, while it ran
    recovered: int = 0  # times gone back,
    evictions_undone: int = 0  # some of them since an evicted peer had contributed false values
    gone_back_s: float = 0.0  # what that has cost in this session
    staleness: int = 0  # run's train.staleness
    peers: tuple[PeerLine, ...] = ()
    ended: tuple[PeerLine, ...] = ()  # this machine's peers that have ended lately, the newest first
    sent: Traffic = Traffic()  # by all peers, former ones included
    unsaved: str = ""  # the checkpoint that could not be saved, since when and why
    happenings: tuple[Happening, ...] = ()  # oldest first; the last few dozen are enough

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds to the end, from the pace of recent commits; None: unknown."""
        return (self.steps - self.step) * self.step_s if self.step_s > 0 else None

    @property
    def stage_rates(self) -> tuple[float, ...]:
        """Microbatches per second that the ready peers of each stage pass when busy."""
        rates = [0.0] * self.stages
        for peer in self.peers:
            if peer.ready and peer.stage is not None and peer.stage < self.stages:
                rates[peer.stage] += peer.rate
        return tuple(rates)

    @property
    def bottleneck(self) -> int | None:
        """The stage with the least rate; None: a stage's rate is not known, or there is only one."""
        rates, unknown = self.stage_rates, any(peer.machine for peer in self.peers)
        return rates.index(min(rates)) if self.stages > 1 and not unknown and min(rates) > 0 else None


class Terminal:
    """A context manager; call `show` with each new snapshot."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(highlight=False)
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        )
        self._plain = ProgressLines()

    def __enter__(self) -> Terminal:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print lines that stay, whole, above the live screen."""
        self._console.print(escaped_lines(text), markup=False, soft_wrap=True)

    def show(self, snapshot: Snapshot) -> None:
        if self._live is not None:
            size = self._console.size
            self._live.update(render(snapshot, size.width, size.height), refresh=True)
            return
        for line in self._plain.lines(snapshot):
            self._console.print(line, markup=False, soft_wrap=True)


class ProgressLines:
    """The lines to print for each Snapshot where there is no terminal."""

    def __init__(self) -> None:
        self._serial = -1
        self._printed_s = float("-inf")
        self._step = -1
        self._state = ""

    def lines(self, snapshot: Snapshot) -> list[str]:
        new_events = [event for event in snapshot.happenings if event.serial > self._serial]
        # The line of progress shows commits, every few seconds instead of once a step.
        lines = [_event_line(event) for event in new_events if event.kind != "commit"]
        self._serial = max([self._serial, *(event.serial for event in new_events)])
        due = snapshot.elapsed_s >= self._printed_s + PLAIN_EVERY_S
        ended = snapshot.step >= snapshot.steps
        state = snapshot.stopped or snapshot.state
        if (snapshot.step != self._step and (due or ended)) or state != self._state:
            lines.append(headline(snapshot))
            self._printed_s, self._step, self._state = snapshot.elapsed_s, snapshot.step, state
        return lines


def headline(snapshot: Snapshot) -> str:
    """The run in one line."""
    words = [
        f"{snapshot.name}: " + (f"step {snapshot.step:,}/{snapshot.steps:,}" if snapshot.steps else "serves texts")
    ]
    if snapshot.losses:
        words.append(f"loss {snapshot.losses[-1]:.3f}")
    if snapshot.reward_accuracy is not None:
        words.append(f"accuracy {snapshot.reward_accuracy:.1%}")
    if snapshot.heldout is not None:
        words.append(f"held out {snapshot.heldout.loss:.3f} at step {snapshot.heldout.step:,}")
    if snapshot.tokens_per_s > 0:
        words.append(f"{snapshot.tokens_per_s:,.0f} tokens/s")
    if snapshot.stages:
        words.append(_count(snapshot.peers))
    if snapshot.staleness:
        words.append(f"gradients {snapshot.staleness} step late")
    if snapshot.redone:
        words.append(f"{snapshot.redone:,} redone")
    if snapshot.recovered:
        words.append(_undone(snapshot))
    if snapshot.unsaved:
        words.append(snapshot.unsaved.partition(":")[0])
    words.append(units.duration(snapshot.elapsed_s))
    if snapshot.stopped:
        words.append(snapshot.stopped)
    elif snapshot.remaining_s is not None and snapshot.step < snapshot.steps:
        words.append(f"about {units.duration(snapshot.remaining_s)} to go")
    if snapshot.state:
        words.append(snapshot.state)
    return escaped(", ".join(words))


def _undone(snapshot: Snapshot) -> str:
    details = [f"went back {snapshot.recovered:,}x"]
    if snapshot.evictions_undone:
        details.append(f"{snapshot.evictions_undone:,}x for evicted peers")
    if snapshot.gone_back_s > 0:
        details.append(f"{units.duration(snapshot.gone_back_s)} lost")
    return f"{snapshot.undone:,} undone ({', '.join(details)})"


def _count(peers: tuple[PeerLine, ...]) -> str:
    machines = {peer.machine for peer in peers}
    return f"{len(peers)} peer{'' if len(peers) == 1 else 's'}" + (
        f" on {len(machines)} machines" if len(machines) > 1 else ""
    )


def rows(snapshot: Snapshot) -> int:
    """Height at which `render` shows everything but old events."""
    return 30 + snapshot.stages + 3 * (len(snapshot.peers) + 1)


def render(snapshot: Snapshot, width: int, height: int) -> RenderableType:
    """One screen of `width` columns, the most important lines first; lines below `height` are left out."""
    parts: list[RenderableType] = [
        Text(headline(snapshot), style="bold", no_wrap=True, overflow="ellipsis"),
        _bar(snapshot.step / max(1, snapshot.steps), width),
    ]
    room = height - 3  # headline, bar and one line kept free
    if snapshot.stopped:
        whole = _whole(f"{snapshot.stopped}. {snapshot.advice}", _STYLES["stopped"], width, room)  # with its command
        parts += whole
        room -= len(whole)
    if snapshot.unsaved:
        parts.append(Text(escaped(snapshot.unsaved), style=_STYLES["unsaved"], no_wrap=True, overflow="ellipsis"))
        room -= 1
    if snapshot.stages:
        stages = _stages(snapshot)
        parts.append(stages)
        room -= 1 + stages.row_count
    if snapshot.survives:
        whole = _whole(snapshot.survives, "dim", width, room)  # its end says what a loss costs
        parts += whole
        room -= len(whole)
    if snapshot.sent.total and room > 1:
        parts.append(Text(traffic_line(snapshot.sent), style="dim", no_wrap=True, overflow="ellipsis"))
        room -= 1
        lines = len(snapshot.peers) + 1
        for table in _tables(snapshot, width):
            if room >= lines + _EVENTS_MIN + _CURVE_ROWS:
                parts.append(table)
                room -= lines
    if room >= _EVENTS_MIN + _CURVE_ROWS and len(snapshot.losses) > 1:
        parts.append(Text(plot.curve(snapshot.losses, width - 1, _CURVE_ROWS), style="cyan", no_wrap=True))
        room -= _CURVE_ROWS
    for event in snapshot.happenings[-room:] if room > 0 else ():
        style = _STYLES.get(event.kind, "")
        parts.append(Text(_event_line(event), style=style, no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _whole(text: str, style: str, width: int, room: int) -> list[Text]:
    """Text that has to be read whole, in as many lines as it needs and there is room for."""
    return list(Text(escaped(text), style=style).wrap(Console(width=width), width))[: max(1, room - 1)]


def _bar(fraction: float, width: int) -> Text:
    full = round(min(1.0, fraction) * width)
    return Text.assemble(("━" * full, "green"), ("━" * (width - full), "dim"), no_wrap=True, overflow="crop")


def _stages(snapshot: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("stage", "mb/s", "waiting"):
        table.add_column(title, justify="right", no_wrap=True, min_width=len(title))
    table.add_column("peers  (* leads, ~ loading)", no_wrap=True, overflow="ellipsis")
    for stage in [*range(snapshot.stages), None]:
        peers = [peer for peer in snapshot.peers if peer.stage == stage]
        if stage is not None or peers:
            table.add_row("-" if stage is None else str(stage), *_stage_cells(peers))
    return table


def _stage_cells(peers: list[PeerLine]) -> tuple[str, str, Text]:
    rate = sum(peer.rate for peer in peers if peer.ready)
    queue_s = max((peer.queue_s for peer in peers), default=0.0)
    names = "  ".join(_peer_label(peer) for peer in peers) or "nobody"
    return (
        f"{rate:.1f}" if rate else "",
        units.duration(queue_s) if queue_s else "",
        Text(names, style="" if peers else "red"),
    )


def traffic_line(sent: Traffic) -> str:
    """Bytes by kind in one line."""
    words = ", ".join(f"{kind} {units.size(getattr(sent, kind))}" for kind in KINDS if getattr(sent, kind))
    return f"sent {units.size(sent.total)}: {words}"


def _tables(snapshot: Snapshot, width: int) -> list[Table]:
    """Tables of each peer's bytes: sent by kind, received by kind, and stored; side by side where they fit."""
    peers = tuple(peer for peer in snapshot.peers if not peer.machine)
    sent = {kind: [getattr(peer.sent, kind) for peer in peers] for kind in KINDS}
    received = {kind: [getattr(peer.received, kind) for peer in peers] for kind in KINDS}
    sent["received"] = [peer.received.total for peer in peers]
    stored = {name: [getattr(peer.kept, name) for peer in peers] for name in StoredBytes.__struct_fields__}
    if width >= WIDE:
        return [_bytes("sent by", peers, sent | stored), _bytes("received by", peers, received)]
    narrow = [_bytes("held by", peers, stored)] if any(map(any, stored.values())) else []
    return [_bytes("sent by", peers, sent), *narrow, _bytes("received by", peers, received)]


def _bytes(title: str, peers: tuple[PeerLine, ...], columns: dict[str, list[int]]) -> Table:
    """A table of bytes per peer, without empty columns."""
    shown = {name: figures for name, figures in columns.items() if any(figures)}
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(title, no_wrap=True, overflow="ellipsis")
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True, overflow="ellipsis")
    for place, peer in enumerate(peers):
        table.add_row(escaped(peer.label), *(units.size(figures[place]) for figures in shown.values()))
    return table


def _peer_label(peer: PeerLine) -> str:
    machine = f"@{peer.machine}" if peer.machine else ""
    return escaped(f"{peer.label}{machine}{'*' if peer.leading else ''}{'' if peer.ready else '~'}")


def _event_line(event: Happening) -> str:
    minutes, seconds = divmod(int(event.elapsed_s), 60)
    label = f"{event.label}: " if event.label else ""
    return escaped(f"{minutes:3d}:{seconds:02d}  {event.kind:<10} {label}{' '.join(event.text.split())}")
