"""Comments and docstrings are sentences, and names say roles."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# The rooms that the rules hold for. The list grows until it is the whole package, and then goes.
CLEAN_ROOMS = (
    "benchmarks",
    "demo",
    "examples",
    "loadtests",
    "mlx_parallm/adapters",
    "mlx_parallm/api",
    "mlx_parallm/art",
    "mlx_parallm/batch_jobs",
    "mlx_parallm/bench",
    "mlx_parallm/peers",
    "mlx_parallm/cli",
    "mlx_parallm/client",
    "mlx_parallm/config.py",
    "mlx_parallm/demo_models",
    "mlx_parallm/distributed",
    "mlx_parallm/engine",
    "mlx_parallm/generation",
    "mlx_parallm/grammar",
    "mlx_parallm/kernels",
    "mlx_parallm/llm.py",
    "mlx_parallm/media",
    "mlx_parallm/models",
    "mlx_parallm/numerics",
    "mlx_parallm/machine.py",
    "mlx_parallm/offline",
    "mlx_parallm/parsing",
    "mlx_parallm/pooling",
    "mlx_parallm/process_setup",
    "mlx_parallm/serving",
    "mlx_parallm/storage",
    "mlx_parallm/tokenizer",
    "mlx_parallm/types",
    "mlx_parallm/units.py",
    "mlx_parallm/worker",
    "scripts",
    "tests/*.py",
    "tests/builders",
    "tests/conformance",
    "tests/e2e",
    "tests/integration",
    "tests/kernels",
    "tests/trainers",
    "tests/unit/*.py",
    "tests/unit/adapters",
    "tests/unit/api",
    "tests/unit/art",
    "tests/unit/batch_jobs",
    "tests/unit/bench",
    "tests/unit/cli",
    "tests/unit/client",
    "tests/unit/demo",
    "tests/unit/distributed",
    "tests/unit/engine",
    "tests/unit/generation",
    "tests/unit/grammar",
    "tests/unit/kernels",
    "tests/unit/loadtests",
    "tests/unit/media",
    "tests/unit/models",
    "tests/unit/numerics",
    "tests/unit/parsing",
    "tests/unit/pooling",
    "tests/unit/process_setup",
    "tests/unit/scripts",
    "tests/unit/serving",
    "tests/unit/storage",
    "tests/unit/tokenizer",
    "tests/unit/types",
    "tests/unit/worker",
)

_FRAGMENT = re.compile(r"(Of|Not|First|The same)\b(?! time\b)")
# A docstring says what is returned or done, in words such as "Return" and "True if".
_NO_FIRST_WORD = re.compile(r"(What|Whether|Whose|\.\.\.)\b")
# A function's docstring begins with a verb; a property's may name the value.
_NO_VERB = re.compile(r"(A|An|The|How|Why|When|Where|So|As|All|It|They)\b")
_EMPTY = re.compile(r"[\s.…]*")
# The field says evict, apply, notify, delete.
_PRIVATE_WORDS = re.compile(r"\b(heed\w*|(mak(e|es|ing)|made) way|put away|whoever)\b", re.I)
_SENTENCE_END = re.compile(r"(?<=[a-z0-9)`\"'][.?!])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z])")
_NAMES_WITHOUT_ROLE = frozenset({"one", "found", "given", "asked", "told", "whose"})


def sentences(text: str) -> list[str]:
    return _SENTENCE_END.split(" ".join(text.split()))


def fragments(text: str) -> list[str]:
    """Return the sentences that begin as fragments do, or have words of a private language."""
    return [
        sentence
        for sentence in sentences(text)
        if _FRAGMENT.match(sentence) or _PRIVATE_WORDS.search(sentence)
    ]


def comment_blocks(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments; those on successive lines are one text."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield start, " ".join(block)
            block = []
        start = start if block else line
        block.append(token.string.lstrip("#: "))
        last = line
    if block:
        yield start, " ".join(block)


def faults_of_comments(source: str) -> Iterator[str]:
    for line, text in comment_blocks(source):
        for sentence in fragments(text):
            yield f"{line}: a comment has {sentence[:50]!r}"


def faults_of_docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
                text = text.strip()
            case _:
                continue
        if _EMPTY.fullmatch(text):
            yield f"{line}: an empty docstring"
        if _NO_FIRST_WORD.match(text):
            yield f"{line}: a docstring begins {text[:50]!r}"
        for sentence in fragments(text):
            yield f"{line}: a docstring has {sentence[:50]!r}"


def faults_of_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        is_property = any("property" in ast.unparse(by) for by in node.decorator_list)
        if _NO_VERB.match(text) and not is_property:
            yield f"{node.lineno}: a function's docstring begins {text[:50]!r}"


def faults_of_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name.lstrip("_") in _NAMES_WITHOUT_ROLE:
            yield f"{node.lineno}: a variable is named {name!r}"


def faults(source: str) -> list[str]:
    tree = ast.parse(source)
    return [
        *faults_of_comments(source),
        *faults_of_docstrings(tree),
        *faults_of_functions(tree),
        *faults_of_names(tree),
    ]


def files_of(room: str) -> list[Path]:
    path = REPOSITORY / room
    if "*" in room:
        return sorted(REPOSITORY.glob(room))
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


@pytest.mark.parametrize("room", CLEAN_ROOMS)
def test_the_room_is_written_in_plain_sentences(room):
    files = files_of(room)
    assert files, f"{room} has no Python files"
    assert [
        f"{path.relative_to(REPOSITORY)}:{fault}"
        for path in files
        for fault in faults(path.read_text())
    ] == []


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
        "one_row = 1\n",
        'class C:\n    @property\n    def f(self):\n        """The rows."""\n',
    ],
)
def test_plain_sentences_pass(source):
    assert faults(source) == []
