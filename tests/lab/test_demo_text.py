"""The standard library's source as training data."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from tba_lab.demo import text
from tba_lab.demo.text import ByteTokenizer, batches, write_text
from tba_offload.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from tba_lab.gpt import Batch

pytestmark = pytest.mark.megatron

LIMIT = 100_000


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"), limit_bytes=LIMIT)


def documents_of(prefix: Path) -> list[bytes]:
    """What megatron-core reads; it may warn that it guesses to be the only process."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Could not determine rank")
        dataset = IndexedDataset(str(prefix))
    return [bytes(dataset[index].tolist()) for index in range(len(dataset))]


def tensors(batch: Batch) -> dict[str, Tensor]:
    return cast("dict[str, Tensor]", batch)


def as_lists(drawn: list[Batch]) -> list[dict[str, Any]]:
    return [{name: tensor.tolist() for name, tensor in tensors(batch).items()} for batch in drawn]


def draw(prefix: Path, **changes: int) -> list[Batch]:
    settings = {"sequence": 32, "batch_size": 2, "seed": 1, "samples": 6, **changes}
    return list(batches(prefix, **settings))


class TestWriteText:
    def test_every_document_is_a_source_file_of_the_library(self, prefix: Path) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        documents = documents_of(prefix)
        assert documents[0] == (library / "__future__.py").read_bytes() + b"\0"
        for document in documents:
            assert document.count(b"\0") == 1
            ast.parse(document.removesuffix(b"\0"))

    def test_takes_as_many_whole_files_as_fit(self, prefix: Path) -> None:
        size = sum(len(document) - 1 for document in documents_of(prefix))
        assert 0.5 * LIMIT < size <= LIMIT

    def test_the_same_text_each_time(self, prefix: Path, tmp_path: Path) -> None:
        again = write_text(tmp_path, limit_bytes=LIMIT)
        for suffix in (".bin", ".idx"):
            assert again.with_suffix(suffix).read_bytes() == prefix.with_suffix(suffix).read_bytes()

    def test_leaves_only_the_dataset(self, tmp_path: Path) -> None:
        written = write_text(tmp_path / "new" / "folder", limit_bytes=LIMIT)
        files = {path for path in tmp_path.rglob("*") if path.is_file()}
        assert files == {written.with_suffix(".bin"), written.with_suffix(".idx")}

    def test_writes_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = write_text(tmp_path, limit_bytes=LIMIT)
        monkeypatch.setattr(text, "_write_documents", lambda *_: pytest.fail("written again"))
        assert write_text(tmp_path, limit_bytes=LIMIT) == first
        with pytest.raises(pytest.fail.Exception, match="written again"):
            write_text(tmp_path, limit_bytes=LIMIT + 1)

    def test_yields_to_another_process_that_was_faster(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = text._write_documents

        def be_overtaken(prefix: Path, documents: list[bytes]) -> None:
            monkeypatch.setattr(text, "_write_documents", write)
            write_text(tmp_path, limit_bytes=LIMIT)
            write(prefix, documents)

        monkeypatch.setattr(text, "_write_documents", be_overtaken)
        assert documents_of(write_text(tmp_path, limit_bytes=LIMIT))
        assert len(list(tmp_path.iterdir())) == 1

    def test_leaves_nothing_half_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fill_the_drive(prefix: Path, _documents: list[bytes]) -> None:
            prefix.with_suffix(".bin").write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(text, "_write_documents", fill_the_drive)
        with pytest.raises(OSError, match="No space left"):
            write_text(tmp_path, limit_bytes=LIMIT)
        assert list(tmp_path.iterdir()) == []

    def test_an_error_of_the_last_rename_is_not_swallowed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(_self: Path, _target: Path) -> Path:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "rename", refuse)
        with pytest.raises(PermissionError):
            write_text(tmp_path, limit_bytes=LIMIT)

    def test_a_limit_below_the_first_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="limit_bytes=10 has no room"):
            write_text(tmp_path, limit_bytes=10)

    def test_a_library_without_source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path / "nothing"))
        with pytest.raises(UnsupportedError, match="without the source"):
            write_text(tmp_path)

    def test_skips_tests_tables_and_what_is_not_text(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = tmp_path / "lib"
        contents = {
            "b.py": b"b = 1\n",
            "a/b.py": b"ab = 1\n",
            "a/test/c.py": b"no\n",
            "test/d.py": b"no\n",
            "encodings/e.py": b"no\n",
            "site-packages/f.py": b"no\n",
            "empty.py": b"",
            "latin.py": b"# \xff\n",
            "nul.py": b"\0",
            "data.txt": b"no\n",
        }
        for name, content in contents.items():
            (library / name).parent.mkdir(parents=True, exist_ok=True)
            (library / name).write_bytes(content)
        monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(library))
        assert documents_of(write_text(tmp_path / "out")) == [b"b = 1\n\0", b"ab = 1\n\0"]


class TestBatches:
    def test_are_what_a_gpt_is_given(self, prefix: Path) -> None:
        drawn = draw(prefix)
        assert len(drawn) == 3
        for batch in drawn:
            assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors(batch).items()} == {
                "tokens": ((2, 32), torch.int64),
                "labels": ((2, 32), torch.int64),
                "position_ids": ((2, 32), torch.int64),
                "attention_mask": ((1, 1, 32, 32), torch.bool),
                "loss_mask": ((2, 32), torch.float32),
            }
            assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
            assert batch["position_ids"].tolist() == [list(range(32))] * 2
            assert batch["loss_mask"].min() == 1

    def test_hold_the_text(self, prefix: Path) -> None:
        """A sequence may begin and end anywhere in a file, and run on into the next one."""
        documents = documents_of(prefix)
        for batch in draw(prefix, samples=20):
            for tokens in batch["tokens"].tolist():
                longest = max(bytes(tokens).split(b"\0"), key=len)
                assert any(longest in document for document in documents)

    def test_the_seed_decides_them(self, prefix: Path) -> None:
        assert as_lists(draw(prefix)) == as_lists(draw(prefix))
        assert as_lists(draw(prefix, seed=2)) != as_lists(draw(prefix))

    def test_differ_from_each_other(self, prefix: Path) -> None:
        tokens = [tuple(row) for batch in draw(prefix, samples=40) for row in batch["tokens"].tolist()]
        assert len(set(tokens)) == 40

    def test_repeat_the_text_where_it_is_too_short(self, tmp_path: Path) -> None:
        short = write_text(tmp_path, limit_bytes=6_000)
        assert len(draw(short, sequence=1024, samples=40)) == 20

    def test_drop_an_incomplete_last_one(self, prefix: Path) -> None:
        assert len(draw(prefix, samples=7)) == 3

    def test_share_the_attention_mask(self, prefix: Path) -> None:
        first, second, _ = draw(prefix)
        assert first["attention_mask"] is second["attention_mask"]

    def test_leave_nothing_beside_the_dataset(self, prefix: Path) -> None:
        before = sorted(prefix.parent.parent.rglob("*"))
        draw(prefix)
        assert sorted(prefix.parent.parent.rglob("*")) == before

    @pytest.mark.parametrize(
        "change", [{"sequence": 0}, {"batch_size": 0}, {"samples": 1}, {"samples": -1, "batch_size": -2}]
    )
    def test_refuse_numbers_that_make_none(self, prefix: Path, change: dict[str, int]) -> None:
        with pytest.raises(ConfigError, match="no micro-batch can be made") as caught:
            draw(prefix, **change)
        assert f"{next(iter(change))}={next(iter(change.values()))}" in str(caught.value)

    def test_a_dataset_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no dataset .*nothing\.bin.*write_text"):
            batches(tmp_path / "nothing", sequence=8, batch_size=1, seed=0, samples=1)


class TestByteTokenizer:
    @pytest.mark.parametrize("line", ["", "def f(): ...\n", "naïve 日本 🙂"])
    def test_round_trip(self, line: str) -> None:
        tokenizer = ByteTokenizer()
        assert tokenizer.detokenize(tokenizer.tokenize(line)) == line
        assert all(0 < token < tokenizer.vocab_size for token in tokenizer.tokenize(line))

    def test_special_tokens_are_no_text(self) -> None:
        tokenizer = ByteTokenizer()
        assert tokenizer.detokenize([104, 105, tokenizer.eod, tokenizer.pad]) == "hi"
        assert tokenizer.detokenize("日".encode()[:2]) == "\N{REPLACEMENT CHARACTER}"
