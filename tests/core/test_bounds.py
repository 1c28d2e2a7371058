"""How long a part of a round may be: the same for everybody who has the view, never too short for an honest part, and slow to follow."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from shoal.core.allreduce.bounds import FACTOR, flaw, following, lengths, longest, too_long
from shoal.core.leader.audits.comparing import distance, shortened
from shoal.core.messages import OwnedSums, Reduced, Settings, Share, Sketch

SETTINGS = Settings(1, 8, steps=9, robust="clip")
EVEN = tuple(Share(name, (2 * at, 2 * at + 1)) for at, name in enumerate("abcd"))


def listing(norms: dict[str, float], group: tuple[Share, ...] = EVEN) -> dict[str, Reduced]:
    """What the owners list of parts of those norms, each with an even chunk of it."""
    parts = tuple(Sketch((0.0,) * 4, norms[share.peer] ** 2 / len(group)) for share in group)
    sums = tuple(OwnedSums("", Sketch(), parts=parts) for _ in group)
    return {share.peer: Reduced(0, 0, 0, "", 1.0, sums) for share in group}


def alike(norm: float, **others: float) -> dict[str, float]:
    return dict.fromkeys("abcd", norm) | others


def test_whoever_brings_more_than_it_was_allowed_is_found() -> None:
    references = following((), (EVEN,), listing(alike(3.0)), SETTINGS)
    assert references == (pytest.approx(3.0 / math.sqrt(2)),)
    assert longest(references, 0, EVEN, EVEN[0], SETTINGS) == pytest.approx(FACTOR * 3.0)
    within = listing(alike(3.0, b=FACTOR * 3.0))
    assert not too_long(references, 0, EVEN, within, SETTINGS)
    ((peer, why),) = too_long(references, 0, EVEN, listing(alike(3.0, b=FACTOR * 3.1)), SETTINGS)
    assert peer == "b" and "1.03 times as long" in why


def test_a_part_whose_norm_is_not_a_number_is_too_long() -> None:
    references = following((), (EVEN,), listing(alike(3.0)), SETTINGS)
    assert [one for one, _ in too_long(references, 0, EVEN, listing(alike(3.0, c=math.inf)), SETTINGS)] == ["c"]


@pytest.mark.parametrize("said", [math.nan, math.inf, -1.0])
def test_a_word_that_is_no_norm_harms_nobody(said: float) -> None:
    """A first step has no reference, so that nothing is too long."""
    reduced = listing(alike(3.0))
    parts = tuple(
        replace(one, norm_sq=said, products=(1e300,) * 4) if at == 0 else one
        for at, one in enumerate(reduced["a"].sums[0].parts)
    )
    reduced["a"] = replace(reduced["a"], sums=(replace(reduced["a"].sums[0], parts=parts), *reduced["a"].sums[1:]))
    assert lengths(EVEN, reduced)[0] == math.inf
    references = following((), (EVEN,), reduced, SETTINGS)
    assert references == (pytest.approx(3.0 / math.sqrt(2)),) and not flaw((), references, True, SETTINGS)
    assert [peer for peer, _ in too_long(references, 0, EVEN, reduced, SETTINGS)] == ["a"]


@pytest.mark.parametrize("liars", [1e-6, 1e6, math.nan])
def test_one_of_three_cannot_choose_the_reference(liars: float) -> None:
    group = tuple(Share(name, (at,)) for at, name in enumerate("abc"))
    settings = replace(SETTINGS, microbatches=3)
    norms = {"a": 3.0, "b": liars, "c": 3.3}
    (reference,) = following((), (group,), listing(norms, group), settings)
    assert reference in (3.0, 3.3)


def test_of_two_replicas_the_reference_stays_as_it_was() -> None:
    group = EVEN[:2]
    assert following((2.0,), (group,), listing({"a": 3.0, "b": 9.0}, group), SETTINGS) == (2.0,)
    assert longest((2.0,), 0, group, group[0], SETTINGS) is not None
    assert longest((2.0,), 0, group[:1], group[0], SETTINGS) is None, "nobody lists the part of a single replica"


@pytest.mark.parametrize(("norm", "times"), [(30.0, FACTOR), (0.0, 1 / FACTOR)])
def test_the_reference_follows_slowly_and_voters_accept_no_other(norm: float, times: float) -> None:
    (before,) = following((), (EVEN,), listing(alike(3.0)), SETTINGS)
    after = following((before,), (EVEN,), listing(alike(norm)), SETTINGS)
    assert after == (pytest.approx(before * times),)
    assert not flaw((before,), after, True, SETTINGS)
    assert flaw((before,), (after[0] * times * 1.1,), True, SETTINGS)
    assert flaw((before,), after, False, SETTINGS), "without a commit it stays"
    assert flaw((before,), (), True, SETTINGS) and flaw((before,), (math.nan,), True, SETTINGS)
    assert flaw((), (1.0,), True, replace(SETTINGS, robust="none"))


@pytest.mark.parametrize("noise", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (1, 1, 1, 5), (1, 2, 2, 3), (4, 2, 1, 1)])
def test_honest_replicas_with_unlike_shares_are_never_shortened(noise: float, counts: tuple[int, ...]) -> None:
    """Their norms are as expected: n microbatches have n times what they share, and sqrt(n) times the noise."""
    indices = iter(range(8))
    group = tuple(Share(name, tuple(next(indices) for _ in range(of))) for name, of in zip("abcd", counts, strict=True))
    norms = {share.peer: math.hypot(len(share.indices), noise * math.sqrt(len(share.indices))) for share in group}
    references = following((), (group,), listing(norms, group), SETTINGS)
    assert not too_long(references, 0, group, listing(norms, group), SETTINGS)


def test_an_owner_cannot_call_its_own_part_short() -> None:
    """It says that its part is tiny; the products, which the sum and the others' parts leave it, say otherwise."""
    reduced = listing(alike(3.0))
    sums = list(reduced["a"].sums)
    long = Sketch((300.0, -200.0, 250.0, 100.0), 1e-9)
    sums[0] = replace(sums[0], parts=(long, *sums[0].parts[1:]))
    reduced["a"] = replace(reduced["a"], sums=tuple(sums))
    references = following((), (EVEN,), listing(alike(3.0)), SETTINGS)
    assert [peer for peer, _ in too_long(references, 0, EVEN, reduced, SETTINGS)] == ["a"]


def test_nothing_is_bounded_where_the_run_bounds_nothing_or_nobody_lists_parts() -> None:
    plain = replace(SETTINGS, robust="none")
    assert following((), (EVEN,), listing(alike(3.0)), plain) == ()
    assert longest((1.0,), 0, EVEN, EVEN[0], plain) is None
    many = tuple(Share(f"p{at}", (at,)) for at in range(17))
    assert longest((1.0,), 0, many, many[0], replace(SETTINGS, microbatches=17)) is None
    unlisted = {peer: replace(one, sums=()) for peer, one in listing(alike(3.0)).items()}
    assert lengths(EVEN, unlisted) == () and following((2.0,), (EVEN,), unlisted, SETTINGS) == (2.0,)


def test_who_computed_nothing_brings_nothing_but_what_a_code_has_left_out() -> None:
    idle = (*EVEN[:3], Share("d", ()))
    assert longest((1.0,), 0, idle, idle[3], SETTINGS) == 0.0
    coded = longest((1.0,), 0, idle, idle[3], replace(SETTINGS, averaging_error=0.05))
    assert coded == pytest.approx(FACTOR)


def test_an_audit_compares_a_shortened_part_with_a_shortened_gradient() -> None:
    gradient = [Sketch((3.0, -1.0, 2.0, 1.0), 9.0), Sketch((1.0, 1.0, 1.0, 1.0), 7.0)]
    part = [Sketch((1.5, -0.5, 1.0, 0.5), 2.25), Sketch((0.5,) * 4, 1.75)]
    assert distance(gradient, part) > 0.1
    assert distance(shortened(gradient, 2.0), part) < 1e-12
    assert shortened(gradient, None) is gradient and shortened(gradient, 5.0) is gradient
