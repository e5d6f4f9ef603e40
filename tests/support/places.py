"""Where the checkout's folders are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
EXAMPLES = ROOT / "examples"
BENCHMARKS = ROOT / "benchmarks"
