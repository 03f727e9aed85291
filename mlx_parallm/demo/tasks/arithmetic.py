"""Addition, subtraction and small products, with column-by-column steps for thinking."""

from __future__ import annotations

from random import Random

from mlx_parallm.demo.example import TABLE, Example, user
from mlx_parallm.demo.phrasing import phrase
from mlx_parallm.demo.words import FOODS, NAMES, OBJECTS

_BRIEF = (
    "{q} Reply with just the number.",
    "{q} Answer with the number only.",
    "{q} Only the number, please.",
    "{q} Give only the result.",
)
_ASK = ("What is {e}?", "What's {e}?", "{e}", "{e} =", "{e}=?", "Calculate {e}.", "Compute {e}.",
        "How much is {e}?", "Solve {e}.", "Can you tell me what {e} is?")  # fmt: skip
_STORIES = {
    "+": (
        "{name} has {a} {thing}s and buys {b} more. How many {thing}s does {name} have now?",
        "There are {a} {thing}s in one box and {b} in another. How many {thing}s are there?",
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
    ),
    "-": (
        "{name} has {a} {thing}s and gives away {b}. How many {thing}s are left?",
        "There were {a} {thing}s and {b} were sold. How many {thing}s remain?",
        "Subtract {b} from {a}.",
        "What is the difference between {a} and {b}?",
    ),
    "*": (
        "There are {a} boxes with {b} {thing}s each. How many {thing}s are there in all?",
        "Multiply {a} by {b}.",
        "What is the product of {a} and {b}?",
    ),
}
_SPOKEN = {"+": "plus", "-": "minus", "*": "times"}


def addition(rng: Random) -> Example:
    """Sum of two numbers of up to three digits."""
    a, b = _number(rng), _number(rng)
    key = f"{min(a, b)}+{max(a, b)}"
    return _example(rng, "addition", key, ("+", a, b), a + b, add_steps(a, b))


def subtraction(rng: Random) -> Example:
    """Difference of two numbers of up to three digits, rarely negative."""
    a, b = _number(rng), _number(rng)
    if a < b and rng.random() < 0.9:
        a, b = b, a
    return _example(rng, "subtraction", f"{a}-{b}", ("-", a, b), a - b, subtract_steps(a, b))


def multiplication(rng: Random) -> Example:
    """Product of numbers up to twelve, or of a two-digit and a one-digit number."""
    if rng.random() < 0.5:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
    else:
        a, b = rng.randint(10, 99), rng.randint(2, 9)
        a, b = (a, b) if rng.random() < 0.7 else (b, a)
    key = f"{min(a, b)}*{max(a, b)}"
    return _example(rng, "multiplication", key, ("*", a, b), a * b, multiply_steps(a, b))


def _number(rng: Random) -> int:
    digits = rng.choices((1, 2, 3), (0.15, 0.5, 0.35))[0]
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _example(
    rng: Random, task: str, key: str, problem: tuple[str, int, int], result: int, steps: str
) -> Example:
    sign, a, b = problem
    brief = rng.random() < 0.3
    question = _question(rng, sign, a, b)
    if brief:
        question = phrase(rng, _BRIEF, q=question)
    answer = str(result) if brief else f"{a} {sign} {b} = {result}"
    return Example(
        task=task,
        key=key if max(a, b) > 12 else TABLE + key,
        messages=(user(question),),
        answer=answer,
        steps=steps if max(a, b) > 9 else "",
        check="number",
    )


def _question(rng: Random, sign: str, a: int, b: int) -> str:
    if rng.random() < 0.3 and a >= b:
        thing = rng.choice(FOODS[:20] + OBJECTS[:40])
        name = rng.choice(NAMES)
        return phrase(rng, _STORIES[sign], a=a, b=b, thing=thing, name=name)
    shown = rng.choice(("x", "×", "*", "*")) if sign == "*" else sign
    style = rng.random()
    if style < 0.15:
        expression = f"{a} {_SPOKEN[sign]} {b}"
    elif style < 0.35:
        expression = f"{a}{shown}{b}"
    else:
        expression = f"{a} {shown} {b}"
    return phrase(rng, _ASK, e=expression)


def add_steps(a: int, b: int) -> str:
    """Column addition from the right, one line a column."""
    lines, carry = [], 0
    for column in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**column % 10, b // 10**column % 10
        total = x + y + carry
        lines.append(f"{x} + {y} + {carry} = {total}: {total % 10}, carry {total // 10}")
        carry = total // 10
    return "\n".join(lines)


def subtract_steps(a: int, b: int) -> str:
    """Column subtraction from the right, one line a column; the larger number comes first."""
    lines, borrow = [], 0
    if a < b:
        lines.append(f"{a} < {b}, so - ({b} - {a})")
        a, b = b, a
    for column in range(len(str(a))):
        x, y = a // 10**column % 10, b // 10**column % 10
        left = x - y - borrow
        lines.append(f"{x} - {y} - {borrow} = {left}: {left % 10}, borrow {int(left < 0)}")
        borrow = int(left < 0)
    return "\n".join(lines)


def multiply_steps(a: int, b: int) -> str:
    """The digits of the larger factor times the smaller one, then the sum."""
    a, b = max(a, b), min(a, b)
    if a < 13 and b < 13:
        return f"{a} * {b} = {a * b}"
    tens, ones = a // 10 * 10, a % 10
    parts = tens * b, ones * b
    products = f"{tens} * {b} = {parts[0]}\n{ones} * {b} = {parts[1]}"
    return f"{products}\n{parts[0]} + {parts[1]}\n{add_steps(*parts)}"
