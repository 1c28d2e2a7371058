"""A client's part in inference: which replicas a text goes through, what is late, and what is sent again.

The client keeps the tokens, so nothing that a peer holds can be lost: when a replica dies, is silent or has forgotten the text, another
route is chosen and the whole text sent anew. Replicas are chosen as a trainer chooses them (core/trainer/routing.py): the quickest by
measured times, failed ones after a pause. Sampling is the caller's: `predicted` has the likeliest next tokens. Sans-IO; for
runtime/texts.py and the simulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.messages import (
    MOST_POSITIONS,
    Command,
    Generate,
    Note,
    NotServed,
    Passed,
    Peer,
    Predicted,
    Send,
    Settings,
    Standing,
    StandingRequest,
    View,
    Wire,
)
from shoal.core.timers import soonest
from shoal.core.trainer.routing import Routes

if TYPE_CHECKING:
    from random import Random

LOOK_S = 1.0  # between two requests for the view while there is none, or a stage is not served
LOOK_SELDOM_S = 5.0  # the same while all is well
ASKED = 3  # peers at a time
BUSY_S = 0.25  # until a text that was not served is sent again
POSITIONS_OF_HOP = 64  # that take about as long as one position more: a guess, which no deadline below 2 s depends on
REFUSALS = 4  # of one prediction, by replicas in turn, after which it is given up


class Client:
    """One text. `predict` asks for the next token, whose answer is `predicted`; or `refused` says in words why there will be none."""

    def __init__(self, name: Peer, settings: Settings, rng: Random) -> None:
        self.name, self.settings = name, settings
        self.predicted: Predicted | None = None
        self.refused = ""
        self.replays = 0  # times that the text was sent anew because of a failure
        self._rng = rng
        self._session = rng.getrandbits(52)
        self._routes = Routes(settings, rng)
        self._view: View | None = None
        self._known: tuple[Peer, ...] = ()  # peers to ask for the view
        self._look_at = 0.0
        self._tokens: tuple[int, ...] = ()
        self._wanted = 0  # scores of the prediction that is asked for; 0: none is
        self._route: tuple[Peer, ...] = ()
        self._done = 0  # positions that the route holds
        self._call = 0
        self._refusals = 0
        self._sent_at: float | None = None  # when what is under way was sent, or passed its last stage
        self._count = 0  # positions of it
        self._reached = 0  # the stage where it is
        self._retry_at: float | None = None
        self._waits_for = ""  # in words, as last noted

    @property
    def deadline(self) -> float | None:
        late = None if self._sent_at is None else self._sent_at + self._patience()
        return soonest(self._look_at, self._retry_at, late)

    @property
    def stages_ready(self) -> bool:
        return self._view is not None and not self._unserved(self._view)

    # ----------------------------------------------------------------------------------------------------- the caller

    def predict(self, tokens: tuple[int, ...], scores: int, now: float) -> list[Command]:
        """Ask for the `scores` likeliest tokens after `tokens`, the whole text. What it has in common with the text before is not computed
        again when only its end is new."""
        if tokens[: self._done] != self._tokens[: self._done] or self._done >= len(tokens):
            self._done = 0
        self._tokens, self._wanted, self.predicted, self.refused, self._refusals = tokens, scores, None, "", 0
        return self._go_on(now)

    def on_found(self, peers: tuple[Peer, ...], now: float) -> list[Command]:
        """The directory lists these peers of the run."""
        self._known = tuple(peer for peer in peers if peer != self.name)
        return self._look(now) if self._view is None else []

    # ------------------------------------------------------------------------------------------------------- events

    def on_message(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        if isinstance(message, Standing):
            return self._on_view(message.view, now)
        if not isinstance(message, Passed | Predicted | NotServed):
            return []
        current = (message.session, message.call) == (self._session, self._call) and self._sent_at is not None
        if not current or peer not in self._route:
            return []
        match message:
            case NotServed():
                return self._on_not_served(message, now)
            case Passed(stage=stage) if self._reached <= stage < len(self._route) - 1 and self._route[stage] == peer:
                self._passed(stage, now)
            case Predicted() if peer == self._route[-1]:
                self._passed(len(self._route) - 1, now)
                return self._on_predicted(message, now)
        return []

    def on_unreachable(self, peer: Peer, now: float) -> list[Command]:
        if self._sent_at is None or peer not in self._route[self._reached :]:
            return []
        self._routes.failed(peer, now)
        return self._replay(f"{peer} cannot be reached", now)

    def tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        if self._sent_at is not None and now >= self._sent_at + self._patience():
            late = self._route[self._reached]
            self._routes.slow(late, now - self._sent_at, self._size, now)
            self._routes.failed(late, now)
            commands += self._replay(f"{late} has not answered for {now - self._sent_at:.1f} s", now)
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            commands += self._go_on(now)
        return commands + (self._look(now) if now >= self._look_at else [])

    # ------------------------------------------------------------------------------------------------------- routes

    def _on_view(self, view: View, now: float) -> list[Command]:
        old = self._view
        if old is not None and (view.epoch, view.number) <= (old.epoch, old.number):
            return []
        self._view = view
        members = tuple(member for member in view.members if member.stage < self.settings.stages)
        self._routes.on_view(members, now)
        serving = {member.peer: member.stage for member in members}
        if self._sent_at is not None:
            lost = [peer for stage, peer in enumerate(self._route) if serving.get(peer) != stage]
            return self._replay(f"{lost[0]} has left the run", now) if lost else []
        return self._go_on(now) if self._retry_at is None else []

    def _unserved(self, view: View) -> list[int]:
        return sorted(set(range(self.settings.stages)) - {member.stage for member in view.members})

    def _choose(self, now: float) -> tuple[Peer, ...]:
        """A replica of each stage; () where there is none for one of them."""
        route = []
        for stage in range(self.settings.stages):
            chosen = self._routes.choose(stage, now)
            if chosen is None:
                return ()
            route.append(chosen[0])
        return tuple(route)

    def _look(self, now: float) -> list[Command]:
        """Ask some peers for their view."""
        self._look_at = now + (LOOK_SELDOM_S if self._sent_at is not None or not self._wanted else LOOK_S)
        members = tuple(member.peer for member in self._view.members) if self._view is not None else ()
        peers = [peer for peer in dict.fromkeys(members or self._known) if peer != self.name]
        asked = self._rng.sample(peers, min(ASKED, len(peers)))
        return [Send(peer, StandingRequest()) for peer in asked]

    # ------------------------------------------------------------------------------------------------------ the text

    def _go_on(self, now: float) -> list[Command]:
        """Send the next positions, if anything is asked for and nothing is under way."""
        if not self._wanted or self._sent_at is not None or self._view is None:
            return self._wait("the run's peers") if self._wanted and self._view is None else []
        if unserved := self._unserved(self._view):
            return self._wait(f"a peer that serves stage {unserved[0]}")
        commands = self._wait("")
        serving = {member.peer: member.stage for member in self._view.members}
        if not self._done or any(serving.get(peer) != stage for stage, peer in enumerate(self._route)):
            self._route, self._done = self._choose(now), 0
        if not self._route:
            self._retry_at = now + BUSY_S
            return commands
        chunk = self._tokens[self._done : self._done + MOST_POSITIONS]
        last = self._done + len(chunk) == len(self._tokens)
        self._call += 1
        self._sent_at, self._count, self._reached = now, len(chunk), 0
        scores = self._wanted if last else 0
        request = Generate(self._session, self._call, self._done, chunk, self._route, scores)
        first = (
            () if self._done else tuple(Send(peer, StandingRequest()) for peer in self._route[1:])
        )  # opens connections
        return [*commands, *first, Send(self._route[0], request)]

    def _passed(self, stage: int, now: float) -> None:
        """The text is through that stage."""
        assert self._sent_at is not None
        if stage == self._reached:  # an earlier receipt may come later than this one
            self._routes.answered(self._route[stage], now - self._sent_at, self._size, now)
        self._sent_at, self._reached = now, min(stage + 1, len(self._route) - 1)

    def _on_predicted(self, message: Predicted, now: float) -> list[Command]:
        self._sent_at, self._done = None, self._done + self._count
        if self._done < len(self._tokens):
            return self._go_on(now)
        if len(message.tokens) != len(message.scores) or not message.tokens:
            self._routes.failed(self._route[-1], now)
            return self._replay(f"{self._route[-1]} predicts nothing", now)
        self.predicted, self._wanted = message, 0
        return []

    def _on_not_served(self, message: NotServed, now: float) -> list[Command]:
        peer = self._route[min(message.stage, len(self._route) - 1)]
        words = f"{peer}: {message.reason}"
        match message.kind:
            case "busy":
                self._routes.busy(peer, BUSY_S, self._size, now)
            case "elsewhere":
                self._routes.failed(peer, now)
                self._look_at = now
            case "refused":
                self._routes.failed(peer, now)
                self._refusals += 1
                if self._refusals >= REFUSALS:
                    self._sent_at, self._done, self._wanted, self.refused = None, 0, 0, message.reason
                    return []
        self._sent_at, self._done, self._retry_at = None, 0, now + BUSY_S
        self.replays += 1
        return [Note("route", f"{words}; the text is sent again")]

    def _replay(self, why: str, now: float) -> list[Command]:
        """Choose a route again and send it the whole text."""
        self._sent_at, self._done, self._look_at = None, 0, now
        self.replays += 1
        return [Note("route", f"{why}: the text is sent again by another route"), *self._go_on(now)]

    def _patience(self) -> float:
        return self._routes.patience(self._route[self._reached], self._size)

    @property
    def _size(self) -> float:
        """Of what is under way, in hops of one position."""
        return 1.0 + self._count / POSITIONS_OF_HOP

    def _wait(self, what: str) -> list[Command]:
        """Say once what is waited for."""
        if what == self._waits_for:
            return []
        self._waits_for = what
        return [Note("stall", f"waiting for {what}")] if what else []
