"""What the peers' reports add up to, through a loss that sends the run back to its checkpoint, and when there is no hope."""

from __future__ import annotations

import msgspec
import pytest

from shoal.config import Config
from shoal.core.messages import Account, Committed, Member, Phase, Share, View
from shoal.dashboard.terminal import headline
from shoal.launcher.watching.members import Members
from shoal.launcher.watching.watch import COMMITS, Resumed, RunMonitor
from shoal.runtime.records.report import Agreed, Listening, Located, Notice, PeerProgress, decode, encode
from shoal.traffic import StoredBytes, Traffic

CONFIG = msgspec.structs.replace(Config(), run=msgspec.structs.replace(Config().run, stages=2, steps=4))
MICROBATCHES = CONFIG.train.batch // CONFIG.train.microbatch
ALL = tuple(range(MICROBATCHES))
MEMBERS = (Member("a", 0), Member("b", 0), Member("c", 1), Member("d", 1))


def a_view(number: int, step: int, epoch: int = 0, undone: int = 0, loss: float | None = None) -> View:
    """At `step`; with `loss`, it commits the step before."""
    done = MICROBATCHES * step
    groups = ((Share("a", ALL), Share("b", ())), (Share("c", ALL), Share("d", ())))
    last = None if loss is None else Committed(step - 1, number, 1.0, loss, ("x", "y"), groups)
    account = Account(issued=done, committed=done, undone=MICROBATCHES * undone)
    return View(
        number,
        step,
        MEMBERS,
        phase=Phase.GATHERING if loss is None else Phase.TRAINING,
        epoch=epoch,
        last=last,
        account=account,
    )


HISTORY = (
    a_view(1, 1, loss=5.0),
    a_view(2, 2, loss=4.0),
    a_view(3, 3, loss=3.0),
    a_view(4, 1, epoch=1, undone=2),
    a_view(5, 2, epoch=1, undone=2, loss=4.5),
)


def a_watch(*views: View) -> RunMonitor:
    watch = RunMonitor(CONFIG, 0.0, Resumed())
    for n, member in enumerate(MEMBERS):
        watch.hear(f"p{n}", Listening(member.peer, ()), 0.0)
        watch.hear(f"p{n}", PeerProgress(member.peer, ready=n != 3), 0.0)
    for n, view in enumerate(views):
        watch.hear("p0", Agreed(float(n), view), 1.0 + n)
    return watch


def test_a_step_trained_again_has_one_loss_and_it_is_the_later_one() -> None:
    assert a_watch(*HISTORY[:3]).losses() == (5.0, 4.0, 3.0)
    watch = a_watch()
    seen = []
    for view in HISTORY:
        watch.hear("p0", Agreed(0.0, view), 1.0)
        seen.append(watch.losses())  # also while as many steps stand as before
    assert seen == [(5.0,), (5.0, 4.0), (5.0, 4.0, 3.0), (5.0,), (5.0, 4.5)]


def test_summary_and_view_tell_what_was_undone() -> None:
    watch = a_watch(*HISTORY)
    summary, snapshot = watch.summary(10.0), watch.snapshot(10.0)
    assert summary.balanced, summary.reason
    assert (summary.steps, summary.committed) == (2, 2 * MICROBATCHES)
    assert (summary.undone, summary.recovered) == (2 * MICROBATCHES, 1)
    assert (snapshot.undone, snapshot.recovered, snapshot.step) == (2 * MICROBATCHES, 1, 2)
    assert summary.first_step_s == 1.0
    assert summary.gone_back_s == snapshot.gone_back_s == 4.0  # from the commit of step 0 to the second one of step 1


def test_bytes_are_summed_over_the_living_and_the_dead() -> None:
    watch = a_watch(*HISTORY)
    watch.hear(
        "p0",
        PeerProgress("a", sent=Traffic(10, 20, 30, 40, 50), received=Traffic(activations=7), kept=StoredBytes(1, 2, 3)),
        1.0,
    )
    watch.hear("p1", PeerProgress("b", sent=Traffic(activations=1)), 1.0)
    watch.hear(
        "p1", PeerProgress("b", sent=Traffic(activations=5), kept_most=StoredBytes(4, 5, 6)), 2.0
    )  # since it began, not since the last line
    watch.remove("p1", 3.0, well=False)
    summary, snapshot = watch.summary(10.0), watch.snapshot(10.0)
    assert summary.sent == snapshot.sent == Traffic(15, 20, 30, 40, 50)
    assert summary.traffic["p1"].sent == Traffic(activations=5)
    assert (snapshot.peers[0].kept, summary.traffic["p1"].kept) == (StoredBytes(1, 2, 3), StoredBytes(4, 5, 6))
    assert summary.traffic["p0"].received == Traffic(activations=7)
    assert [peer.sent.total for peer in snapshot.peers] == [150, 0, 0]


def test_a_run_that_went_back_says_so_until_it_trains_again() -> None:
    assert a_watch(*HISTORY[:4]).snapshot(9.0).state == "back at step 1, a stage was lost: 3 of 4 peers ready"
    assert a_watch(*HISTORY).snapshot(9.0).state == ""


def test_a_run_that_its_members_gave_up_is_ended_and_says_why() -> None:
    failed = msgspec.structs.replace(HISTORY[3], number=5, phase=Phase.FAILED, reason="no 1 is whole")
    watch = a_watch(*HISTORY[:4], failed)
    assert watch.finished and watch.snapshot(9.0).state == "ended"
    assert watch.failed == "no 1 is whole" and a_watch(*HISTORY).failed == ""


@pytest.mark.parametrize(("living", "hopeless"), [("0123", False), ("012", False), ("01", True), ("", True)])
def test_without_a_majority_of_living_members_there_is_no_hope(living: str, hopeless: bool) -> None:
    assert a_watch(*HISTORY).hopeless({f"p{n}" for n in living} | {"p9"}) is hopeless
    assert not a_watch().hopeless(set()), "before training nobody is missed"


def test_a_member_on_another_machine_is_thought_to_live() -> None:
    watch = a_watch(*HISTORY)
    del watch.labels["c"], watch.labels["d"]
    assert not watch.hopeless({"p0"})


def test_names_of_other_machines_peers_are_shortened_for_people() -> None:
    watch = RunMonitor(CONFIG, 0.0, Resumed())
    watch.tell("removed", f"{'abcdef' + 'g' * 26}.18c1f0.q7wzkdmabcde.16 silent for 4.2 s, and so is {'b' * 32}.9", 1.0)
    assert watch.happenings[-1].text == "abcdef silent for 4.2 s, and so is bbbbbb"


def saving(number: int, step: int, saved: int) -> View:
    """At `step`, whose checkpoint is due; the newest that is whole is of step `saved`."""
    view = a_view(number, step, loss=2.0)
    assert view.last is not None
    return msgspec.structs.replace(view, saved=saved, last=msgspec.structs.replace(view.last, save=True))


def test_what_could_not_be_saved_is_said_until_a_checkpoint_is_saved() -> None:
    watch = a_watch(saving(1, 1, 0))
    assert watch.unsaved() == "", "it may still be written"
    watch.hear("p0", Notice(0.0, "a", "unsaved", "NOT 1: b: full"), 2.0)
    assert watch.unsaved() == "NOTHING SAVED YET: a checkpoint was due at step 1: NOT 1: p1: full"
    assert watch.snapshot(3.0).unsaved == watch.unsaved()
    watch.hear("p0", Agreed(4.0, saving(2, 2, 0)), 4.0)
    assert watch.unsaved()
    watch.hear("p0", Notice(5.0, "a", "checkpoint", "step 2 saved at /x/step-2"), 5.0)
    watch.hear("p0", Agreed(6.0, saving(3, 3, 2)), 6.0)
    assert watch.unsaved() == ""
    summary = watch.summary(7.0)
    assert summary.saved == 2 and summary.unsaved.startswith(
        "NOTHING SAVED SINCE STEP 2: a checkpoint was due at step 3"
    )
    watch.hear("p0", Agreed(8.0, msgspec.structs.replace(saving(4, 3, 3), last=None, phase=Phase.FINISHED)), 8.0)
    assert watch.summary(9.0).unsaved == ""


def test_a_guest_whose_leader_is_elsewhere_sees_that_nothing_is_saved() -> None:
    watch = a_watch(saving(1, 1, 0), saving(2, 2, 0))
    assert watch.unsaved().startswith("NOTHING SAVED YET: a checkpoint was due at step 2")


def test_a_checkpoint_that_is_not_due_is_not_missed() -> None:
    assert a_watch(*HISTORY).summary(1.0).unsaved == ""


def test_the_time_to_go_counts_committed_steps_and_no_start_up() -> None:
    """The first commit comes a minute after the command, the others every second."""
    watch = a_watch()
    watch.hear("p0", Agreed(60.0, a_view(1, 1, loss=5.0)), 60.0)
    assert watch.snapshot(60.0).remaining_s is None
    watch.hear("p0", Agreed(61.0, a_view(2, 2, loss=4.0)), 61.0)
    assert watch.snapshot(61.0).remaining_s == 2.0


def two_machines(*silent: str) -> RunMonitor:
    """p0 is here, the others on two other machines. `silent`: whom p0 has not heard for long."""
    watch = RunMonitor(CONFIG, 0.0, Resumed())
    watch.hear("p0", Listening("a", ()), 0.0)
    watch.hear("p0", Located("c", "192.0.2.7"), 0.0)
    watch.hear("p0", Agreed(0.0, a_view(1, 1, loss=5.0)), 1.0)
    heard = tuple(each.peer for each in MEMBERS[1:] if each.peer not in silent)
    progress = PeerProgress("a", stage=0, ready=True, leader=None if silent else "c", alone=bool(silent), heard=heard)
    watch.hear("p0", progress, 20.0)
    return watch


def test_joiners_are_told_of_members_on_other_machines() -> None:
    watch = two_machines()
    for peer, addresses in (("c", ("192.0.2.7:9", "192.0.2.8:9")), ("a", ("192.0.2.1:9",)), ("gone", ("192.0.2.3:9",))):
        watch.hear("p0", Located(peer, addresses[0].partition(":")[0], addresses), 2.0)
    assert watch.entries == ("192.0.2.7:9",), "not its own, nor of one that has left"


def test_members_on_other_machines_are_shown_with_machine_and_stage() -> None:
    peers = two_machines().snapshot(21.0).peers
    shown = [(peer.label, peer.machine, peer.stage, peer.ready, peer.leading) for peer in peers]
    assert shown == [
        ("p0", "", 0, True, False),
        ("b", "?", 0, True, False),
        ("c", "192.0.2.7", 1, True, True),
        ("d", "?", 1, True, False),
    ]


def test_a_run_without_its_majority_says_who_is_silent_since_when_and_what_to_do() -> None:
    assert two_machines("d").stopped_by() == [], "three of four are a majority"
    watch = two_machines("b", "c", "d")
    snapshot = watch.snapshot(30.0)
    assert snapshot.stopped == "STOPPED at 20.0 s: no majority without b, c, d"
    assert "to go" not in headline(snapshot) and "STOPPED" in headline(snapshot)
    assert "on the machine that founded the run" in snapshot.advice
    watch.everyone.recover = "shoal recover runs/ours"
    said = watch.advice()
    assert "b (?), c (192.0.2.7), d (?) silent; 1 of 4 members answer, and 3 are needed" in said
    assert said.endswith("shoal recover runs/ours --gone b c d")
    watch.hear("p0", PeerProgress("a", leader="c", heard=("b", "c", "d")), 40.0)
    assert watch.snapshot(41.0).stopped == "", "they are back"


def test_two_members_without_their_founder_tolerate_no_loss_and_the_user_reads_that() -> None:
    members = Members()
    two = msgspec.structs.replace(a_view(1, 1, loss=5.0), members=(Member("a", 0), Member("c", 1)))
    assert "With three members the run survives the loss of any one" in members.advice(two, ["c"])
    assert members.survives(two) == (
        "survives no loss (1 with 1 peer more); stages 0, 1 have one replica, without which the run goes back to its "
        "newest checkpoint"
    )


def test_the_founders_casting_vote_is_told_where_it_matters() -> None:
    members = Members()
    members.labels, members.machines = {"a": "p0"}, {"c": "192.0.2.2"}
    two = msgspec.structs.replace(a_view(1, 1, loss=5.0), members=(Member("a", 0), Member("c", 0)), founder="a")
    assert members.survives(two) == (
        "survives the loss of 1 peer other than p0, which has the casting vote (any 1 with 1 peer more), but not of this "
        "machine with its 1 of 2"
    )
    guest = Members()
    guest.labels, guest.machines = {"c": "p0"}, {"a": "192.0.2.1"}
    assert (
        "a (192.0.2.1) silent; 1 of 2 members answer, and 2 are needed, or 1 with a (192.0.2.1), which has the casting vote. "
        "If only the line to it is cut, the run goes on there" in guest.advice(two, ["a"])
    )


def test_how_many_losses_the_run_survives_is_told_by_peer_and_by_machine() -> None:
    members = Members()
    view = a_view(1, 1, loss=5.0)
    assert members.survives(view) == "survives the loss of 1 peer (2 with 1 peer more)"
    members.machines = {"a": "192.0.2.1", "b": "192.0.2.1", "c": "192.0.2.2", "d": "192.0.2.3"}
    assert members.survives(view).endswith("more), but not of 192.0.2.1 with its 2 of 4")
    assert members.survives(a_view(1, 1)) == "", "training has not begun"


def test_a_run_that_waits_says_for_how_many() -> None:
    alone = msgspec.structs.replace(a_view(1, 0), members=MEMBERS[:1])
    assert (
        a_watch(alone).snapshot(1.0).state == f"waiting for {CONFIG.run.peers - 1} of {CONFIG.run.peers} peers to join"
    )


@pytest.mark.parametrize("progress", [PeerProgress("a"), PeerProgress("a", leader="b", alone=True, heard=("b",))])
def test_what_a_peer_reports_is_read_back(progress: PeerProgress) -> None:
    assert decode(encode(progress)) == progress


def test_the_host_says_who_left_from_which_machine_and_what_is_left_of_its_stage() -> None:
    watch = RunMonitor(CONFIG, 0.0, Resumed())
    watch.hear("p1", Located("d", "192.0.2.7"), 0.0)
    watch.hear("p1", Agreed(0.0, a_view(1, 1, loss=5.0)), 1.0)
    left = msgspec.structs.replace(
        a_view(2, 2, loss=4.0), members=MEMBERS[:3], reason="step 1 committed; d leaves: tired"
    )
    watch.hear("p1", Agreed(1.0, left), 2.0)
    lines = [one.text for one in watch.happenings if one.kind == "left"]
    assert lines == ["d on 192.0.2.7 has left stage 1, which 1 peer serves now; 3 peers in all"]


def leaving(members: tuple[Member, ...], here: tuple[str, ...], saved: int = 7) -> str:
    everyone = Members()
    everyone.labels = {peer: f"p{peer}" for peer in here}
    view = msgspec.structs.replace(a_view(1, 1, loss=5.0), members=members)
    return "\n".join(everyone.leaving(view, saved))


def test_ctrl_c_says_what_it_waits_for_and_what_a_second_one_costs() -> None:
    text = leaving(MEMBERS, ("b",))
    assert text.startswith(
        "leaving at the end of the step, at most 20 s from now\nCtrl-C again to go at once: the others notice"
    )
    text = leaving(MEMBERS, ("d", "c"))
    assert "but for stage 1, which only this machine serves\na peer of another stage downloads stage 1 first" in text
    assert "Ctrl-C again to go at once: the run loses stage 1 and goes back to the checkpoint of step 7" in text
    assert "the others have no majority without these peers" in text
    text = leaving(MEMBERS[1:3], ("c",), saved=0)
    assert (
        "nobody else can take stage 1 over: training stops without this machine. It leaves when step 1 is saved" in text
    )
    assert "goes back to step 0: nothing is saved; the others have no majority" in text


def test_commits_do_not_push_rarer_events_out() -> None:
    watch = a_watch()
    watch.tell("removed", "p1 silent for 4.2 s", 1.0)
    for step in range(200):
        watch.tell("commit", f"step {step} committed", 2.0 + step)
    kinds = [event.kind for event in watch.happenings]
    assert kinds == ["removed"] + ["commit"] * COMMITS
    serials = [event.serial for event in watch.happenings]
    assert serials == sorted(set(serials)) and serials[-1] == 201
