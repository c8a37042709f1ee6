from dataclasses import replace

import pytest
import torch

from replaylens.engine.model.config import BARRED, Routing
from replaylens.engine.model.config import choose as cpu_choose
from replaylens.kernels import reference
from replaylens.kernels.route import BARRED as kernel_barred
from replaylens.kernels.route import RouteSpec, choice_scores, choose, plan, route, sorted_plan, weigh, worst_tiles

# experts, what is chosen and how: powers of two and other numbers, groups, every kind
SPECS = [
    (8, RouteSpec(3)),
    (13, RouteSpec(4, normalised=False, scale=2.5)),
    (15, RouteSpec(3, normalised=False, groups=3, chosen_groups=2, scale=16.0)),
    (24, RouteSpec(4, "sigmoid", groups=4, chosen_groups=2, group_best=2, scale=2.5)),
    (16, RouteSpec(2, "sparsemixer", jitter=0.01)),
]


def logits_of(case, rows, experts):
    """The second half has ties: few different values, and all zero in the last row."""
    x = case.randn(rows, experts, seed=experts, scale=2.0).float()
    x[rows // 2 :] = (x[rows // 2 :] / 2).round() * 2
    x[-1] = 0.0
    x[-1, ::2] = -0.0  # equal to 0.0
    return x


def correction_of(case, spec, experts):
    return (case.randn(experts, seed=3) * 0.1) if spec.kind == "sigmoid" else None


@pytest.mark.parametrize(("experts", "spec"), SPECS)
def test_agrees_with_float64(case, experts, spec):
    logits = logits_of(case, 200 if case.gpu else 8, experts)
    correction = correction_of(case, spec, experts)
    chosen, weights, spread = route(logits, spec, correction)
    scores = logits.double().sigmoid() if spec.kind == "sigmoid" else logits.double()
    scores = scores if correction is None else scores + correction.double()
    groups = (spec.groups, spec.chosen_groups, spec.group_best)
    assert torch.equal(chosen, reference.choose(scores, spec.top, *groups))
    want = reference.weigh(logits.double(), chosen, spec.kind, spec.normalised, spec.scale, spec.jitter)
    torch.testing.assert_close(weights.double(), want, rtol=2e-6, atol=1e-9)
    assert torch.equal(spread, torch.zeros_like(logits).scatter(1, chosen, weights))
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int64


@pytest.mark.parametrize(("experts", "spec"), SPECS)
def test_a_row_does_not_know_its_batch_and_steps_have_the_bits_of_the_whole(case, same, experts, spec):
    logits = logits_of(case, 70 if case.gpu else 7, experts)
    correction = correction_of(case, spec, experts)
    chosen, weights, _ = route(logits, spec, correction)
    for rows in (slice(0, 1), slice(3, 5), slice(len(logits) - 1, None)):
        some, their, _ = route(logits[rows].contiguous(), spec, correction)
        assert torch.equal(some, chosen[rows])
        same(their, weights[rows])
    assert torch.equal(choose(choice_scores(logits, spec, correction), spec), chosen)
    same(weigh(logits, chosen, spec), weights)


def test_choices_of_the_user_are_weighed(case):
    """Not the highest: the weights are those of these experts, in the order given."""
    logits = logits_of(case, 6, 8)
    chosen = torch.tensor([[5, 2, 7]] * 6, device=case.device)
    got = weigh(logits, chosen, RouteSpec(3))
    torch.testing.assert_close(got.double(), logits.double().gather(1, chosen).softmax(1), rtol=2e-6, atol=1e-9)


def test_barred_experts_do_not_count_in_their_groups(case):
    """As on a CPU, whichever experts are forbidden and forced, down to groups without any left."""
    routing = Routing(3, "sigmoid", groups=4, chosen_groups=2, group_best=2, correction=True)
    spec = RouteSpec(3, "sigmoid", groups=4, chosen_groups=2, group_best=2)
    scores = case.randn(24 if case.gpu else 8, 12, seed=5).float()
    moved = case.randn(*scores.shape, seed=6)
    plain = scores.clone()
    scores = scores.masked_fill(moved < 0.2, 2 * BARRED).masked_fill(moved > 1.6, -2 * BARRED)
    scores[:2] = plain[:2]
    scores[0, 3:], scores[1, :9], scores[2] = 2 * BARRED, 2 * BARRED, 2 * BARRED
    want = cpu_choose(scores.cpu(), routing)
    assert torch.equal(choose(scores, spec).cpu(), want)
    assert torch.equal(reference.choose(scores.double(), 3, 4, 2, 2).cpu(), want)
    assert kernel_barred.value == BARRED and want[0].tolist() == [0, 1, 2] and want[1].tolist() == [9, 10, 11]
    assert torch.equal(choose(plain, spec).cpu(), cpu_choose(plain.cpu(), routing))


def test_numbers_that_are_no_numbers_choose_experts_that_exist(case):
    logits = logits_of(case, 4, 8)
    logits[0], logits[1, 3], logits[2] = float("nan"), float("inf"), float("-inf")
    chosen, *_ = route(logits, RouteSpec(3))
    assert chosen[0].tolist() == [0, 1, 2] == chosen[2].tolist() and 3 in chosen[1].tolist()
    assert chosen.min() >= 0 and chosen.max() < 8


def test_a_plan_lists_every_pair_once_with_its_expert(case):
    """Also with experts that nobody chose, one that everybody chose, and more pairs than a chunk has."""
    for rows, experts, top, height in ((2, 5, 2, 16), (9, 40, 4, 4), (33, 3, 2, 16), (700, 7, 2, 16)):
        scores = case.randn(rows, experts, seed=rows).float()
        scores[:, 1] = 9.0
        chosen = scores.topk(top).indices.sort(dim=1).values
        made = plan(chosen, experts, height)
        flat, order, seen = chosen.flatten().tolist(), made.order.tolist(), []
        assert order == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
        assert made.ends.tolist() == [sum(e <= expert for e in flat) for expert in range(experts)]
        for expert, first, count, *_ in made.tiles.tolist():
            assert count <= height and {flat[pair] for pair in order[first : first + count]} <= {expert}
            seen += order[first : first + count]
        assert sorted(seen) == list(range(len(flat)))
        assert made.num_tiles == worst_tiles(len(flat), experts, height)


def test_the_worst_case_has_room(case):
    """Every expert leaves a tile with one pair: nothing is lost, and no tile is empty."""
    chosen = torch.tensor([[e] for e in range(4) for _ in range(5)], device=case.device)  # five pairs each, tiles of four
    made = sorted_plan(chosen, 4, 4, worst_tiles(20, 4, 4))
    assert made.tiles[:, 2].tolist() == [4, 1] * 4


def test_one_row_needs_no_plan(case):
    chosen = torch.tensor([[1, 4, 6]], device=case.device)
    made = plan(chosen, 8, 16)
    assert not made.planned and made.tiles.tolist() == [1, 4, 6]


def test_errors_say_what_is_wrong(case):
    logits = logits_of(case, 2, 8)
    for call, says in (
        (lambda: RouteSpec(2, "best"), "Unknown routing 'best'"),
        (lambda: RouteSpec(3, "sparsemixer"), "sparsemixer chooses two experts, not 3"),
        (lambda: route(logits.double(), RouteSpec(2)), r"logits is torch\.float64"),
        (lambda: route(logits, RouteSpec(2, groups=3)), "8 experts do not divide into 3 groups"),
        (lambda: route(logits, replace(RouteSpec(5), groups=2)), "5 experts cannot be chosen among 4"),
        (lambda: plan(torch.zeros(2, 2, dtype=torch.int32, device=case.device), 8, 16), r"chosen is torch\.int32"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
    assert route(logits[:0], RouteSpec(2))[0].shape == (0, 2)
