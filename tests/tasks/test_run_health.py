"""A run's rhythm tells when it has stalled; only what nobody writes any more is junk."""

from hypothesis import given
from hypothesis import strategies as st

from dcp.checkpoint import Survey
from dcp.sizes import human_span
from dcp.storage import ObjectInfo, open_store
from tasks.discover import FoundStep, Progress
from tasks.run_health import Commit, find_junk, find_stall


def every(seconds: float, count: int) -> list[Commit]:
    return [Commit(seconds * number, f"step_{number}") for number in range(count)]


def test_a_run_that_keeps_its_rhythm_has_not_stalled() -> None:
    commits = every(600, 10)
    assert find_stall(commits, 9 * 600 + 1799, factor=3, minimum=0) is None
    stall = find_stall(commits, 9 * 600 + 1801, factor=3, minimum=0)
    assert stall is not None
    assert (stall.last.step, stall.usual, stall.quiet) == ("step_9", 600, 1801)
    assert find_stall(commits, 9 * 600 + 1801, factor=3, minimum=3600) is None
    assert find_stall(commits, 1e9, factor=0, minimum=0) is None


def test_two_commits_make_no_rhythm() -> None:
    assert find_stall(every(600, 2), 1e9, factor=3, minimum=0) is None
    assert find_stall([], 1e9, factor=3, minimum=0) is None
    assert find_stall(every(600, 3), 1e9, factor=3, minimum=0) is not None


def test_one_long_pause_and_old_rhythms_do_not_count() -> None:
    slow = every(100_000, 5)
    fast = [Commit(slow[-1].at + 10 * n, f"fast_{n}") for n in range(1, 30)]
    stall = find_stall([*slow, *fast], fast[-1].at + 1000, factor=3, minimum=0)
    assert stall is not None
    assert stall.usual == 10
    restarted = [*every(600, 5), *[Commit(50_000 + 600 * n, f"again_{n}") for n in range(5)]]
    assert find_stall(restarted, 50_000 + 2400 + 1700, factor=3, minimum=0) is None


@given(st.permutations(every(600, 7)))
def test_the_order_does_not_matter(commits: list[Commit]) -> None:
    stall = find_stall(commits, 1e6, factor=3, minimum=0)
    assert stall == find_stall(every(600, 7), 1e6, factor=3, minimum=0)


def test_it_is_the_same_stall_until_the_next_commit() -> None:
    now = [find_stall(every(600, 5), at, factor=3, minimum=0) for at in (1e5, 1e6)]
    assert now[0] is not None
    assert now[1] is not None
    assert now[0].key == now[1].key
    later = find_stall(every(600, 6), 1e6, factor=3, minimum=0)
    assert later is not None
    assert later.key != now[0].key


def uncommitted(name: str, size: int, quiet: float | None, progress: Progress = "incomplete") -> FoundStep:
    objects = {"__0_0.distcp": ObjectInfo("__0_0.distcp", size, 1000.0, name)}
    return FoundStep(name, 1, Survey(open_store("memory://x/y"), objects), progress, quiet)


def test_only_old_uncommitted_steps_are_junk() -> None:
    steps = [
        uncommitted("a", 60, 100),
        uncommitted("b", 60, 5),
        uncommitted("c", 60, 500),
        uncommitted("d", 60, None),
        uncommitted("e", 60, 900, "committed"),
        uncommitted("f", 60, 900, "writing"),
    ]
    junk = find_junk(steps, size=100, age=50)
    assert junk is not None
    assert (junk.steps, junk.bytes, junk.since) == (("c", "a"), 120, 1000.0)
    assert find_junk(steps, size=121, age=50) is None
    assert find_junk(steps, size=0, age=0) is None
    assert find_junk([], size=1, age=0) is None


def test_junk_is_told_anew_when_it_doubles_or_its_oldest_is_gone() -> None:
    def key(*steps: FoundStep) -> object:
        junk = find_junk(steps, size=100, age=0)
        assert junk is not None
        return junk.key

    old, more, much = uncommitted("a", 100, 900), uncommitted("b", 50, 10), uncommitted("c", 100, 5)
    assert key(old) == key(old, more)
    assert key(old, more) != key(old, more, much)
    assert key(old) != key(much)


def test_spans_are_readable() -> None:
    assert [human_span(s) for s in (0, 0.9, 40, 130, 7200, 200_000)] == [
        "less than 1 s",
        "less than 1 s",
        "40 s",
        "2 min",
        "2 h",
        "2 days",
    ]
