"""The documentation says nothing that does not work, and leaves out nothing that it promises to list."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from documents import HOME, PAGES, README, ROOT, code_blocks, commands_in, known_options
from models import loss_of, make_model, make_tokens
from torch import Tensor, nn

import tba_offload as tba
from tba_offload import cli, errors
from tba_offload.config import OffloadConfig, StatesConfig, StoreConfig, WeightsConfig
from tba_offload.megatron.arguments import CONFLICTS, add_arguments
from tba_offload.report.log_writer import RunLogWriter
from tba_offload.report.run_log import RunHeader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warm import Warm

DOCS = ROOT / "docs"
TEXTS = {path: path.read_text(encoding="utf-8") for path in (README, ROOT / "CONTRIBUTING.md", *PAGES)}
PACKAGE = Path(tba.__file__).parent
TESTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}

every_page = pytest.mark.parametrize("page", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))


def pages_with(language: str) -> pytest.MarkDecorator:
    found = [path for path, text in TEXTS.items() if code_blocks(text, language)]
    return pytest.mark.parametrize("page", found, ids=lambda path: str(path.relative_to(ROOT)))


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, python_with_torch: Warm) -> Path:
    """The built site; a warning of the generator is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d"]
    done = python_with_torch.run(
        *command, str(folder / "trees"), str(DOCS), str(folder / "html"), timeout=250
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "html"


def test_every_page_is_built_and_can_be_read_without_a_network(site: Path) -> None:
    for page in PAGES:
        html = (site / page.relative_to(DOCS)).with_suffix(".html").read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"([^\"]+)\"", html)
        loaded += re.findall(r"<link\b[^>]*rel=\"stylesheet\"[^>]*href=\"([^\"]+)\"", html)
        assert loaded
        assert [url for url in loaded if "//" in url] == [], page
        assert 'href="/' not in html
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_search_needs_no_server(site: Path) -> None:
    """Its index is a script, which a browser loads from a disk too."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert "reference/troubleshooting" in index
    options = (site / "_static" / "documentation_options.js").read_text(encoding="utf-8")
    assert "SHOW_SEARCH_SUMMARY: false" in options  # a summary would be fetched


def test_the_constants_of_the_planner_are_on_its_page(site: Path) -> None:
    html = (site / "guide" / "planner.html").read_text(encoding="utf-8")
    for path in (*(PACKAGE / "plan").glob("*.py"), *(PACKAGE / "adapt").glob("*.py")):
        for constant in generated().constants_in(path):
            assert f">{constant.name}<" in html, (path, constant.name)


def test_a_constant_of_the_planner_has_its_evidence_in_its_docstring() -> None:
    found = {one.name: one for one in generated().constants_in(PACKAGE / "plan" / "window.py")}
    assert found["held_back"].value == "0.25"
    assert found["held_back"].text.startswith("Share of the window")


def generated() -> Any:
    """The module of the directives."""
    spec = importlib.util.spec_from_file_location("generated", DOCS / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The API


def test_every_public_name_is_on_the_page_of_the_api(site: Path) -> None:
    html = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for name in tba.__all__:
        assert re.search(rf'id="tba_offload\.(?:[\w.]+\.)?{name}"', html), name


# Python


class Trained(nn.Module):
    """Takes a mapping and returns an output with its loss, as the models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(layers=2)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=loss_of(self.inner, input_ids))


def names_for_pages() -> dict[str, object]:
    """What the Python of a page may use: a model that trains, its data, and ``tba``."""
    model = Trained()
    return {
        "__name__": "page",
        "tba": tba,
        "model": model,
        "data": [{"input_ids": make_tokens(seed)} for seed in (1, 2)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


@pages_with("python")
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its blocks, one after another."""
    config = OffloadConfig(store=StoreConfig(kind="host"), min_tensor_bytes=1024)
    (tmp_path / "policy.yaml").write_text(config.to_yaml())
    blocks = code_blocks(TEXTS[page], "python")
    if not any('run_log="run.jsonl"' in block for block in blocks):  # a page that reads one
        with RunLogWriter(tmp_path / "run.jsonl", RunHeader(strategy="offload")):
            pass
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if blocks and "class MemoryFileStore" in blocks[0]:  # a module, which its tests import
        (tmp_path / "memory_file_store.py").write_text(blocks[0])
    names = names_for_pages()
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_the_toy_gives_the_same_bits_and_frees_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Its page compares gradients itself; what it prints stands there too, but for what PyTorch saves."""
    text = TEXTS[DOCS / "understand" / "how_it_works.md"]
    names: dict[str, Any] = {}
    for block in code_blocks(text, "python"):
        exec(block, names)
    saved, unit, rest = capsys.readouterr().out.strip().split(" ", 2)
    assert int(saved) > 10_000  # versions of PyTorch save more or less for attention
    assert f"{unit} {rest}" in text
    expected, found = (names["one_step"](offloading=offloading) for offloading in (False, True))
    assert len(found) == 1 + sum(1 for _ in nn.Sequential(*(names["Block"]() for _ in range(4))).parameters())
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.full
def test_the_store_of_its_page_passes_the_contract(tmp_path: Path) -> None:
    store, tests, registered, _ = code_blocks(TEXTS[DOCS / "extend" / "add_a_store.md"], "python")
    (tmp_path / "memory_file_store.py").write_text(f"{store}\n{registered}")
    (tmp_path / "test_memory_file_store.py").write_text(tests)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
            str(tmp_path),
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,  # not the folder of the store
        env={**environment(), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^(\d+) passed in", done.stdout, re.MULTILINE), done.stdout


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


# YAML, and commands


@pages_with("yaml")
def test_the_yaml_of_a_page_is_a_policy(page: Path) -> None:
    for text in code_blocks(TEXTS[page], "yaml"):
        config = OffloadConfig.from_yaml(text, file=page.name)
        assert OffloadConfig.from_yaml(config.to_yaml()) == config


@every_page
def test_the_commands_of_a_page_exist(page: Path) -> None:
    for words in commands_in(TEXTS[page]):
        while words[0] == "--import":
            words = words[2:]
        if words[0] in {"COMMAND", "…"}:
            continue
        assert words[0] in cli.main.commands, words
        options = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
        if words[0] == "launch":  # the script's own
            parser = add_arguments(argparse.ArgumentParser())
            options -= {option for action in parser._actions for option in action.option_strings}
        assert options <= known_options(words[0]), words


@pages_with("bash")
def test_the_shell_of_a_page_is_bash_and_names_files_that_exist(page: Path) -> None:
    for block in code_blocks(TEXTS[page], "bash"):
        done = subprocess.run(["bash", "-n"], input=block, check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), block
        for path in re.findall(r"^(?:bash|python) ([\w./]+\.(?:sh|py))", block, re.MULTILINE):
            assert (ROOT / path).exists(), path


@every_page
def test_files_and_links_of_a_page_exist(page: Path) -> None:
    raw = HOME.replace("github.com", "raw.githubusercontent.com")
    linked = re.findall(rf"\]\((?:{HOME}/(?:tree|blob)|{raw})/main/([^)#]+)", TEXTS[page])
    named = re.findall(
        r"`(?:python |bash )?((?:tests|benchmarks|examples|tba_offload|patches)/[\w./*-]+)", TEXTS[page]
    )
    for path in (*linked, *named):
        assert list(ROOT.glob(path.rstrip("/"))), path


def test_every_command_and_flag_is_on_its_page(site: Path) -> None:
    html = (site / "reference" / "command_line.html").read_text(encoding="utf-8")
    text = TEXTS[DOCS / "reference" / "command_line.md"]
    for name in cli.main.commands:
        assert f"`tba-offload {name}`" in text
        options = {option for option in known_options(name) - {"-h", "--help"} if option.startswith("-")}
        assert all(f">{option}<" in html for option in options), name
    parser = add_arguments(argparse.ArgumentParser())
    flags = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
    named = set(re.findall(r"`(--(?:no-)?tba-[\w-]+)", TEXTS[DOCS / "guide" / "megatron.md"]))
    assert named == flags


def test_every_setting_is_on_the_page_of_policies() -> None:
    text = TEXTS[DOCS / "reference" / "policy.md"]
    listed = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    assert listed == set(settings(OffloadConfig(states=StatesConfig(), weights=WeightsConfig()).to_yaml()))
    for word in tba.Placement:
        assert f"| `{word}` |" in TEXTS[DOCS / "guide" / "placements.md"]


def settings(text: str) -> Iterator[str]:
    """The keys of a policy, with dots."""
    for key, value in yaml.safe_load(text).items():
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in value)
        else:
            yield key


# Messages


def literals(tree: ast.AST) -> Iterator[str]:
    """Every text in a tree, with an ellipsis for what is put in."""
    if isinstance(tree, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in tree.values)
    elif isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree.value
    else:
        for node in ast.iter_child_nodes(tree):
            yield from literals(node)


@functools.cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def documented() -> list[str]:
    """The messages in the first column of the tables, an ellipsis for what changes."""
    text = TEXTS[DOCS / "reference" / "troubleshooting.md"].partition("## Attaching")[2]
    text = text.partition("The flags that are refused:")[0]
    rows = re.findall(r"^\| (`.*?)\|", text, re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


def matches(message: str, said: str) -> bool:
    """Whether a documented message is a part of what the code says."""
    place = 0
    for piece in pieces_of(message):
        if (found := said.find(piece, place)) < 0:
            return False
        place = found + len(piece)
    return True


@functools.cache
def pieces_of(message: str) -> tuple[str, ...]:
    """What stands between ellipses."""
    return tuple(piece.strip() for piece in message.split("…") if piece.strip())


def test_a_documented_message_is_in_the_code() -> None:
    told = documented()
    assert len(told) > 200
    said = {text for tree in modules().values() for text in literals(tree)}
    assert [message for message in told if not any(matches(message, text) for text in said)] == []


def messages() -> Iterator[tuple[str, str]]:
    """What the code gives to an error or a warning of the package, if it is a sentence; and where."""
    raised = {name for name, value in vars(errors).items() if isinstance(value, type)} | {"warn"}
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for said in (text for each in node.args for text in literals(each) if name in raised):
                if len(said.replace("…", "")) >= 20:
                    yield said, f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_every_message_is_documented() -> None:
    known = documented()
    missing = [
        f"{where}: {said}" for said, where in messages() if not any(matches(one, said) for one in known)
    ]
    assert missing == []


def test_every_refused_flag_is_documented() -> None:
    text = TEXTS[DOCS / "reference" / "troubleshooting.md"]
    assert all(f"`{conflict.flag}`" in text for conflict in CONFLICTS)


# Measurements


def test_measurements_name_programs_that_exist() -> None:
    text = TEXTS[DOCS / "measurements.md"]
    programs = re.findall(r"`(?:python|bash) (benchmarks/\w+\.(?:py|sh))[^`]*`", text)
    assert {Path(program).name for program in programs} >= {"depth.py", "peers.py", "io.py", "planner.py"}
    assert all((ROOT / program).exists() for program in programs)


# Architecture, contracts and pitfalls


def test_the_way_of_a_tensor_is_that_of_the_code() -> None:
    """Each file of the table exists, and has the names that its row tells of."""
    text = TEXTS[DOCS / "understand" / "architecture.md"]
    section = text.partition("\n## The way of one tensor")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+\. [^|]+\|([^|]+)\|([^|]+)\|", section, re.MULTILINE)
    assert len(rows) >= 10
    for files, what in rows:
        code = "".join((PACKAGE / name).read_text() for name in re.findall(r"`([^`]+)`", files))
        for name in re.findall(r"`([\w.]+)`", what):
            assert all(re.search(rf"\b{part}\b", code) for part in name.split(".")), (files, name)


def test_the_rooms_of_a_step_exist() -> None:
    text = TEXTS[DOCS / "understand" / "architecture.md"]
    section = text.partition("\n## What happens when\n")[2].partition("\n## ")[0]
    rooms = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]+\|([^|]+)\|", section, re.MULTILINE)))
    assert set(rooms) >= {"session", "capture", "transfer", "plan"}
    assert all(list(PACKAGE.glob(f"{room}*")) for room in rooms)


def test_every_lock_and_every_thread_is_on_the_map() -> None:
    text = TEXTS[DOCS / "understand" / "architecture.md"]
    table, threads = (
        text.partition(f"\n## {head}\n")[2].partition("\n## ")[0] for head in ("Who writes what", "Threads")
    )
    for path in sorted(PACKAGE.rglob("*.py")):
        name, code = str(path.relative_to(PACKAGE)), path.read_text(encoding="utf-8")
        if re.search(r"\b(?:R?Lock|allocate_lock)\(\)", code) and not name.startswith("testing/"):
            assert f"`{name}`" in table, name
        for thread in re.findall(r'[( ]name="(tba-(?!offload)\w+)", daemon', code):
            assert f"`{thread}" in threads, (name, thread)


def test_what_is_guarded_lies_in_files_that_exist() -> None:
    text = TEXTS[DOCS / "understand" / "architecture.md"]
    for name in re.findall(
        r"`(\w+/\w+\.py)`", text.partition("\n## Who writes what")[2].partition("\n## ")[0]
    ):
        assert (PACKAGE / name).exists(), name


@pytest.mark.parametrize("name", ["contracts", "pitfalls"])
def test_tests_that_are_named_exist(name: str) -> None:
    text = TEXTS[DOCS / "understand" / f"{name}.md"]
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", text)
    assert named
    for file, test in named:
        assert file in TESTS, file
        assert f"def {test}(" in TESTS[file] or not test, (file, test)


def test_every_rule_of_the_house_names_tests_that_exist() -> None:
    text = TEXTS[DOCS / "understand" / "architecture.md"].partition("## The rules")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!rule|---)(.*) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 10
    for rule, tests in rows:
        named = re.findall(r"`(test_\w+)`", tests)
        assert named, rule
        assert all(any(f"def {test}(" in code for code in TESTS.values()) for test in named), rule


def test_every_numbered_test_has_its_pitfall_and_every_pitfall_its_test() -> None:
    text = TEXTS[DOCS / "understand" / "pitfalls.md"]
    entries = dict(re.findall(r"^ *(\d+[a-e]?)\.? (.*(?:\n {3,}\S.*)*)", text, re.MULTILINE))
    tested = {number.lstrip("0") for number in re.findall(r"def test_(\d\d[a-e]?)_", TESTS["test_bugs.py"])}
    assert tested <= set(entries)
    assert {str(number) for number in range(1, 28)} <= set(entries)
    for number, entry in entries.items():
        held = number in tested or re.search(r"`test_\w+\.py`", entry)
        assert held, number


def test_every_promise_names_its_folder_of_tests() -> None:
    text = TEXTS[DOCS / "understand" / "contracts.md"]
    for section in text.split("\n## ")[1:]:
        folders = re.findall(r"`(tests/[\w/]+)`", section)
        assert folders, section.splitlines()[0]
        assert any(list((ROOT / folder).glob("test_*.py")) for folder in folders), section.splitlines()[0]


def test_every_folder_of_contracts_holds_a_promise() -> None:
    text = TEXTS[DOCS / "understand" / "contracts.md"]
    for folder in (ROOT / "tests" / "contracts").iterdir():
        if list(folder.glob("test_*.py")):
            assert f"`tests/contracts/{folder.name}`" in text, folder.name


# The project's own files


def test_the_workflow_runs_what_a_contributor_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    named = re.findall(r"^bash (\S+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert named
    assert all(f"`bash {script}`" in contributing for script in named)


def test_what_runs_before_a_commit_is_what_the_tests_run() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0][
        "hooks"
    ]
    script = (ROOT / "tests" / "run.sh").read_text(encoding="utf-8")
    for hook in hooks:
        assert hook["entry"].removesuffix(" --force-exclude") in script, hook["id"]


def test_the_changelog_has_the_form_that_it_names() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert versions[0] == "Unreleased"
    assert all(f"\n[{version}]: https://" in text for version in versions)
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
