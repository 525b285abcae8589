"""The prefix tree: what it finds is what was put in, whatever was split, locked and forgotten meanwhile."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.trainer.engine.prefix import NOWHERE, Node, PrefixTree


def kv_of(tokens: list[int], start: int) -> torch.Tensor:
    """One number per token, made of its id and position: (layers 1, 2, heads 1, tokens, width 1)."""
    numbers = torch.tensor([1000.0 * (start + i) + token for i, token in enumerate(tokens)])
    return numbers.view(1, 1, 1, -1, 1).expand(1, 2, 1, -1, 1).clone()


def make_tree(budget: int) -> PrefixTree:
    return PrefixTree((1, 1, 1), budget=budget, dtype=torch.float32, device=torch.device("cpu"))


def insert(tree: PrefixTree, tokens: list[int]) -> Node:
    node = tree.match(tokens, len(tokens))
    rest = tokens[node.end :]
    return tree.add(node, rest, kv_of(rest, node.end)) if rest else node


def read(node: Node) -> tuple[list[int], list[float]]:
    nodes = list(node.path())[::-1]
    return [t for n in nodes for t in n.tokens], [float(x) for n in nodes for x in n.kv[0, 0, 0, :, 0]]


def size_of(tree: PrefixTree) -> int:
    return sum(len(node.tokens) for node in tree._nodes())


# Few different tokens and long runs: many common beginnings.
PROMPTS = st.lists(
    st.lists(st.sampled_from([[1] * 17, [2] * 20, [3], [1, 2]]), min_size=1, max_size=4), max_size=12
)


@settings(deadline=None)
@given(prompts=PROMPTS, budget=st.sampled_from([0, 40, 10**6]), data=st.data())
def test_a_path_holds_its_tokens_and_their_values(
    prompts: list[list[list[int]]], budget: int, data: st.DataObject
) -> None:
    tree = make_tree(budget)
    held: list[tuple[Node, list[int]]] = []
    for runs in prompts:
        tokens = [token for run in runs for token in run]
        node = insert(tree, tokens)
        assert read(node) == (tokens, kv_of(tokens, 0)[0, 0, 0, :, 0].tolist())
        if data.draw(st.booleans()):
            tree.lock(node)
            held.append((node, tokens))
        tree.evict()
        # Locked paths survive splits and evictions.
        for other, wanted in held:
            assert read(other) == (wanted, kv_of(wanted, 0)[0, 0, 0, :, 0].tolist())
        assert tree.size == size_of(tree)
    for node, _ in held:
        tree.unlock(node)
    assert all(node.locks == 0 for node in tree._nodes())
    tree.evict()
    assert tree.size <= budget


def test_a_match_goes_on_from_a_known_node() -> None:
    tree = make_tree(1000)
    tokens = list(range(100))
    first = insert(tree, tokens[:40])
    insert(tree, tokens)
    assert tree.match(tokens, 99, first).end == 99
    assert tree.match(tokens, 99, NOWHERE).end == 99


def test_the_least_recently_used_is_forgotten_first() -> None:
    tree = make_tree(100)
    old, kept, new = ([token] * 50 for token in (1, 2, 3))
    insert(tree, old)
    insert(tree, kept)
    tree.match(kept, 50)
    insert(tree, new)
    tree.evict()
    assert tree.match(old, 50).end == 0
    assert tree.match(new, 50).end == 50


def test_half_of_a_split_node_lets_go_of_the_other_halfs_memory() -> None:
    tree = make_tree(60)
    insert(tree, [1] * 80)
    upper = tree.match([1] * 40, 40)
    tree.lock(upper)
    tree.evict()
    assert tree.size == 40
    assert upper.kv.untyped_storage().nbytes() == 2 * 40 * 4
