"""The library stays small."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import tba_offload

LINES, FILES = 14_300, 116
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
    paths = list(Path(tba_offload.__file__).parent.rglob("*.py"))
    assert (sum(map(code_lines, paths)) <= LINES, len(paths) <= FILES) == (True, True)
