"""Which spans are one call, who called, what a reward judges, and that order changes nothing."""

import math
import random
from collections import Counter
from typing import Any

import pytest
import spans
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.collector import otlp
from agentlightning.collector.assemble import Assembled, assemble, calls_stored
from agentlightning.collector.span import Span
from agentlightning.collector.tables import tables
from agentlightning.proto import attributes as names
from agentlightning.proto import ids
from agentlightning.proto.packed import pack_ids

TRACE = "a" * 32
CHAT = {"gen_ai__operation__name": "chat"}


def decode(*pieces: spans.Piece) -> list[Span]:
    return otlp.decode_traces(spans.body(*pieces), Counter())


def attempt(*pieces: spans.Piece, rollout_id: str = "r") -> Assembled:
    return assemble(rollout_id, 0, decode(*pieces))


def hex_id(number: int) -> str:
    return f"{number:016x}"


def agent(number: int, name: str, parent: int | None = None, operation: str = "invoke_agent") -> spans.Piece:
    key = "gen_ai__agent__name" if operation == "invoke_agent" else "gen_ai__workflow__name"
    return spans.span(
        f"{operation} {name}",
        hex_id(number),
        parent=None if parent is None else hex_id(parent),
        end=100,
        gen_ai__operation__name=operation,
        **{key: name},
    )


def sdk_call(number: int, parent: int | None = None, *, scope: str = "sdk", **more: Any) -> spans.Piece:
    return spans.span(
        "chat m",
        hex_id(number),
        parent=None if parent is None else hex_id(parent),
        start=more.pop("start", number),
        scope=scope,
        **CHAT,
        **more,
    )


def gateway_call(number: int, parent: int, **more: Any) -> spans.Piece:
    return spans.gateway_call("r", number, trace=TRACE, parent=hex_id(parent), **more)


def test_the_gateways_span_and_the_sdks_around_it_are_one_call() -> None:
    made = attempt(
        agent(1, "crew", operation="invoke_workflow"),
        agent(2, "writer", 1),
        sdk_call(3, 2),
        spans.span("POST", hex_id(4), parent=hex_id(3)),  # the HTTP client's own span
        gateway_call(0, 4),
        spans.evaluation(hex_id(9), 1.0, parent=hex_id(3)),
    )
    (row,) = made.transitions
    assert row["source"] == "gateway"
    assert row["response_token_ids"] == pack_ids([10, 11, 12])
    assert (row["agent"], row["agent_path"]) == ("writer", ["crew", "writer"])
    assert row["reward"] == 1.0  # given to the SDK's span, it is the call's
    assert made.counters["orphan"] == 0


def test_without_a_trace_parent_they_join_by_response_id() -> None:
    made = attempt(
        agent(1, "solver"),
        sdk_call(2, 1, gen_ai__response__id="chatcmpl-r-0-0"),
        spans.gateway_call("r", 0),
    )
    (row,) = made.transitions
    assert (row["source"], row["agent"]) == ("gateway", "solver")


def test_call_ids_join_before_anything_else() -> None:
    call = ids.call_id("r", 0, "0")
    made = attempt(
        agent(1, "a"),
        sdk_call(2, 1, agentlightning__call__id=call, gen_ai__response__id="another"),
        spans.gateway_call("r", 0),
    )
    (row,) = made.transitions
    assert (row["call_id"], row["agent"]) == (call, "a")


def test_a_call_inside_a_tool_or_an_agent_is_its_own() -> None:
    tool = spans.span("execute_tool t", hex_id(3), parent=hex_id(2), gen_ai__operation__name="execute_tool")
    made = attempt(sdk_call(2), tool, sdk_call(4, 3), agent(5, "sub", 2), sdk_call(6, 5))
    assert len(made.transitions) == 3
    assert [row["agent"] for row in made.transitions] == [None, None, "sub"]


def test_nested_spans_of_two_instrumentations_are_one_call() -> None:
    made = attempt(
        agent(1, "a"),
        sdk_call(2, 1, scope="framework"),
        sdk_call(3, 2, scope="client", gen_ai__request__model="inner"),
    )
    (row,) = made.transitions
    assert (row["model"], row["agent"]) == ("inner", "a")


def test_siblings_of_two_instrumentations_join_by_response_id() -> None:
    made = attempt(
        agent(1, "a"),
        sdk_call(2, 1, scope="framework", gen_ai__response__id="x"),
        sdk_call(3, None, scope="client", gen_ai__response__id="x"),
    )
    assert len(made.transitions) == 1
    assert made.transitions[0]["agent"] == "a"


def test_an_engine_that_gives_every_answer_one_id_does_not_make_all_calls_one() -> None:
    made = attempt(*(sdk_call(n, gen_ai__response__id="constant") for n in range(2, 6)))
    assert len(made.transitions) == 4
    assert len({row["call_id"] for row in made.transitions}) == 4


def test_several_choices_are_several_calls_and_the_sdks_span_tells_of_all() -> None:
    one = gateway_call(0, 2, agentlightning__choice=0, gen_ai__response__id="same")
    two = gateway_call(1, 2, agentlightning__choice=1, gen_ai__response__id="same")
    made = attempt(agent(1, "a"), sdk_call(2, 1, gen_ai__response__id="same"), two, one)
    assert [row["agent"] for row in made.transitions] == ["a", "a"]
    assert len({row["call_id"] for row in made.transitions}) == 2


def test_a_reward_on_one_of_several_choices_is_that_choices() -> None:
    one = gateway_call(0, 2, agentlightning__choice=0, gen_ai__response__id="same")
    two = gateway_call(1, 2, agentlightning__choice=1, gen_ai__response__id="same")
    judged = one[2].span_id.hex()
    made = attempt(one, two, spans.evaluation(hex_id(9), 1.0, parent=judged, gen_ai__response__id="same"))
    assert [row["reward"] for row in made.transitions] == [1.0, None]


def test_a_retried_request_is_two_calls_one_of_them_failed() -> None:
    made = attempt(sdk_call(2), gateway_call(0, 2, error="http_500"), gateway_call(1, 2))
    assert [row["error"] for row in made.transitions] == ["http_500", None]
    assert made.calls_stored == 1


def test_an_aborted_call_keeps_the_ids_it_got_and_is_not_in_the_ledger() -> None:
    made = attempt(spans.gateway_call("r", 0, error="aborted", response=[7]), spans.rollout_span("r", 0))
    (row,) = made.transitions
    assert (row["error"], row["response_token_ids"]) == ("aborted", pack_ids([7]))
    assert (made.rollout["calls_stored"], made.rollout["calls_expected"]) == (0, 0)


def test_a_call_whose_answer_nobody_got_is_kept_as_such_and_counted() -> None:
    calls = [spans.gateway_call("r", n) for n in range(3)]
    answered = [ids.call_id("r", 0, str(n)) for n in (0, 2)]
    made = attempt(*calls, spans.rollout_span("r", 2, **{names.CALLS_ANSWERED: answered}))
    assert [row["error"] for row in made.transitions] == [None, "unanswered", None]
    assert (made.rollout["calls_stored"], made.rollout["calls_expected"]) == (2, 2)
    assert made.counters["unanswered"] == 1
    none = attempt(*calls, spans.rollout_span("r", 0, **{names.CALLS_ANSWERED: []}))
    assert (none.rollout["calls_stored"], none.counters["unanswered"]) == (0, 3)
    silent = attempt(*calls, spans.rollout_span("r", 3))  # an older gateway does not say
    assert (silent.rollout["calls_stored"], silent.counters["unanswered"]) == (3, 0)


def test_calls_are_counted_as_the_gateways_ledger_counts_them() -> None:
    pieces = [spans.gateway_call("r", n) for n in range(3)]
    assert calls_stored(decode(*pieces, pieces[0], sdk_call(2))) == 3
    assert calls_stored(decode(sdk_call(2), sdk_call(3), sdk_call(4, error__type="x"))) == 2
    assert calls_stored([]) == 0


def test_calls_are_numbered_by_request_time_and_the_last_is_done() -> None:
    made = attempt(*(spans.gateway_call("r", n) for n in (3, 0, 2, 1)))
    assert [row["seq"] for row in made.transitions] == [0, 1, 2, 3]
    assert [row["done"] for row in made.transitions] == [False, False, False, True]
    starts = [row["start_time"] for row in made.transitions]
    assert starts == sorted(starts)


def test_a_stamped_agent_path_wins_and_doubled_layers_are_one() -> None:
    made = attempt(
        agent(1, "writer"),
        agent(2, "writer", 1),
        sdk_call(3, 2),
        sdk_call(4, 2, agentlightning__agent__path=["g", "n"]),
    )
    assert [row["agent_path"] for row in made.transitions] == [["writer"], ["g", "n"]]


# --- rewards ------------------------------------------------------------------------------------------


def test_a_reward_under_the_root_is_the_rollouts() -> None:
    root = spans.span("agentlightning.rollout", hex_id(1))
    made = attempt(
        root,
        agent(2, "only", 1),
        sdk_call(3, 2),
        spans.evaluation(hex_id(8), 0.5, parent=hex_id(1)),
        spans.evaluation(hex_id(9), 2, name="style", parent=hex_id(2)),  # the one agent did everything
    )
    assert made.rollout["reward"] == 0.5
    assert dict(made.rollout["rewards"]) == {"reward": 0.5, "style": 2.0}
    assert made.transitions[0]["reward"] is None


def test_a_reward_with_no_parent_at_all_is_the_rollouts() -> None:
    made = attempt(spans.gateway_call("r", 0), spans.evaluation(hex_id(9), 0.25))
    assert made.rollout["reward"] == 0.25


def test_the_reward_of_one_agent_among_several_bears_its_name() -> None:
    made = attempt(
        agent(1, "crew", operation="invoke_workflow"),
        agent(2, "writer", 1),
        agent(3, "checker", 1),
        sdk_call(4, 2),
        sdk_call(5, 3),
        spans.evaluation(hex_id(8), 0.5, parent=hex_id(2)),
        spans.evaluation(hex_id(9), 0.75, name="style", parent=hex_id(3)),
    )
    assert dict(made.rollout["rewards"]) == {"writer": 0.5, "checker/style": 0.75}
    assert made.rollout["reward"] is None


def test_a_reward_finds_its_call_by_call_id_or_response_id() -> None:
    made = attempt(
        spans.gateway_call("r", 0),
        spans.gateway_call("r", 1),
        spans.evaluation(hex_id(8), 1.0, agentlightning__call__id=ids.call_id("r", 0, "0")),
        spans.evaluation(hex_id(9), 2.0, gen_ai__response__id="chatcmpl-r-0-1"),
    )
    assert [row["reward"] for row in made.transitions] == [1.0, 2.0]
    assert made.rollout["reward"] is None


def test_a_reward_for_a_call_that_is_not_here_is_nobodys_and_counted() -> None:
    made = attempt(
        spans.gateway_call("r", 0),
        spans.evaluation(hex_id(8), 1.0, agentlightning__call__id="call-other"),
        spans.evaluation(hex_id(9), 1.0, gen_ai__response__id="other"),
    )
    assert made.rollout["rewards"] == []
    assert made.transitions[0]["rewards"] == []
    assert made.counters["orphan"] == made.rollout["orphan"] == 2


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused_and_counted(score: float) -> None:
    made = attempt(spans.gateway_call("r", 0), spans.evaluation(hex_id(8), score))
    assert made.rollout["reward"] is None
    assert made.counters["reward_not_finite"] == 1


def test_a_verdict_without_a_number_is_counted() -> None:
    made = attempt(spans.evaluation(hex_id(8), None), spans.evaluation(hex_id(9), True))
    assert made.counters["reward_without_value"] == 2


def test_of_two_verdicts_of_one_name_the_later_counts() -> None:
    made = attempt(spans.evaluation(hex_id(8), 1.0, start=600), spans.evaluation(hex_id(9), 0.0, start=500))
    assert made.rollout["reward"] == 1.0
    assert made.counters["reward_replaced"] == 1


# --- the row of the attempt -----------------------------------------------------------------------------


def test_the_rollout_span_tells_how_the_attempt_ended() -> None:
    cause = {names.ROLLOUT_CAUSE: "agent_error", names.ROLLOUT_ERROR: "exit 1"}
    made = attempt(spans.gateway_call("r", 0), spans.rollout_span("r", 1, state="failed", **cause))
    row = made.rollout
    assert (row["state"], row["cause"], row["error"]) == ("failed", "agent_error", "exit 1")
    assert row["input"] == '{"question": "?"}'
    assert (row["calls_expected"], row["calls_stored"]) == (1, 1)
    assert (row["run_id"], row["group_id"], row["task_id"], row["split"]) == ("run", "group", "task", "train")
    assert row["end_time"] - row["start_time"] == 1000 * spans.SECOND


def test_a_missing_parent_is_an_orphan_but_a_remote_one_or_the_root_is_not() -> None:
    remote = spans.span("s", hex_id(2), parent=hex_id(77))
    remote[2].flags = 0x300
    made = attempt(spans.span("s", hex_id(1), parent=hex_id(99)), remote, spans.gateway_call("r", 0))
    assert made.rollout["orphan"] == 1


def test_dropped_attributes_are_added_up() -> None:
    piece = spans.span("s", hex_id(1))
    piece[2].dropped_attributes_count = 3
    assert attempt(piece).rollout["dropped_attributes"] == 3


def test_a_cycle_of_parents_ends() -> None:
    made = attempt(sdk_call(1, 2), sdk_call(2, 1), spans.evaluation(hex_id(9), 1.0, parent=hex_id(1)))
    assert made.counters["orphan"] == 0


# --- invariants -----------------------------------------------------------------------------------------


@st.composite
def forests(draw: st.DrawFn) -> list[spans.Piece]:
    """A random attempt: agents, tools, SDK and gateway calls and rewards, anywhere under each other."""
    pieces: list[spans.Piece] = []
    for number in range(1, draw(st.integers(1, 14)) + 1):
        parent = draw(st.none() | st.integers(1, number))
        if parent == number:
            parent = 99  # one that never comes
        kind = draw(st.sampled_from(["agent", "tool", "sdk", "gateway", "reward", "plain"]))
        around = None if parent is None else hex_id(parent)
        response = draw(st.sampled_from(["x", "y", None]))
        match kind:
            case "agent":
                pieces.append(agent(number, draw(st.sampled_from("ab")), parent))
            case "tool":
                pieces.append(
                    spans.span("t", hex_id(number), parent=around, gen_ai__operation__name="execute_tool")
                )
            case "sdk":
                more = {} if response is None else {"gen_ai__response__id": response}
                scope, start = draw(st.sampled_from(["s", "t"])), draw(st.integers(0, 3))
                pieces.append(sdk_call(number, parent, scope=scope, start=start, **more))
            case "gateway":
                pieces.append(
                    spans.gateway_call(
                        "r",
                        draw(st.integers(0, 3)),
                        trace=TRACE,
                        parent=around,
                        gen_ai__response__id=response or "z",
                        error=draw(st.sampled_from(["", "", "aborted"])),
                    )
                )
            case "reward":
                pieces.append(
                    spans.evaluation(
                        hex_id(number),
                        draw(st.sampled_from([0.0, 1.0, math.nan])),
                        parent=around,
                        start=draw(st.integers(0, 2)),
                        **({} if response is None else {"gen_ai__response__id": response}),
                    )
                )
            case "plain":
                pieces.append(spans.span("p", hex_id(number), parent=around))
    return pieces


def rows(made: Assembled, *, without: tuple[str, ...] = ()) -> list[Any]:
    found = []
    for name, table in sorted(tables([made]).items()):
        drop = [column for column in without if column in table.column_names]
        found.append((name, table.drop_columns(drop).to_pylist()))
    return found


@settings(max_examples=150, deadline=None)
@given(forests(), st.randoms(use_true_random=False))
def test_order_and_copies_change_nothing_but_the_count_of_duplicates(
    pieces: list[spans.Piece], chance: random.Random
) -> None:
    decoded = decode(*pieces)
    first = assemble("r", 0, decoded)
    shuffled = [*decoded, *chance.choices(decoded, k=chance.randint(0, 4))]
    chance.shuffle(shuffled)
    second = assemble("r", 0, shuffled)
    assert repr(rows(first, without=("duplicate",))) == repr(rows(second, without=("duplicate",)))
    copies = len(shuffled) - len(decoded)
    assert second.rollout["duplicate"] == first.rollout["duplicate"] + copies


@settings(max_examples=150, deadline=None)
@given(forests())
def test_every_gateway_call_is_one_transition_and_none_is_invented(pieces: list[spans.Piece]) -> None:
    made = attempt(*pieces)
    unique = {span.span_id: span for span in made.spans}
    recorded = {
        span.attributes[names.CALL_ID] for span in unique.values() if names.CALL_ID in span.attributes
    }
    from_gateway = [row["call_id"] for row in made.transitions if row["source"] == "gateway"]
    assert sorted(from_gateway) == sorted(recorded)
    chats = sum(span.attributes.get(names.OPERATION_NAME) == "chat" for span in unique.values())
    assert len(made.transitions) <= chats
    assert len({row["call_id"] for row in made.transitions}) == len(made.transitions)
    assert all(row["span_id"] in unique for row in made.transitions)
