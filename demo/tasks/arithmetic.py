"""Addition, subtraction and small products, with column-by-column steps for thinking."""

from __future__ import annotations

from random import Random

from demo.example import TABLE, Example, user
from demo.phrasing import listing, phrase
from demo.words import FOODS, NAMES, OBJECTS

_BRIEF = (
    "{q} Reply with just the number.",
    "{q} Answer with the number only.",
    "{q} Only the number, please.",
    "{q} Give only the result.",
    "{q} Answer with just the number.",
    "{q} Just the number.",
    "{q} Number only.",
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
_MORE = ("Is {a} greater than {b}?", "Is {a} larger than {b}?", "Is {a} bigger than {b}?",
         "Is {a} > {b}?", "Is {a} more than {b}?")  # fmt: skip
_LESS = ("Is {a} less than {b}?", "Is {a} smaller than {b}?", "Is {a} < {b}?")
_LARGEST = ("What is the largest number in {items}", "Which number is the largest: {items}",
            "Which is larger: {items}", "Find the maximum of {items}",
            "What is the maximum: {items}",
            "What is the biggest of these numbers: {items}")  # fmt: skip
_LEAST = ("What is the smallest number in {items}", "Which number is the smallest: {items}",
          "Which is smaller: {items}", "Find the minimum of {items}",
          "What is the minimum: {items}")  # fmt: skip
_SPOKEN = {"+": "plus", "-": "minus", "*": "times"}


def addition(rng: Random) -> Example:
    """Return a sum of two numbers of up to four digits, mostly two or three."""
    a, b = _number(rng), _number(rng)
    key = f"{min(a, b)}+{max(a, b)}"
    return _example(rng, "addition", key, ("+", a, b), a + b, add_steps(a, b))


def subtraction(rng: Random) -> Example:
    """Return a difference of two numbers of up to four digits, rarely negative."""
    a, b = _number(rng), _number(rng)
    if a < b and rng.random() < 0.9:
        a, b = b, a
    return _example(rng, "subtraction", f"{a}-{b}", ("-", a, b), a - b, subtract_steps(a, b))


def multiplication(rng: Random) -> Example:
    """Return a product of numbers up to twelve, or of a two-digit and a shorter number."""
    kind = rng.random()
    if kind < 0.35:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
    elif kind < 0.5:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
    else:
        a, b = rng.randint(10, 99), rng.randint(2, 9)
        a, b = (a, b) if rng.random() < 0.7 else (b, a)
    key = f"{min(a, b)}*{max(a, b)}"
    return _example(rng, "multiplication", key, ("*", a, b), a * b, multiply_steps(a, b))


def _number(rng: Random) -> int:
    digits = rng.choices((1, 2, 3, 4), (0.15, 0.45, 0.3, 0.1))[0]
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
    shown = rng.choice(("x", "\u00d7", "*", "*")) if sign == "*" else sign
    style = rng.random()
    if style < 0.15:
        expression = f"{a} {_SPOKEN[sign]} {b}"
    elif style < 0.35:
        expression = f"{a}{shown}{b}"
    else:
        expression = f"{a} {shown} {b}"
    return phrase(rng, _ASK, e=expression)


def add_steps(a: int, b: int) -> str:
    """Return the lines of column addition from the right, one per column."""
    lines, carry = [], 0
    for column in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**column % 10, b // 10**column % 10
        total = x + y + carry
        lines.append(f"{x} + {y} + {carry} = {total}: {total % 10}, carry {total // 10}")
        carry = total // 10
    return "\n".join(lines)


def subtract_steps(a: int, b: int) -> str:
    """Return the lines of column subtraction from the right; the larger number comes first."""
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
    """Return the digits of the larger factor times the smaller one, then the sum."""
    a, b = max(a, b), min(a, b)
    if a < 13 and b < 13:
        return f"{a} * {b} = {a * b}"
    lines, total = [], 0
    for part in (b // 10 * 10, b % 10):
        for piece in (a // 10 * 10, a % 10):
            if part and piece:
                product = part * piece
                lines.append(f"{piece} * {part} = {product}")
                if total:
                    lines += [f"{total} + {product}", add_steps(total, product)]
                total += product
                lines.append(f"= {total}")
    return "\n".join(lines)


def three_terms(rng: Random) -> Example:
    """Return a sum of three numbers, added one after the other."""
    terms = [rng.randrange(10 ** rng.randint(1, 2)) for _ in range(3)]
    first = terms[0] + terms[1]
    steps = (
        f"{terms[0]} + {terms[1]}\n{add_steps(terms[0], terms[1])}\n"
        f"{first} + {terms[2]}\n{add_steps(first, terms[2])}"
    )
    shown = " + ".join(map(str, terms)) if rng.random() < 0.7 else "+".join(map(str, terms))
    if rng.random() < 0.2:
        question = phrase(
            rng, ("Add {0}, {1} and {2}.", "What is the sum of {0}, {1} and {2}?"), *terms
        )
    else:
        question = phrase(rng, _ASK, e=shown)
    return Example(
        task="three_terms",
        key=" ".join(map(str, sorted(terms))),
        messages=(user(question),),
        answer=f"{' + '.join(map(str, terms))} = {sum(terms)}",
        steps=steps,
        check="number",
    )


def compare(rng: Random) -> Example:
    """Return the largest or smallest of some numbers, or whether one is larger than another."""
    count = 2 if rng.random() < 0.5 else rng.randint(3, 7)
    top = rng.choice((10, 100, 100, 1000))
    numbers = [rng.randrange(top) for _ in range(count)]
    kind = rng.random()
    if kind < 0.3:
        a, b = numbers[:2]
        less = rng.random() < 0.4
        question = phrase(rng, _LESS if less else _MORE, a=a, b=b)
        answer = "Yes." if (a < b if less else a > b) else "No."
    else:
        least = rng.random() < 0.4
        question = phrase(rng, _LEAST if least else _LARGEST, items=listing(rng, numbers))
        answer = str(min(numbers) if least else max(numbers))
    return Example(
        task="compare", key=f"{numbers} {kind < 0.3}", messages=(user(question),), answer=answer
    )
