"""A text and a tokenizer for torchtitan, which comes without its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from places import ROOT
from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:
    from pathlib import Path


def options_with_text(directory: Path) -> list[str]:
    """Writes a data set like torchtitan's for tests, of these docs, and a tokenizer whose tokens are bytes.

    Args:
        directory: Where folders for both are made.

    Returns:
        Options of torchtitan that name them.
    """
    text, tokenizer = directory / "text", directory / "tokenizer"
    text.mkdir()
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))]
    lines = "".join(json.dumps({"text": page}) + "\n" for page in pages)
    (text / "data.json").write_text(lines, encoding="utf-8")
    tokenizer.mkdir()
    vocabulary = {token: number for number, token in enumerate(sorted(ByteLevel.alphabet()))}
    (tokenizer / "vocab.json").write_text(json.dumps(vocabulary))
    (tokenizer / "merges.txt").write_text("")
    return [f"--model.hf_assets_path={tokenizer}", f"--training.dataset_path={text}"]
