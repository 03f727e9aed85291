"""The generated conversations: right by their own checks, reproducible, and split by problem."""

import json
from random import Random

import pytest

from demo.chat_format import IM_END, ChatFormat
from demo.checks import is_right, is_valid_call, parse_calls
from demo.compose import TASKS, surrounded, training_example
from demo.evaluate import held_out
from demo.example import Example, ToolCall, call_text, draw, split_of, user
from demo.tasks.arithmetic import add_steps, multiply_steps, subtract_steps


@pytest.mark.parametrize("task", TASKS)
def test_every_generated_answer_passes_its_own_check(task: str):
    rng = Random(task)
    for _ in range(50):
        example = surrounded(TASKS[task](rng), rng, "train")
        written = ChatFormat.target(example, thinking=True).removesuffix(IM_END)
        assert is_right(example, written)
        assert not is_right(example, "no answer")
        if example.calls:
            assert is_valid_call(example, written)


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_examples(task: str):
    assert [TASKS[task](Random(3)) for _ in range(3)] == [TASKS[task](Random(3)) for _ in range(3)]


def test_training_never_draws_a_held_out_problem():
    rng = Random(5)
    held = {(example.task, example.key) for task in TASKS for example in held_out(task, 20, seed=1)}
    assert len(held) > 15 * len(TASKS)
    for _ in range(1500):
        example = training_example(rng)
        assert split_of(example) == "train"
        assert (example.task, example.key) not in held


def test_an_addition_and_its_mirror_image_belong_to_the_same_split():
    seen: dict[frozenset[str], str] = {}
    rng = Random(2)
    for _ in range(4000):
        example = TASKS["addition"](rng)
        numbers = frozenset(example.key.removeprefix("table:").split("+"))
        assert seen.setdefault(numbers, split_of(example)) == split_of(example)


def test_held_out_problems_are_distinct_and_held_out():
    examples = held_out("two_digit_addition", 60, seed=0)
    assert len(examples) == 60
    assert {split_of(example) for example in examples} == {"held_out"}
    assert all(10 <= int(part) <= 99 for example in examples for part in example.key.split("+"))


def test_draw_returns_the_split_asked_for():
    rng = Random(1)
    assert split_of(draw(TASKS["copy"], rng, "held_out")) == "held_out"
    assert split_of(draw(TASKS["copy"], rng, "train")) == "train"


@pytest.mark.parametrize(("a", "b"), [(5, 7), (99, 1), (478, 605), (0, 0), (999, 999)])
def test_addition_steps_end_with_the_digits_of_the_sum(a: int, b: int):
    lines = add_steps(a, b).splitlines()
    digits = [line.split(": ")[1].split(",")[0] for line in lines]
    carry = lines[-1].rsplit(" ", 1)[1]
    assert int(carry + "".join(reversed(digits))) == a + b


@pytest.mark.parametrize(("a", "b"), [(7, 5), (100, 1), (605, 478), (12, 47)])
def test_subtraction_steps_end_with_the_digits_of_the_difference(a: int, b: int):
    lines = [line for line in subtract_steps(a, b).splitlines() if "borrow" in line]
    digits = [line.split(": ")[1].split(",")[0] for line in lines]
    assert int("".join(reversed(digits))) == abs(a - b)
    assert lines[-1].endswith("borrow 0")


@pytest.mark.parametrize(("a", "b"), [(7, 47), (47, 7), (77, 56), (90, 40), (13, 10)])
def test_multiplication_steps_end_with_the_product(a: int, b: int):
    assert multiply_steps(a, b).splitlines()[-1] == f"= {a * b}"


def test_small_products_are_known_by_heart():
    assert multiply_steps(3, 4) == "4 * 3 = 12"


def _call_example() -> Example:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}},
    }
    return Example(
        task="tool_call",
        key="k",
        messages=(user("call f"),),
        tools=(tool,),
        calls=(ToolCall("f", {"x": 1}),),
        check="calls",
    )


@pytest.mark.parametrize(
    ("written", "right", "valid"),
    [
        (call_text(ToolCall("f", {"x": 1})), True, True),
        (call_text(ToolCall("f", {"x": 2})), False, True),
        (call_text(ToolCall("f", {"y": 1})), False, False),
        (call_text(ToolCall("g", {"x": 1})), False, False),
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1}\n</tool_call>', False, False),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', False, False),
        ('<tool_call>\n["f"]\n</tool_call>', False, False),
        ("f(1)", False, False),
    ],
)
def test_tool_calls_are_judged_by_form_name_and_arguments(written: str, right: bool, valid: bool):
    example = _call_example()
    assert is_right(example, written) is right
    assert is_valid_call(example, written) is valid


def test_two_calls_are_both_read():
    calls = [ToolCall("a", {}), ToolCall("b", {"x": "é"})]
    assert parse_calls("\n".join(map(call_text, calls))) == calls


def test_thinking_is_not_part_of_the_judged_answer():
    example = Example(task="t", key="k", messages=(user("1+1"),), answer="2", check="number")
    assert is_right(example, "<think>\n1 + 1 = 3\n</think>\n\n2")
    assert not is_right(example, "<think>\n1 + 1 = 2\n</think>\n\n3")


def test_json_answers_are_compared_as_values():
    answer = json.dumps({"a": 1, "b": "x"})
    example = Example(task="t", key="k", messages=(user("?"),), answer=answer, check="json")
    assert is_right(example, '{"b":"x","a":1}')
    assert not is_right(example, '{"b":"x"}')
    assert not is_right(example, "{")
