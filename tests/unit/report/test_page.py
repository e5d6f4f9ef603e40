"""The page on runs: whole, at rest, and deaf to what names in logs would have it do."""

from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from commands import call
from run_logs import memory_event, peak, write_run

from tba_offload.errors import MissingDependencyError
from tba_offload.report.log import read_run_log
from tba_offload.report.page import page

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["layers.0", "layers.1", "layers.2"]
EVIL = "<script>alert(1)</script><img src=http://x onerror=y>"


def run(path: Path, *, header: dict[str, Any] | None = None, **fields: Any) -> Path:
    plan = {
        name: {"layer": number, "placement": "auto", "why": "default"} for number, name in enumerate(NAMES)
    }
    phases = {"forward": peak(30, layer=1, in_flight=4), "loss": peak(100, layer=2, beside=2)}
    fields = {"tokens": 1000} | fields
    return write_run(path, memory_event(2, NAMES, **phases), header={"plan": plan} | (header or {}), **fields)


class Strict(HTMLParser):
    """Takes a page apart, and stops where a browser would have to guess."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not [name for name, _ in attributes if name.startswith("on")]
        self.loads += [value or "" for name, value in attributes if name in {"src", "href", "srcset"}]
        if tag not in {"meta", "link", "br", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def page_of(*paths: Path) -> Strict:
    return Strict(page([read_run_log(path) for path in paths]).decode())


def test_the_page_asks_for_nothing_and_its_pictures_are_whole(tmp_path: Path) -> None:
    found = page_of(
        run(tmp_path / "a.jsonl", loss=2.5), run(tmp_path / "b.jsonl", header={"strategy": "keep"})
    )
    assert not found.tags & {"script", "iframe", "object", "form", "base"}
    assert all(each.startswith("data:") for each in found.loads)
    pictures = [each.removeprefix("data:image/svg+xml;base64,") for each in found.loads if "svg" in each]
    assert len(pictures) == 2  # the ROK curve, and the steps of both
    for each in pictures:
        picture = base64.b64decode(each).decode()
        ET.fromstring(picture)
        assert not re.search(r"<script|(href|src)=\"(?!#)", picture)


def test_what_a_log_says_is_text(tmp_path: Path) -> None:
    evil = {"strategy": EVIL, "model": {EVIL: EVIL, "name": EVIL}, "policy": EVIL}
    found = page_of(run(tmp_path / "a.jsonl", header=evil))
    assert "script" not in found.tags
    assert EVIL in found.text


def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, out = run(tmp_path / "a.jsonl"), tmp_path / "a.html"
    result = call("report", log, "-o", out)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}: {out.stat().st_size / 1e6:.1f} MB, 1 run\n"
    assert call("report", log, "-o", log).exit_code == 1
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tba-offload\[report\]'"):
        page_of(log)
