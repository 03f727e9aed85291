"""A script finds comments and docstrings that are no sentences, and names without a role."""

from pathlib import Path

import pytest

from scripts.check_language import faults, repository_files

REPOSITORY = Path(__file__).parents[3]


def test_all_folders_with_python_files_are_checked():
    folders = {path.name for path in REPOSITORY.iterdir() if any(path.glob("**/*.py"))}
    built = {"build", "dist", "node_modules"}

    names = {path.relative_to(REPOSITORY).parts[0] for path in repository_files()}
    assert names == {name for name in folders - built if not name.startswith(".")}


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("# Of rows that wait.\nx = 1\n", "1: a comment has 'Of rows that wait.'"),
        ("x = 1  # Not the last row.\n", "1: a comment has 'Not the last row.'"),
        (
            "# The limit is in bytes. The same\n# holds for rows.\nx = 1\n",
            "1: a comment has 'The same holds for rows.'",
        ),
        ("# An idle adapter makes way.\nx = 1\n", "1: a comment has 'An idle adapter makes way.'"),
        ('def f():\n    """..."""\n', "2: an empty docstring"),
        ('def f():\n    """Whether it fits."""\n', "2: a docstring begins 'Whether it fits.'"),
        ('class C:\n    """First rows."""\n', "2: a docstring has 'First rows.'"),
        (
            'def f():\n    """The rows that wait."""\n',
            "1: a function's docstring begins 'The rows that wait.'",
        ),
        (
            'class C:\n    """How it fits."""\n',
            "2: a docstring begins 'How it fits.'",
        ),
        (
            'def f():\n    """How it fits."""\n',
            "2: a docstring begins 'How it fits.'",
        ),
        ("# The server tells the rank.\nx = 1\n", "1: a comment has 'The server tells the rank.'"),
        ("# The rank is told.\nx = 1\n", "1: a comment has 'The rank is told.'"),
        (
            'def f():\n    """Notify the rank. Then tell clients."""\n',
            "2: a docstring has 'Then tell clients.'",
        ),
        (
            'class C:\n    @classmethod\n    async def f(cls):\n        """A row."""\n',
            "3: a function's docstring begins 'A row.'",
        ),
        ("for one in ():\n    pass\n", "1: a variable is named 'one'"),
        ("def f(given):\n    pass\n", "1: a variable is named 'given'"),
    ],
)
def test_a_fault_is_named_with_its_line(source, fault):
    assert faults(source) == [fault]


@pytest.mark.parametrize(
    "source",
    [
        "# Rows of the same request share a prefix.\nx = 1\n",
        '"""Return a row, e.g. Not found, as text."""\n',
        'def f():\n    """True if it is the first time. Notify the reader."""\n',
        "# It is untold how satellites are made.\nx = 1\n",
        '"""Return losses for ``tell``.\n\n>>> await session.tell(losses)\n"""\n',
        "one_row = 1\n",
        'x = "What is told is not a comment."\n',
        'class C:\n    @override\n    def f(self):\n        """The rows, sorted."""\n',
        'class C:\n    @property\n    def f(self):\n        """The rows."""\n',
    ],
)
def test_plain_sentences_pass(source):
    assert faults(source) == []
