"""Memory for ranges: used again where it is worth it, and never by two at a time."""

from hypothesis import given
from hypothesis import strategies as st

from dcp.load.buffers import Buffers

SIZE = 64


def test_memory_given_back_is_used_again() -> None:
    buffers = Buffers(SIZE)
    first = buffers.take(SIZE)
    first[:] = b"a" * SIZE
    buffers.give_back(first)
    assert bytes(buffers.take(SIZE - 1)) == b"a" * (SIZE - 1)


@given(st.lists(st.integers(1, 2 * SIZE) | st.none(), max_size=60))
def test_nobody_gets_memory_that_another_holds(steps: list[int | None]) -> None:
    buffers = Buffers(SIZE)
    held: list[tuple[int, memoryview]] = []
    for number, length in enumerate(steps):
        if length is None:
            if held:
                buffers.give_back(held.pop(0)[1])
            continue
        memory = buffers.take(length)
        assert len(memory) == length
        memory[:] = bytes([number]) * length
        held.append((number, memory))
        for owner, content in held:
            assert set(content) == {owner}
