"""Whatever is in a policy or a run log, each command ends with a result or with an error that names it."""

from __future__ import annotations

import csv
import io
import json
import os
import unicodedata
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from covering import in_turn
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from tba_offload.cli import main
from tba_offload.formatting import visible
from tba_offload.report import points as rok_points
from tba_offload.report import rok

EVIL = "\x1b[2J\x1b]0;owned\x07=cmd|'/c calc'!A1 <script>&\u202e\ud800$x_1$[red]"

FUZZ = settings(
    max_examples=600 if os.environ.get("FULL") else 30,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)


def outcome(*arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error; any exception but that of an exit is the test's."""
    runner = (
        CliRunner(mix_stderr=False)
        if "mix_stderr" in CliRunner.__init__.__code__.co_varnames
        else CliRunner()
    )
    result = runner.invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in {0, 1, 2}
    assert "Traceback" not in result.stderr
    assert result.exit_code == 0 or result.stderr.strip() or result.stdout.strip()
    for printed in (result.stdout, result.stderr):
        assert not [
            each for each in printed if each != "\n" and unicodedata.category(each) in {"Cc", "Cf", "Cs"}
        ]
    return result.exit_code, result.stdout, result.stderr


# Run logs

STEP: dict[str, Any] = {
    "event": "step",
    "step": 1,
    "seconds": 1.0,
    "tokens": 100,
    "model_flops": 1e12,
    "activation_peak_bytes": 2**20,
    "peak_source": "malloc",
}
PLAN: dict[str, Any] = {
    "event": "plan",
    "names": ["layers.0", "layers.1"],
    "profile": {
        "kinds": [
            {
                "activations": [[2**20, 0.5, 0.5], [2**16, 0.9, 0.1, True, None]],
                "small_bytes": 100,
                "input_bytes": 2**18,
            }
        ],
        "layers": [0, 0],
        "timings": [{"offload": [0.5, 1.0], "keep": [0.5, 1.0]}],
        "slots": [[0, 0, False, 0.0], [1, 0, False, 0.0], [1, 0, True, 0.1], [0, 0, True, 0.0]],
        "tail": 0.1,
        "rest_bytes": 2**18,
    },
    "drive": {"write": 1e8, "read": 1e8, "latency": 0.0, "host": None},
    "limits": {"activation": None, "window": 2**20},
    "rates": [
        {
            "tier": "0",
            "write": {"bytes_per_second": 1e8, "spread": 0.1},
            "read": {"bytes_per_second": None, "spread": None},
        }
    ],
}
HEADER: dict[str, Any] = {
    "event": "run",
    "schema": 1,
    "strategy": "offload",
    "model": {"name": "gpt", "batch_size": 4, "layers": 2},
    "hardware": {"device": "cpu", "cpus": 2},
    "policy": "default: offload\n",
    "plan": {"layers.9": {"placement": "keep"}},
}

ODD_NUMBERS = st.sampled_from(
    [
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        10**400,
        1e-320,
        1e308,
        -1e308,
        1e-9,
        0.1,
        "nan",
        "inf",
        "-inf",
        "NaN",
        5e-324,
        2**1023,
    ]
)
ODD_TEXT = st.sampled_from(
    [EVIL, "", "\x00", "\n", "=1+1", "-5", "@a", "a" * 5000, "auto", "*", "0-99999", "_", "\r\n"]
)
ODD = st.one_of(
    ODD_NUMBERS,
    ODD_TEXT,
    st.none(),
    st.booleans(),
    st.recursive(
        st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
)


@st.composite
def damaged(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """A document in which some values, keys or items are others, or missing, or there twice."""
    made: Any = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(0, 3))):
        place, key = _a_place(draw, made)
        what = draw(st.sampled_from(["other", "other", "missing", "twice"]))
        if what == "other":
            place[key] = draw(ODD)
        elif what == "missing":
            del place[key]
        elif isinstance(place, list):
            place.append(place[key])
    return made


def _a_place(draw: st.DrawFn, document: Any) -> tuple[Any, Any]:
    place, key = document, draw(st.sampled_from(sorted(document)))
    while isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 4)):
        place = place[key]
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    return place, key


LINES = st.one_of(
    damaged(STEP).map(json.dumps),
    damaged(STEP).map(json.dumps),
    damaged(PLAN).map(json.dumps),
    damaged({"event": "gap", "missing_steps": 2, "missing_events": 0, "reason": "full"}).map(json.dumps),
    st.sampled_from(
        [
            "[" * 50_000,
            "NaN",
            '{"event": "step", "step": ' + "9" * 5000 + "}",
            '{"event": "step"',
            "\x00" * 100,
            EVIL.encode(errors="replace").decode(),
        ]
    ),
    st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace").decode()),
)
LOGS = st.tuples(damaged(HEADER).map(json.dumps), st.lists(LINES, max_size=5), st.booleans())


def write_log(path: Path, log: tuple[str, list[str], bool]) -> Path:
    header, lines, is_torn = log
    whole = [json.dumps(STEP | {"step": number}) for number in range(2)] + [json.dumps(PLAN)]
    content = "\n".join([header, *lines, *whole]).encode("utf-8", "replace")
    path.write_bytes(content[: -len(content) // 3] if is_torn else content + b"\n")
    return path


@given(log=LOGS, other=LOGS)
@example(
    log=(json.dumps(HEADER | {"strategy": EVIL}), [], False),
    other=(json.dumps(HEADER | {"ranks": 2**62}), [], False),
)
@FUZZ
def test_no_run_log_breaks_the_comparison(tmp_path: Path, log: Any, other: Any) -> None:
    paths = [write_log(tmp_path / "a.jsonl", log), write_log(tmp_path / "b.jsonl", other)]
    outcome("rok", *paths)
    status, said, _ = outcome("rok", "--json", *paths)
    if status == 0:
        json.loads(said, parse_constant=pytest.fail)
    outcome("rok", "--csv", "-", "--warmup", "0", paths[0])


@given(log=LOGS)
@example(log=(json.dumps(HEADER), [], False))
@FUZZ
def test_no_run_log_breaks_the_planner(tmp_path: Path, log: Any) -> None:
    path, policy = write_log(tmp_path / "a.jsonl", log), tmp_path / "policy.yaml"
    status, _, _ = outcome("plan", path, "--budget", "1MiB", "-o", policy, "--force")
    if status == 0:
        outcome("check", policy, "--layers", "2")
    status, said, _ = outcome("plan", path, "--json")
    if status == 0:
        json.loads(said, parse_constant=pytest.fail)


@given(content=st.binary(max_size=200))
@example(content=b"\xef\xbb\xbf{}")
@example(content=b"{" * 100_000)
@FUZZ
def test_no_bytes_break_a_command(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    for command in (["rok", path], ["plan", path], ["check", path, "--layers", "3"]):
        outcome(*command)


# Policies

SETTING = st.one_of(
    ODD_NUMBERS.map(str),
    ODD_TEXT.map(json.dumps),
    st.sampled_from(
        [
            "keep",
            "auto",
            "0",
            "1GiB",
            "[a, b]",
            "{a: b}",
            "~",
            "!!python/object:os.system x",
            "&a [*a]",
            "null",
            "true",
            "|\n  x",
            "9999999999GiB",
            "1e12",
        ]
    ),
    st.text(max_size=10).map(json.dumps),
)
MATCH = st.one_of(
    st.sampled_from(
        [
            "0-99999999999999999",
            "last 9999999999",
            "0,0,0",
            "-",
            "encoder:0",
            "[",
            "[!",
            "[]]",
            "a*" * 40 + "b",
            "*" * 200,
            "9" * 5000,
            "\\ud800",
            "3-1",
            ":",
            "last last 1",
        ]
    ),
    st.text(max_size=10),
).map(json.dumps)
KEYS = [
    "default",
    "layers",
    "budget",
    "store",
    "on_full",
    "on_slow",
    "min_tensor_bytes",
    "activation_bytes",
    "stall_seconds",
    "directories",
    "colour",
]
RULES = st.lists(st.tuples(MATCH, SETTING | st.just("keep")), max_size=4).map(
    lambda rules: (
        "layers:\n" + "".join(f"- {{match: {match}, placement: {placement}}}\n" for match, placement in rules)
    )
)
SECTION = st.tuples(
    st.sampled_from(["budget", "store"]),
    st.sampled_from(
        [
            "activation_bytes",
            "in_flight_bytes",
            "objective",
            "kind",
            "directories",
            "capacity",
            "host_capacity",
            "checksum",
            "stall_seconds",
            "x",
        ]
    ),
    SETTING,
).map(lambda parts: f"{parts[0]}:\n  {parts[1]}: {parts[2]}\n")
POLICIES = st.lists(
    st.one_of(
        RULES,
        SECTION,
        st.tuples(st.sampled_from(KEYS), SETTING).map(lambda pair: f"{pair[0]}: {pair[1]}\n"),
        st.text(max_size=10),
    ),
    max_size=4,
).map("".join)


@given(text=POLICIES)
@example(text=f"{json.dumps(EVIL)}: 1")
@example(text="a: " + "[" * 20_000)
@example(text="layers: [{match: '0', placement: keep, ? [a] : b}]")
@FUZZ
def test_no_policy_breaks_the_check(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome("check", path, "--layers", "12")
    outcome("check", path, "--layers", "encoder:3", "--layers", "decoder:4", "--json")


# What is printed is text


@pytest.fixture
def evil_log(tmp_path: Path) -> Path:
    header = json.dumps(HEADER | {"strategy": EVIL})
    return write_log(tmp_path / "evil.jsonl", (header, ["\x1b[2J"], False))


def test_names_cannot_move_the_cursor(evil_log: Path, tmp_path: Path) -> None:
    status, said, complaints = outcome("rok", evil_log)
    assert status == 0
    assert visible(EVIL).replace("|", "\\|") in said
    assert f"{evil_log}:2: not a line of a run log" in complaints
    console = Console(file=io.StringIO(), force_terminal=True, width=300)
    console.print(rok.table(rok_points.points([evil_log], left_out=str)))
    assert "\x1b[2J" not in console.file.getvalue()  # type: ignore[attr-defined]
    assert "\\x1b[2J" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_strategy_is_no_formula(evil_log: Path, tmp_path: Path) -> None:
    names = ["=1+1", "+a", "-2", "@x", "\t=1", "\r=1", "plain", "\uff1d1"]
    paths = [
        write_log(tmp_path / f"{number}.jsonl", (json.dumps(HEADER | {"strategy": name}), [], False))
        for number, name in enumerate(names)
    ]
    _, said, _ = outcome("rok", "--csv", "-", *paths)
    shown = [row["strategy"] for row in csv.DictReader(io.StringIO(said))]
    assert shown == ["'=1+1", "'+a", "-2", "'@x", "\\t=1", "\\r=1", "plain", "'\uff1d1"]


def test_names_are_text_in_a_picture(evil_log: Path, tmp_path: Path) -> None:
    status, _, _ = outcome("rok", evil_log, "-o", tmp_path / "rok.svg")
    assert status == 0
    picture = (tmp_path / "rok.svg").read_text(encoding="utf-8")
    assert "<script" not in picture
    ET.fromstring(picture)
    status, _, _ = outcome("plan", evil_log, "--picture", tmp_path / "plan.svg")
    assert status == 0
    ET.fromstring((tmp_path / "plan.svg").read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", [["rok"], ["plan"], ["check", "--layers", "3"]])
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "directory", "x" * 5000, "absent", "a link to itself"])
def test_only_regular_files_are_read(tmp_path: Path, command: list[str], kind: str) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "a link to itself":
        path.symlink_to(path)
    elif kind != "absent":
        path = Path(kind)
    status, _, said = outcome(*command, path)
    assert status == 1
    assert "cannot be read" in said


@pytest.mark.parametrize(
    "changes",
    [
        ["--layers", "10000000"],
        ["--micro-batches", "10000000"],
        ["--drives", "1e300"],
        ["--write", "9" * 5000 + "GiB"],
        ["--write", "1B", "--read", "1B"],
        ["--window", "1B"],
        ["--host", "999999999TiB"],
    ],
)
def test_no_question_is_too_large(tmp_path: Path, changes: list[str]) -> None:
    path = write_log(tmp_path / "a.jsonl", (json.dumps(HEADER), [], False))
    outcome("plan", path, *changes)


@pytest.mark.parametrize("kind", ["pipe", "large"])
def test_a_plan_replaces_no_file_of_another_kind(tmp_path: Path, kind: str) -> None:
    path = write_log(tmp_path / "a.jsonl", (json.dumps(HEADER), [], False))
    target = tmp_path / "target"
    if kind == "pipe":
        os.mkfifo(target)
    else:
        target.write_bytes(bytes(2**20 + 1))
    status, _, said = outcome("plan", path, "-o", target)
    assert status == 1
    assert "was not written by this command" in said


OUTPUTS = [["rok", "-o"], ["rok", "--csv"], ["plan", "--force", "-o"], ["plan", "--picture"]]


@pytest.mark.parametrize(
    ("kind", "command"), in_turn(["pipe", "read pipe", "link", "dangling link", "directory"], OUTPUTS)
)
def test_only_regular_files_are_written_and_through_no_link(
    tmp_path: Path, command: list[str], kind: str
) -> None:
    log = write_log(tmp_path / "a.jsonl", (json.dumps(HEADER), [], False))
    path, victim = tmp_path / "out.svg", tmp_path / "victim"
    reader = None
    if kind == "directory":
        path.mkdir()
    elif "pipe" in kind:
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind == "read pipe" else None
    else:
        path.symlink_to(victim)
        if kind == "link":
            victim.write_text("precious")
    name, *options = command
    status, _, said = outcome(name, log, *options, path)
    if reader is not None:
        os.close(reader)
    assert status == (2 if kind == "directory" and "--csv" not in command else 1)
    assert str(path) in said
    assert victim.exists() == (kind == "link")
    assert kind != "link" or victim.read_text() == "precious"


@pytest.mark.parametrize("stream", ["/dev/null", "/dev/stderr", "/dev/fd/{}"])
def test_streams_of_the_shell_are_written(tmp_path: Path, stream: str) -> None:
    log = write_log(tmp_path / "a.jsonl", (json.dumps(HEADER), [], False))
    read, write = os.pipe()
    try:
        status, _, _ = outcome("rok", log, "--csv", stream.format(write))
        assert status == 0
        assert "{}" not in stream or os.read(read, 1 << 16).startswith(b"strategy,")
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("command", [["doctor"], ["check", "--layers", "3"]])
def test_looking_makes_nothing(tmp_path: Path, command: list[str]) -> None:
    status, *said = outcome(*command, tmp_path / "mistyped" / "\x1b[2J")
    assert status == 1
    assert "does not exist" in "".join(said) or "cannot be read" in "".join(said)
    assert list(tmp_path.iterdir()) == []
