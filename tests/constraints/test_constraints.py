"""Pins and forbidden tokens as tensors."""

import pytest
import torch

from redraft.constraints.constraints import NEVER, Constraints, build_canvas_constraints

STOPS = (1, 5)


def canvas(constraints: list[Constraints], block: int = 0):
    return build_canvas_constraints(constraints, block, 4, 10, STOPS, "cpu")


def test_no_constraints_make_no_tensors():
    assert canvas([Constraints(), Constraints()]) is None


def test_pins_land_on_their_canvas():
    constraints = [Constraints(pins={1: 7, 6: 8}), Constraints()]
    assert canvas(constraints).pins_BC.tolist() == [[-1, 7, -1, -1], [-1, -1, -1, -1]]
    assert canvas(constraints, 1).pins_BC.tolist() == [[-1, -1, 8, -1], [-1, -1, -1, -1]]
    ids = torch.zeros(2, 4, dtype=torch.long)
    assert canvas(constraints).apply_pins(ids).tolist() == [[0, 7, 0, 0], [0, 0, 0, 0]]


def test_masked_logits_make_pins_certain_and_forbidden_tokens_impossible():
    logits = torch.randn(2, 4, 10)
    masked = canvas([Constraints(pins={2: 7}, forbidden=(3,)), Constraints(forbidden=(9,))]).mask_logits(logits)
    probs = masked.softmax(-1)
    assert probs[0, 2].tolist() == [0.0] * 7 + [1.0] + [0.0] * 2
    assert (probs[0, :, 3] == 0).all()
    assert (probs[1, :, 9] == 0).all()
    assert (probs[1, :, 3] > 0).all()
    untouched = [i for i in range(10) if i not in (1, 5, 3)]
    assert torch.equal(masked[0, 0, untouched], logits[0, 0, untouched])


def test_a_stop_token_may_not_cut_off_a_pin():
    """Row 0 has a pin on the second canvas: no position before the pin may hold a stop token, positions behind it may."""
    constraints = [Constraints(pins={5: 7}), Constraints()]
    first, second = (canvas(constraints, block).mask_logits(torch.zeros(2, 4, 10)) for block in (0, 1))
    assert (first[0][:, list(STOPS)] == NEVER).all()
    assert (second[0, 0, list(STOPS)] == NEVER).all()
    assert (second[0, 2:][:, list(STOPS)] == 0).all()
    assert (first[1] == 0).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Constraints(pins={-1: 3}), "-1"),
        (lambda: Constraints(pins={0: 10}).validate(10, 8, STOPS), "outside the vocabulary of 10"),
        (lambda: Constraints(pins={8: 1}).validate(10, 8, STOPS), "beyond the answer's 8"),
        (lambda: Constraints(forbidden=(12,)).validate(10, 8, STOPS), "12"),
        (
            lambda: Constraints(pins={2: 5, 6: 7}).validate(10, 8, STOPS),
            "stop token 5 pinned at 2 would cut off the pin at 6",
        ),
        (lambda: Constraints(pins={2: 5}, forbidden=(0, 2, 3, 4, 6, 7, 8, 9)).validate(10, 8, STOPS), "every token"),
        (lambda: Constraints(forbidden=tuple(range(10))).validate(10, 8, STOPS), "every token"),
    ],
)
def test_impossible_constraints_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
