"""The page on troubleshooting quotes messages that the code still has."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from places import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = ROOT / "docs" / "reference" / "troubleshooting.md"
LEAST = 12
"""Characters of a piece of a message that is looked for; shorter ones would be found anywhere."""


def test_quoted_messages_are_those_of_the_code() -> None:
    modules = [path for room in ("tba_offload", "tba_lab") for path in (ROOT / room).rglob("*.py")]
    texts = "\n".join(text for path in modules for text in texts_of(path))
    quoted = list(quoted_pieces(PAGE.read_text(encoding="utf-8")))
    assert len(quoted) > 100
    assert [piece for piece in quoted if piece not in texts] == []


def texts_of(path: Path) -> Iterator[str]:
    """All strings of a module, a line each; what an f-string fills in is ``…``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts = [part.value if isinstance(part, ast.Constant) else "…" for part in parts]
        yield " ".join("".join(text for text in texts if isinstance(text, str)).split())


def quoted_pieces(page: str) -> Iterator[str]:
    """The literal pieces of what the first columns of the tables of messages quote."""
    for rows in re.findall(r"^\| (?:message|warning) \|.*\n\|-.*\n((?:\|.*\n)+)", page, re.MULTILINE):
        for row in rows.splitlines():
            for message in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
                yield from (piece.strip() for piece in message.split("…") if len(piece.strip()) >= LEAST)
