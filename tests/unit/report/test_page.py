"""The page on runs: whole, at rest, and deaf to what names in logs would have it do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from run_logs import MIB, memory_event, peak, write_run

from tba_offload import cli
from tba_offload.errors import MissingDependencyError
from tba_offload.report.charts import Series, Stack, over_steps, stacked
from tba_offload.report.digest import Digest, faults
from tba_offload.report.endurance import endurance
from tba_offload.report.evidence import HOLDERS, Evidence
from tba_offload.report.log import read_run_log
from tba_offload.report.page import page
from tba_offload.report.page_charts import PARTS
from tba_offload.report.page_layers import layers_table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = ["layers.0", "layers.1", "layers.2"]
PLAN = {
    name: {"layer": number, "placement": "offload", "why": "default"} for number, name in enumerate(NAMES)
}


def event(step: int = 2, names: list[str] = NAMES) -> dict[str, Any]:
    phases = {"forward": peak(30, layer=1, in_flight=4), "loss": peak(100, layer=2, beside=2)}
    return memory_event(step, names, **phases)


def run(path: Path, *, names: list[str] = NAMES, header: dict[str, Any] | None = None, **fields: Any) -> Path:
    plan = {name: PLAN["layers.0"] | {"layer": number} for number, name in enumerate(names)}
    return write_run(path, event(names=names), header={"plan": plan} | (header or {}), **fields)


def text_of(*paths: Path, **options: Any) -> str:
    return page([read_run_log(path) for path in paths], **options).decode()


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, list(map(str, arguments)))


class Strict(HTMLParser):
    """Takes a page apart, and stops where a browser would have to guess."""

    VOID = frozenset({"meta", "link", "br", "img", "hr", "input"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), (tag, names)
        assert not [name for name in names if name.startswith("on")]
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in {"src", "href", "xlink:href", "data", "action", "poster", "srcset"}:
                self.loads.append(value or "")
        if tag not in self.VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    found = Strict(text_of(run(tmp_path / "a.jsonl"), run(tmp_path / "b.jsonl")))
    assert len(found.ids) == len(set(found.ids))
    assert {load for load in found.loads if not load.startswith("#")} == {"data:,"}
    assert {load.removeprefix("#") for load in found.loads if load.startswith("#")} <= set(found.ids)
    assert found.tags & {"script", "iframe", "object", "embed", "form", "img"} == set()


def test_the_page_forbids_scripts_and_requests(tmp_path: Path) -> None:
    text = text_of(run(tmp_path / "run.jsonl"))
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    assert re.findall(r"url\((?!#)[^)]*\)|@import", text) == []


def test_the_page_says_what_it_is_for(tmp_path: Path) -> None:
    path = run(tmp_path / "run.jsonl", header={"policy": "default: offload\n", "model": {"name": "tiny"}})
    said = " ".join(Strict(text_of(path)).text)
    for part in (
        "Activation peak",
        "100 MiB",
        "compute the loss in 8 chunks of tokens",
        "layers.0-2",
        "default: offload",
        "Nothing was predicted in this run",
        "None: no read or write failed",
        "The median step writes 300 MiB to drives in 0.500 s",
        "tiny",
    ):
        assert part in said


def test_several_runs_are_compared(tmp_path: Path) -> None:
    slow = run(tmp_path / "slow.jsonl", seconds=2.0)
    text = text_of(run(tmp_path / "fast.jsonl"), slow)
    assert "2 runs compared" in text
    assert 'href="#run2">slow.jsonl' in text
    assert '<article id="run2">' in text


def test_the_same_logs_give_the_same_page(tmp_path: Path) -> None:
    path = run(tmp_path / "run.jsonl")
    assert text_of(path) == text_of(path)


def test_a_run_with_a_budget_tells_what_lay_on_the_device(tmp_path: Path) -> None:
    known: dict[str, Any] = {"device_peak_bytes": 148 * MIB, "activation_budget_bytes": 26 * MIB}
    known |= {"base_bytes": 122 * MIB, "gradient_peak_bytes": 2 * MIB}
    policy = "budget:\n  activation_bytes: 0\n  device_bytes: 150MiB\n"
    path = run(tmp_path / "run.jsonl", header={"policy": policy}, **known)
    said = re.sub(r"\s+", " ", " ".join(Strict(text_of(path)).text))
    assert "All on the device 148 MiB of 150MiB the largest; activations may take 26.0 MiB, 122 MiB" in said
    path = run(tmp_path / "other.jsonl", **known)
    assert "148 MiB the largest" in re.sub(r"\s+", " ", " ".join(Strict(text_of(path)).text))
    without = run(tmp_path / "without.jsonl", device_peak_bytes=148 * MIB)
    assert "All on the device" not in text_of(without)


@pytest.mark.parametrize(("seconds", "said"), [(0.25, "optimizer included"), (None, "without the optimizer")])
def test_whether_the_time_of_a_step_has_the_update_in_it_is_told(
    seconds: float | None, said: str, tmp_path: Path
) -> None:
    assert f"the median, {said}" in text_of(run(tmp_path / "run.jsonl", optimizer_seconds=seconds))


def test_prediction_stands_beside_measurement(tmp_path: Path) -> None:
    path = run(tmp_path / "run.jsonl", predicted_peak_bytes=80 * MIB, predicted_seconds=0.4)
    said = re.sub(r"\s+", " ", " ".join(Strict(text_of(path)).text))
    assert "Activation peak 4 80.0 MiB 100 MiB 1.25 1.25" in said
    assert "Step without optimizers 4 0.400 s 0.500 s 1.25 1.25" in said


def test_layers_are_rows_by_placement_and_by_how_they_run(tmp_path: Path) -> None:
    plan = {
        name: {"layer": number, "placement": "auto", "why": "default"} for number, name in enumerate(NAMES)
    }
    told = event() | {
        "placements": ["offload", "offload", "keep"],
        "layers": [[1, 2, 3], [4, 2, 3], [9, 8, 7]],
    }
    path = write_run(tmp_path / "run.jsonl", told, header={"plan": plan})
    table = layers_table(Evidence.of(read_run_log(path)))
    assert table is not None
    assert table.rows == (
        ("0-1", "layers.0-1", "auto", "offload", "default", "4.00 B", "2.00 B", "3.00 B"),
        ("2", "layers.2", "auto", "keep", "default", "9.00 B", "8.00 B", "7.00 B"),
    )


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_that_has_hardly_begun_has_its_page(tmp_path: Path, steps: int) -> None:
    bare = {"activation_peak_bytes": None, "peak_source": None, "offloaded_bytes": 0, "seconds": 0.0}
    Strict(text_of(run(tmp_path / "run.jsonl", steps=steps, **bare)))


def test_commands_in_advice_are_set_as_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sentences = ["ask `tba-offload doctor <DIR>`; or `init`", "more layers"]
    monkeypatch.setattr("tba_offload.report.why.Diagnosis.advice", lambda _: sentences)
    found = text_of(run(tmp_path / "run.jsonl"))
    assert "<li>ask <code>tba-offload doctor &lt;DIR&gt;</code>; or <code>init</code></li>" in found
    assert "<li>more layers</li>" in found


def test_a_peak_is_that_of_the_steps_in_which_memory_was_measured(tmp_path: Path) -> None:
    plain = run(tmp_path / "run.jsonl")
    lines = [json.loads(line) for line in plain.read_text().splitlines()]
    for line in lines:
        if line["event"] == "step" and line["step"] not in {4, 5}:
            line |= {"activation_peak_bytes": None, "peak_source": None}
    plain.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    said = re.sub(r"\s+", " ", " ".join(Strict(text_of(plain)).text))
    assert "Activation peak 100 MiB the largest of 2 steps; mallinfo2" in said
    unknown = run(tmp_path / "unknown.jsonl", activation_peak_bytes=None, peak_source=None)
    said = re.sub(r"\s+", " ", " ".join(Strict(text_of(unknown)).text))
    assert "Activation peak not known not measured" in said


def test_a_run_that_moves_nothing_has_no_picture_of_traffic(tmp_path: Path) -> None:
    assert "Traffic over steps" in text_of(run(tmp_path / "moves.jsonl"))
    keeps = run(tmp_path / "keeps.jsonl", offloaded_bytes=0, read_bytes=0)
    said = text_of(keeps)
    assert "Traffic over steps" not in said
    assert "Time over steps" in said


@pytest.mark.parametrize(("command", "option"), [("report", "-o"), ("timeline", "-o"), ("rok", "--csv")])
def test_a_log_is_not_written_over(command: str, option: str, tmp_path: Path) -> None:
    path = run(tmp_path / "run.json")
    before = path.read_bytes()
    result = call(command, path, option, path)
    assert result.exit_code == 1
    assert "run.json: is a run log, and stays as it is" in result.stderr
    assert path.read_bytes() == before


# Hostile names


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """An address on this machine, and what was asked of it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of its base
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def hostile(address: str) -> list[str]:
    return [
        f"<script src='{address}/script'></script><script>document.title='owned'</script>",
        f'"><img src="{address}/image" onerror="document.title=\'owned\'">',
        f"</td></table></style><style>@import '{address}/css'; body{{background:url({address})}}</style>",
        f"--><iframe src='{address}/frame'></iframe><!--",
        "{{ 7 * 7 }}{% raw %}",
        "]]></svg><a xlink:href='javascript:document.title=1'>",
        "\x1b[2J\u202e\ud800 name",
        "$\\frac{1}{0}$",
    ]


def hostile_run(path: Path, address: str) -> Path:
    bad = hostile(address)
    header = {
        "strategy": bad[0],
        "policy": "\n".join(bad),
        "model": {bad[1]: bad[2], "name": bad[0]},
        "hardware": {"device": bad[3]},
        "versions": {bad[4]: bad[5]},
        "store": {"kind": bad[1], "stores": [{"directory": bad[3], bad[2]: None}]},
        "started": bad[2],
    }
    return run(path, names=bad, header=header, peak_source=bad[1])


def test_what_a_log_holds_is_text(tmp_path: Path) -> None:
    found = Strict(text_of(hostile_run(tmp_path / "<b>run.jsonl", "http://host.example")))
    assert {load for load in found.loads if not load.startswith("#")} == {"data:,"}
    assert found.tags & {"script", "iframe", "img", "b"} == set()
    said = "".join(found.text)
    assert "<script>document.title='owned'</script>" in said
    assert "{{ 7 * 7 }}{% raw %}" in said
    assert r"\x1b[2J\u202e\ud800 name" in said


BROWSERS = [path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))][:1]


@pytest.mark.parametrize("hostility", ["none", "names"])
@pytest.mark.parametrize("browser", [None, *BROWSERS], ids=lambda path: "browser" if path else "parser")
def test_a_browser_shows_it_without_an_error_or_a_request(
    tmp_path: Path, browser: str | None, hostility: str
) -> None:
    """Where there is no browser the page is taken apart alone."""
    with listening() as (address, asked):
        path = tmp_path / "run.jsonl"
        log = run(path) if hostility == "none" else hostile_run(path, address)
        (tmp_path / "page.html").write_text(text_of(log))
        shown = opened(browser, tmp_path) if browser else (tmp_path / "page.html").read_text()
        assert asked == []
    assert "<title>tba-offload: A run of " in shown
    assert "<title>owned" not in shown


def opened(browser: str, folder: Path) -> str:
    """The page as the browser has understood it; it says what goes wrong on its stderr, as CONSOLE."""
    done = subprocess.run(
        [
            *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
            *(f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--dump-dom"),
            f"file://{folder / 'page.html'}",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr
    return done.stdout


# Charts


def lines_of(svg: str) -> list[str]:
    """The paths of lines over steps: those with a colour of the page and no fill."""
    return re.findall(r'<path d="([^"]*)"[^>]*style="fill: none; stroke: var\(--c\d\)', svg)


def test_each_holder_of_memory_is_in_one_part_of_a_bar(tmp_path: Path) -> None:
    path = run(tmp_path / "run.jsonl", base_bytes=900 * MIB, peak_source="torch.cuda")
    assert "whatever else lasts" in text_of(path)
    assert sorted(name for part in PARTS.values() for name in part) == sorted(HOLDERS)


def test_steps_that_are_missing_leave_a_gap() -> None:
    svg = over_steps([1, 2, 3, 7, 8], [Series("a", [1, 2, 3, 4, 5], 0)], salt="x", label="a")
    assert [path.count("M") for path in lines_of(svg)] == [2, 1]  # the line, and its key


def test_many_steps_are_drawn_in_bins_that_keep_the_peak() -> None:
    values = [1.0] * 100_000
    values[77_777] = 9.0
    svg = over_steps(range(100_000), [Series("a", values, 0)], salt="x", label="a")
    assert len(svg) < 60_000
    highest = [min(float(y) for y in re.findall(r"[ML] \S+ (\S+)", path)) for path in lines_of(svg)]
    flat = over_steps(range(100_000), [Series("a", [9.0] * 100_000, 0)], salt="x", label="a")
    assert min(highest) <= min(float(y) for y in re.findall(r"[ML] \S+ (\S+)", lines_of(flat)[0]))


def test_axes_of_amounts_begin_at_zero() -> None:
    svg = over_steps([1, 2, 3], [Series("a", [99e6, 99e6, 98e6], 0)], salt="x", label="a")
    assert ">0</text>" in svg


def test_lines_without_a_value_are_not_in_the_legend() -> None:
    series = [
        Series("drawn", [1.0, None, 2.0], 0),
        Series("unknown", [None] * 3, 1),
        Series("zero", [0] * 3, 2),
    ]
    svg = over_steps([1, 2, 3], series, salt="x", label="a")
    assert ">drawn</text>" in svg
    assert ">unknown</text>" not in svg
    assert ">zero</text>" not in svg


def test_values_that_stand_alone_are_marked() -> None:
    """Where every fourth step is measured, no line would show any."""
    steps = list(range(40))
    known: list[float | None] = [1.0 if step % 4 == 0 else None for step in steps]
    marked, plain = (
        over_steps(steps, [Series("peak", values, 0)], salt="x", label="a") for values in (known, [1.0] * 40)
    )
    assert marked.count("<use") - plain.count("<use") >= 10


def test_pictures_take_their_colours_from_the_page() -> None:
    svg = stacked(
        [Stack("forward", [1.0, 2.0]), Stack("loss", [3.0, 0.0])], {"a": 0, "b": 1}, salt="x", label="<a>"
    )
    assert 'role="img" aria-label="&lt;a&gt;"' in svg
    assert "var(--c0)" in svg
    assert "0a0b" not in svg
    assert "<metadata" not in svg


# Figures


def test_endurance_counts_a_day_at_this_pace(tmp_path: Path) -> None:
    digest = Digest.of(read_run_log(run(tmp_path / "run.jsonl", offloaded_bytes=10**9, seconds=1.0)))
    day, life = endurance(digest, 600 * 10**12)
    assert "would be 86.4 TB a day" in day
    assert life == "Drives that are rated for 600 TB together would have reached that after 6.94 days."
    assert "--rated" in endurance(digest, None)[1]


def test_what_host_memory_takes_wears_no_drive(tmp_path: Path) -> None:
    path = run(tmp_path / "run.jsonl", offloaded_bytes=10**9, host_offloaded_bytes=10**9)
    assert endurance(Digest.of(read_run_log(path)), None) == ["The median step writes nothing to drives."]


def test_faults_are_named_with_how_much_and_when(tmp_path: Path) -> None:
    path = run(tmp_path / "run.jsonl", reread_bytes=MIB, drives_out_of_service=1, left_alone_scopes=2)
    with path.open("a") as file:
        file.write('{"cut')
    found = {what: (amount, when) for what, amount, when in faults(read_run_log(path))}
    assert found["read again, because the first read failed"] == ("6.00 MiB", "6 steps, the first of them 1")
    assert found["drives out of service"][0] == "1"
    assert found["runs of layers inside hooks of other code, not captured"][0] == "12"
    assert found["last line of the log cut off, as by a crash"] == ("1", "at the end")


# The command


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    result = call("report", run(tmp_path / "run.jsonl"), "-o", output, "--rated", "600TB")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{output}: 0.")
    assert "rated for 600 TB" in output.read_text()


def test_the_command_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "else.html")
    result = call("report", run(tmp_path / "run.jsonl"), "-o", tmp_path / "link.html")
    assert result.exit_code == 1
    assert "a symbolic link" in result.stderr
    assert not (tmp_path / "else.html").exists()


@pytest.mark.parametrize(("module", "package"), [("jinja2", "Jinja2"), ("matplotlib", "matplotlib")])
def test_a_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    log = read_run_log(run(tmp_path / "run.jsonl"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"{package}.*pip install 'tba-offload\[report\]'"):
        page([log])
