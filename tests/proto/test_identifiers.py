import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.proto import ids, packed


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_ids_come_back(values: list[int]) -> None:
    assert packed.unpack_ids(packed.pack_ids(values)) == values


def test_packed_values_are_little_endian_as_the_contract_says() -> None:
    assert packed.pack_ids([1, -2]) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert packed.pack_floats([-0.5]) == b"\0\0\0\xbf"


def test_a_cut_packed_value_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4 bytes, got 3"):
        packed.unpack_ids(b"abc")


def test_derived_identifiers_depend_on_all_parts_and_their_borders() -> None:
    assert ids.derived_span_id("a", "bc") != ids.derived_span_id("ab", "c")
    assert ids.rollout_span_id("r", 0) != ids.rollout_span_id("r", 1)
    assert len(ids.derived_trace_id("r", 0)) == 32
    assert ids.derived_trace_id("r", 0) == ids.derived_trace_id("r", 0)


@pytest.mark.parametrize("name", ["", "../a", "a/b", "a b", "-a", "a" * 201, "a\n"])
def test_names_that_could_become_paths_or_headers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a valid identifier"):
        ids.check_id(name, "run")
