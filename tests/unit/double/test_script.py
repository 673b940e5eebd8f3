"""The double does what real vLLM was recorded to do, step by step (docs/double-validation.md)."""

from tests.contract.engines import doubles
from tests.contract.recording import read
from tests.contract.script import differences, run
from tests.contract.steps import STEPS


async def test_the_double_gives_the_sequence_that_was_recorded_from_vllm() -> None:
    async with doubles() as target:
        seen = {name: what async for name, what in run(target, STEPS)}
    assert differences(read(), seen) == {}


def test_the_recording_is_of_all_steps() -> None:
    assert list(read()) == [step.__name__ for step in STEPS]


def test_a_difference_is_named_with_both_values() -> None:
    one = {"step": {"a": 1, "b": {"c": 2}}}
    other = {"step": {"a": 1, "b": {"c": 3}}, "more": {"d": 4}}
    assert differences(one, other) == {
        "step.b": ({"c": 2}, {"c": 3}),
        "more.d": ("(not seen)", 4),
    }
