"""Which accepted step the keys of a step are judged by."""

from tasks.acceptance import Accepted
from tasks.ledger import StepKey


def test_a_step_is_judged_by_the_last_accepted_one_up_to_itself() -> None:
    keys = [StepKey(f"step_{number}", f"{number}" * 64) for number in (1, 3)]
    accepted = Accepted(((1, keys[0]), (3, keys[1])))
    assert [accepted.basis(number)[:1] for number in (0, 1, 2, 3, 9)] == ["", "1", "1", "3", "3"]
    assert keys[1] in accepted
    assert StepKey("step_3", "1" * 64) not in accepted
