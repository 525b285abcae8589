"""Which spans tell of one call: the rules, one by one, and what they must not join."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.collector.same_call import Sketch, same_calls

MS = 1_000_000


def sketch(
    name: str,
    scope: str,
    start: int,
    end: int,
    *,
    response: str | None = None,
    trace: str | None = None,
    model: str | None = "m",
    question: bytes | None = b"q",
) -> Sketch:
    """Times in milliseconds."""
    return Sketch(
        (trace or name, name), scope, None, start * MS, end * MS, None, response, model, lambda: question
    )


def sizes(*sketches: Sketch) -> list[int]:
    return sorted(len(group) for group in same_calls(sketches))


def test_equal_response_ids_of_two_scopes_are_one_call_across_traces() -> None:
    assert sizes(sketch("a", "one", 0, 10, response="x"), sketch("b", "two", 100, 110, response="x")) == [2]


def test_an_engine_that_gives_every_answer_one_id_does_not_make_all_calls_one() -> None:
    many = [sketch(f"{n}", "one", 20 * n, 20 * n + 10, response="x") for n in range(5)]
    assert sizes(*many) == [1] * 5


def test_without_an_id_time_model_and_question_decide() -> None:
    outer = sketch("a", "one", 0, 100)
    assert sizes(outer, sketch("b", "two", 10, 90, response="x")) == [2]
    assert sizes(outer, sketch("b", "two", 10, 90, response="x", model=None)) == [2]
    assert sizes(outer, sketch("b", "two", 10, 90, response="x", model="m-2026-01-01")) == [2]
    assert sizes(outer, sketch("b", "two", 10, 190)) == [1, 1]  # sticks out
    assert sizes(outer, sketch("b", "two", 10, 90, question=b"another")) == [1, 1]
    assert sizes(outer, sketch("b", "two", 10, 90, model="another")) == [1, 1]
    assert sizes(outer, sketch("b", "one", 10, 90)) == [1, 1]  # one scope tells of each call once


def test_two_known_ids_that_differ_are_two_calls() -> None:
    assert sizes(sketch("a", "one", 0, 9, response="x"), sketch("b", "two", 1, 8, response="y")) == [1, 1]


def test_without_content_only_a_common_trace_holds_two_spans_together() -> None:
    outer = sketch("a", "one", 0, 100, question=None, trace="t")
    assert sizes(outer, sketch("b", "two", 10, 90, trace="t")) == [2]
    assert sizes(outer, sketch("b", "two", 10, 90, trace="u")) == [1, 1]


def test_three_layers_without_an_id_are_one_call() -> None:
    layers = [sketch(f"{n}", f"scope {n}", n, 100 - n) for n in range(3)]
    assert sizes(*layers) == [3]


def test_concurrent_calls_with_one_prompt_stay_as_many_as_they_were() -> None:
    outer = [sketch(f"o{n}", "one", n, 100 + 3 * n) for n in range(20)]
    inner = [sketch(f"i{n}", "two", 21 + n, 99 - n, response=f"r{n}") for n in range(20)]
    groups = same_calls([*outer, *inner])
    assert sorted(len(group) for group in groups) == [2] * 20
    assert all({member.scope for member in group} == {"one", "two"} for group in groups)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["one", "two", "three"]),
            st.integers(0, 60),
            st.integers(0, 60),
            st.sampled_from([None, "x", "y", "z"]),
            st.sampled_from([b"q", b"p", None]),
        ),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_every_span_is_in_one_group_no_scope_twice_whatever_the_order(
    made: list[tuple[str, int, int, str | None, bytes | None]], shuffle: random.Random
) -> None:
    sketches = [
        sketch(f"{n}", scope, start, start + length, response=response, question=question)
        for n, (scope, start, length, response, question) in enumerate(made)
    ]
    groups = same_calls(sketches)
    assert sorted(s.key for group in groups for s in group) == sorted(s.key for s in sketches)
    for group in groups:
        assert len({s.scope for s in group}) == len(group)
    again = list(sketches)
    shuffle.shuffle(again)
    assert _keys(same_calls(again)) == _keys(groups)


def _keys(groups: list[list[Sketch]]) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(s.key for s in group) for group in groups}
