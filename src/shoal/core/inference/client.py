"""A client's part in inference: which replicas a text goes through, what is late, and what is sent again.

The client keeps the tokens, so nothing that a peer holds can be lost: when a replica dies, is silent or has forgotten the text, another
route is chosen and the whole text sent anew. Replicas are chosen as a trainer chooses them (core/trainer/routing.py): the quickest by
measured times, failed ones after a pause. Sampling is the caller's: `predicted` has the likeliest next tokens. Sans-IO; for
runtime/texts.py and the simulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shoal.core.messages import (
    MOST_POSITIONS,
    Command,
    Generate,
    Member,
    Note,
    NotServed,
    Passed,
    Peer,
    Predicted,
    Send,
    Settings,
    Standing,
    StandingRequest,
    TextPending,
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
REFUSALS = 4  # of one prediction, by replicas in turn, after which it is given up


class Text(msgspec.Struct):
    """What is asked for. `done`: positions whose keys and values the route holds."""

    tokens: tuple[int, ...] = ()
    wanted: int = 0  # scores of the prediction that is asked for; 0: none is
    done: int = 0
    refusals: int = 0  # of this prediction


class UnderWay(msgspec.Struct):
    """The request that is not answered yet."""

    sent_at: float  # or when it passed the stage before `reached`
    heard_at: float
    count: int  # positions
    reached: int = 0  # the stage where it is


class Lookout:
    """The view, and the peers that are asked for it."""

    def __init__(self, name: Peer, stages: int, rng: Random) -> None:
        self.view: View | None = None
        self.known: tuple[Peer, ...] = ()  # as the directory lists them
        self.look_at = 0.0
        self._name, self._stages, self._rng = name, stages, rng

    @property
    def serving(self) -> dict[Peer, int]:
        """Stages by peer."""
        return {member.peer: member.stage for member in self.members}

    @property
    def members(self) -> tuple[Member, ...]:
        everyone = self.view.members if self.view is not None else ()
        return tuple(member for member in everyone if member.stage < self._stages)

    @property
    def unserved(self) -> list[int]:
        return sorted(set(range(self._stages)) - {member.stage for member in self.members})

    def take(self, view: View) -> bool:
        """Whether it is news."""
        if self.view is not None and (view.epoch, view.number) <= (self.view.epoch, self.view.number):
            return False
        self.view = view
        return True

    def look(self, again_at: float) -> list[Command]:
        """Ask some peers for their view."""
        self.look_at = again_at
        peers = [peer for peer in dict.fromkeys(tuple(self.serving) or self.known) if peer != self._name]
        return [Send(peer, StandingRequest()) for peer in self._rng.sample(peers, min(ASKED, len(peers)))]


class Client:
    """One text. `predict` asks for the next token, whose answer is `predicted`; or `refused` says in words why there will be none."""

    def __init__(self, name: Peer, settings: Settings, rng: Random) -> None:
        self.settings = settings
        self.predicted: Predicted | None = None
        self.refused = ""
        self.route: tuple[Peer, ...] = ()  # by stage
        self.replays = 0  # times that the text was sent anew because of a failure
        self._session = rng.getrandbits(52)
        self._routes = Routes(settings, rng)
        self._peers = Lookout(name, settings.stages, rng)
        self._text = Text()
        self._call = 0
        self._under_way: UnderWay | None = None
        self._retry_at: float | None = None
        self._waits_for = ""  # in words, as last noted

    @property
    def deadline(self) -> float | None:
        late = None if self._under_way is None else self._under_way.heard_at + self._patience(self._under_way)
        return soonest(self._peers.look_at, self._retry_at, late)

    @property
    def ready(self) -> bool:
        """Every stage is served, as far as is known."""
        return not self._peers.unserved

    # ----------------------------------------------------------------------------------------------------- the caller

    def predict(self, tokens: tuple[int, ...], scores: int, now: float) -> list[Command]:
        """Ask for the `scores` likeliest tokens after `tokens`, the whole text. What it has in common with the text before is not computed
        again when only its end is new."""
        done = self._text.done
        if tokens[:done] != self._text.tokens[:done] or done >= len(tokens) or self._under_way is not None:
            done = 0
        self._text, self._under_way = Text(tokens, scores, done), None
        self.predicted, self.refused = None, ""
        return self._go_on(now)

    def on_found(self, peers: tuple[Peer, ...], now: float) -> list[Command]:
        """The directory lists these peers of the run."""
        self._peers.known = peers
        return self._look(now) if self._peers.view is None else []

    # ------------------------------------------------------------------------------------------------------- events

    def on_message(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        if isinstance(message, Standing):
            return self._on_view(message.view, now)
        if not isinstance(message, Passed | TextPending | Predicted | NotServed):
            return []
        if (message.session, message.call) != (self._session, self._call) or peer not in self.route:
            return []
        way = self._under_way
        if way is None:
            return []
        match message:
            case NotServed():
                return self._on_not_served(message, way, now)
            case Passed(stage=stage) if way.reached <= stage < len(self.route) - 1 and self.route[stage] == peer:
                self._passed(way, stage, now)
            case TextPending(stage=stage) if way.reached <= stage < len(self.route) and self.route[stage] == peer:
                way.heard_at = now
            case Predicted() if peer == self.route[-1]:
                self._passed(way, len(self.route) - 1, now)
                return self._on_predicted(message, way, now)
        return []

    def on_unreachable(self, peer: Peer, now: float) -> list[Command]:
        if self._under_way is None or peer not in self.route[self._under_way.reached :]:
            return []
        self._routes.failed(peer, now)
        return self._replay(f"{peer} cannot be reached", now)

    def tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        way = self._under_way
        if way is not None and now >= way.heard_at + self._patience(way):
            late, silent_s = self.route[way.reached], now - way.heard_at
            self._routes.slow(late, silent_s, 1.0, now)
            self._routes.failed(late, now)
            commands += self._replay(f"{late} has not answered for {silent_s:.1f} s", now)
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            commands += self._go_on(now)
        return commands + (self._look(now) if now >= self._peers.look_at else [])

    # ------------------------------------------------------------------------------------------------------- routes

    def _on_view(self, view: View, now: float) -> list[Command]:
        if not self._peers.take(view):
            return []
        self._routes.on_view(self._peers.members, now)
        if self._under_way is not None:
            lost = self._lost()
            return self._replay(f"{lost[0]} has left the run", now) if lost else []
        return self._go_on(now) if self._retry_at is None else []

    def _lost(self) -> list[Peer]:
        """Peers of the route that do not serve their stage any more."""
        serving = self._peers.serving
        return [peer for stage, peer in enumerate(self.route) if serving.get(peer) != stage]

    def _choose(self, now: float) -> tuple[Peer, ...]:
        """A replica of each stage; () where none can be chosen now."""
        chosen = [self._routes.choose(stage, now) for stage in range(self.settings.stages)]
        return tuple(choice[0] for choice in chosen if choice is not None) if None not in chosen else ()

    def _look(self, now: float) -> list[Command]:
        calm = self._under_way is not None or not self._text.wanted
        return self._peers.look(now + (LOOK_SELDOM_S if calm else LOOK_S))

    # ------------------------------------------------------------------------------------------------------ the text

    def _go_on(self, now: float) -> list[Command]:
        """Send the next positions, if anything is asked for and nothing is under way."""
        text = self._text
        if not text.wanted or self._under_way is not None:
            return []
        if self._peers.view is None:
            return self._wait("the run's peers")
        if unserved := self._peers.unserved:
            return self._wait(f"a peer that serves stage {unserved[0]}")
        commands = self._wait("")
        if not text.done or self._lost():
            self.route, text.done = self._choose(now), 0
        if not self.route:
            self._retry_at = now + BUSY_S
            return commands
        chunk = text.tokens[text.done : text.done + MOST_POSITIONS]
        scores = text.wanted if text.done + len(chunk) == len(text.tokens) else 0
        self._call += 1
        self._under_way = UnderWay(now, now, len(chunk))
        request = Generate(self._session, self._call, text.done, chunk, self.route, scores)
        if not text.done:  # connections by which the others answer
            commands += [Send(peer, StandingRequest()) for peer in self.route[1:]]
        return [*commands, Send(self.route[0], request)]

    def _passed(self, way: UnderWay, stage: int, now: float) -> None:
        """The text is through that stage."""
        if stage == way.reached:  # an earlier receipt may come later than this one
            self._routes.answered(self.route[stage], now - way.sent_at, 1.0, now)
        way.sent_at, way.heard_at, way.reached = now, now, min(stage + 1, len(self.route) - 1)

    def _on_predicted(self, message: Predicted, way: UnderWay, now: float) -> list[Command]:
        text, self._under_way = self._text, None
        text.done += way.count
        if text.done < len(text.tokens):
            return self._go_on(now)
        if len(message.tokens) != len(message.scores) or not message.tokens:
            self._routes.failed(self.route[-1], now)
            return self._replay(f"{self.route[-1]} predicts nothing", now)
        self.predicted, text.wanted = message, 0
        return []

    def _on_not_served(self, message: NotServed, way: UnderWay, now: float) -> list[Command]:
        peer, text = self.route[min(message.stage, len(self.route) - 1)], self._text
        self._under_way, text.done = None, 0
        match message.kind:
            case "busy":
                self._routes.busy(peer, BUSY_S, 1.0, now)
            case "elsewhere":
                self._routes.failed(peer, now)
                self._peers.look_at = now
            case "refused":
                self._routes.failed(peer, now)
                text.refusals += 1
                if text.refusals >= REFUSALS:
                    text.wanted, self.refused = 0, message.reason
                    return []
        self._retry_at = now + BUSY_S
        self.replays += 1
        return [Note("route", f"{peer}: {message.reason}; the text is sent again")]

    def _replay(self, why: str, now: float) -> list[Command]:
        """Choose a route again and send it the whole text."""
        self._under_way, self._text.done, self._peers.look_at = None, 0, now
        self.replays += 1
        return [Note("route", f"{why}: the text is sent again by another route"), *self._go_on(now)]

    def _patience(self, way: UnderWay) -> float:
        return self._routes.patience(self.route[way.reached], 1.0)

    def _wait(self, what: str) -> list[Command]:
        """Say once what is waited for."""
        if what == self._waits_for:
            return []
        self._waits_for = what
        return [Note("stall", f"waiting for {what}")] if what else []
