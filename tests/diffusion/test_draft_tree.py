"""Draft trees: their shape, and that the likeliest drafts are in them."""

import pytest

from redraft.diffusion import draft_tree
from redraft.diffusion.draft_tree import DraftTree, grow_tree

SMALL = DraftTree(parents=(-1, 0, 1, 0, 3, 1), ranks=(0, 0, 0, 1, 0, 1))


def test_paths_lead_from_the_root_to_each_node():
    assert SMALL.paths == ((0,), (0, 1), (0, 1, 2), (0, 3), (0, 3, 4), (0, 1, 5))
    assert SMALL.depths == (0, 1, 2, 1, 2, 2)
    assert SMALL.visible == (0b1, 0b11, 0b111, 0b1001, 0b11001, 0b100011)
    assert SMALL.lines == ((0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 3, 4), (0, 3, 4), (0, 1, 5))
    assert SMALL.level(2) == [2, 4, 5]
    assert len(SMALL) == 6
    assert SMALL.depth == 2


@pytest.mark.parametrize(("nodes", "depth"), [(1, 7), (2, 1), (8, 7), (32, 7), (32, 2), (60, 20)])
def test_a_tree_has_the_asked_size_and_every_draft_has_those_before_it(nodes, depth):
    tree = grow_tree(nodes, depth)
    assert len(tree) == nodes
    assert tree.depth <= depth
    assert tree.parents[0] == -1
    drafts = list(zip(tree.parents, tree.ranks, strict=True))
    assert len(set(drafts)) == nodes
    for node, (parent, rank) in enumerate(drafts[1:], 1):
        assert parent < node
        assert rank == 0 or (parent, rank - 1) in drafts[:node]


def test_no_draft_outside_is_likelier_than_one_inside():
    tree = grow_tree(12, 4)
    chances = [1.0]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        chances.append(chances[parent] * draft_tree.CHANCES[rank])
    inside = set(zip(tree.parents, tree.ranks, strict=True))
    outside = [
        chances[parent] * chance
        for parent in range(12)
        if tree.depths[parent] < 4
        for rank, chance in enumerate(draft_tree.CHANCES)
        if (parent, rank) not in inside
    ]
    assert max(outside) <= min(chances)
