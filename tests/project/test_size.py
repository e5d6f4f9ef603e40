"""The library stays small, and one file names what is private of PyTorch."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import tba_offload

LIBRARY = Path(tba_offload.__file__).parent
LINES, FILES = 14_792, 120
"""Lines of code at most, without blanks, comments and docstrings, and files. Both only shrink."""

IGNORED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    source = path.read_text(encoding="utf-8")
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in IGNORED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def test_the_library_does_not_grow() -> None:
    paths = list(LIBRARY.rglob("*.py"))
    assert (sum(map(code_lines, paths)) <= LINES, len(paths) <= FILES) == (True, True)


def test_one_file_has_all_private_names_of_pytorch() -> None:
    """Names below ``torch._`` and ``torch.x._``."""
    name = re.compile(
        r"\btorch(?!\.ops)(\.\w+)*\._[a-zA-Z]\w*|\bnn\.Module\._\w+|_execution_engine|_sequence_nr"
    )
    found = {
        f"{file.relative_to(LIBRARY)}: {match[0]}"
        for file in LIBRARY.rglob("*.py")
        if file.name != "torch_private.py"
        for match in name.finditer(file.read_text())
    }
    assert found == set()
