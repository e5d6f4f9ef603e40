"""Real text that every machine has: the Python standard library, as a Megatron dataset.

The bytes of its source files are the tokens, one document a file. Python source holds no NUL, so that 0
can end a document, and UTF-8 never uses 255, so that it can pad: 256 tokens are enough.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sysconfig
import tempfile
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tba_lab.gpt import Batch, causal_mask
from tba_offload.errors import ConfigError, UnsupportedError
from tba_offload.megatron import require_core

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

VOCABULARY = 256
END_OF_DOCUMENT = 0
PADDING = 255

# Tests are not shipped everywhere; encodings and pydoc_data are generated tables rather than text.
_SKIPPED = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)


class ByteTokenizer:
    """Bytes as tokens, with the attributes that megatron-core's datasets ask a tokenizer for.

    Attributes:
        vocab_size: 256.
        eod: The token that ends a document.
        pad: The token that fills up the last sequence.
        unique_identifiers: What distinguishes it from other tokenizers, for the names of caches.
    """

    vocab_size = VOCABULARY
    eod = END_OF_DOCUMENT
    pad = PADDING

    def __init__(self) -> None:
        self.unique_identifiers = OrderedDict({"class": type(self).__name__})

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(text.encode())

    def detokenize(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; a character that was cut in two becomes a replacement character."""
        return bytes(token for token in tokens if token not in (self.eod, self.pad)).decode(errors="replace")


def write_text(directory: str | os.PathLike[str], *, limit_bytes: int = 4 << 20) -> Path:
    """Write the standard library's source as a Megatron indexed dataset, once.

    The dataset appears under its name only when it is complete; if it is there already, it is used.

    Args:
        directory: Where to put it; created if need be.
        limit_bytes: The most bytes of text to take, in whole files.

    Returns:
        The prefix of the dataset's ``.bin`` and ``.idx`` files, as Megatron's ``--data-path`` takes it.

    Raises:
        ConfigError: Not even the first file fits into the limit.
        MissingDependencyError: megatron-core is not installed.
        UnsupportedError: This Python came without the source of its standard library.
    """
    require_core("writing a Megatron dataset")
    finished = Path(directory) / f"python-{platform.python_version()}-{limit_bytes}"
    if not finished.is_dir():
        documents = _documents(limit_bytes)
        finished.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{finished.name}-", dir=finished.parent))
        try:
            _write_documents(unfinished / "text", documents)
            _publish(unfinished, finished)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return finished / "text"


def batches(
    prefix: str | os.PathLike[str], *, sequence: int, batch_size: int, seed: int, samples: int
) -> Iterator[Batch]:
    """Micro-batches of a dataset, through megatron-core's ``GPTDataset``; the same for the same seed.

    The index that ``GPTDataset`` builds is kept in memory; nothing is left beside the dataset.

    Args:
        prefix: What :func:`write_text` returned.
        sequence: Tokens in a sequence.
        batch_size: Sequences in a micro-batch.
        seed: Decides the order of documents and sequences.
        samples: Sequences to draw; the text is repeated if it has fewer.

    Returns:
        ``samples // batch_size`` micro-batches on the CPU, which share their attention mask.

    Raises:
        ConfigError: A number is below 1, ``samples`` does not fill one micro-batch, or there is no dataset.
        MissingDependencyError: megatron-core is not installed.
    """
    if min(sequence, batch_size) < 1 or samples < batch_size:
        raise ConfigError(
            f"no micro-batch can be made of sequence={sequence}, batch_size={batch_size}, "
            f"samples={samples}: each must be at least 1, and samples at least batch_size"
        )
    require_core("reading a Megatron dataset")
    dataset = _open_dataset(Path(prefix), sequence=sequence, seed=seed, samples=samples)
    mask = causal_mask(sequence)
    return (
        _stack([dataset[index] for index in range(first, first + batch_size)], mask)
        for first in range(0, samples - batch_size + 1, batch_size)
    )


def _documents(limit_bytes: int) -> list[bytes]:
    """Return the library's source files, as many as fit."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = list(_source_files(library))
    if not sources:
        raise UnsupportedError(f"this Python came without the source of its standard library ({library})")
    documents = []
    room = limit_bytes
    for text in filter(_is_text, map(Path.read_bytes, sources)):
        room -= len(text)
        if room < 0:
            break
        documents.append(text)
    if not documents:
        raise ConfigError(
            f"limit_bytes={limit_bytes} has no room for one source file of the standard library"
        )
    return documents


def _source_files(library: Path) -> Iterator[Path]:
    """In the order of their names, a folder after the files beside it; whole folders are pruned."""
    for folder, folders, files in os.walk(library):
        folders[:] = sorted(set(folders) - _SKIPPED)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _is_text(content: bytes) -> bool:
    """Whether neither of the two special tokens occurs in it."""
    return content != b"" and END_OF_DOCUMENT not in content and PADDING not in content


def _write_documents(prefix: Path, documents: Iterable[bytes]) -> None:
    from megatron.core.datasets import indexed_dataset

    number_type = indexed_dataset.DType.optimal_dtype(VOCABULARY)
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=number_type)
    for document in documents:
        builder.add_item(torch.frombuffer(bytearray(document) + bytes([END_OF_DOCUMENT]), dtype=torch.uint8))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def _publish(unfinished: Path, finished: Path) -> None:
    """Give a complete dataset its name, unless another process has just made the same one."""
    try:
        unfinished.rename(finished)
    except OSError:
        if not finished.is_dir():
            raise


def _open_dataset(prefix: Path, *, sequence: int, seed: int, samples: int) -> Any:
    """Return the ``GPTDataset``, its index built afresh.

    megatron-core insists on a folder for the index. A folder of its own, gone once the index is in
    memory, can be neither stale nor half written by another process.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    if not IndexedDataset.exists(str(prefix)):
        raise ConfigError(
            f"there is no dataset {prefix}.bin with its {prefix.name}.idx; write_text() makes one"
        )
    with _alone(), tempfile.TemporaryDirectory(prefix=".index-", dir=prefix.parent) as index_folder:
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=sequence,
            blend=([str(prefix)], None),
            split="1",
            path_to_cache=index_folder,
            tokenizer=ByteTokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        text = GPTDataset.build_low_level_dataset(str(prefix), config)
        documents = np.arange(GPTDataset.numel_low_level_dataset(text), dtype=np.int32)
        return GPTDataset(text, str(prefix), documents, samples, Split.train, config)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without a process group megatron-core takes this process for the only one, rightly, but warns of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Could not determine rank", module=r"megatron\.")
        yield


def _stack(samples: list[dict[str, Tensor]], mask: Tensor) -> Batch:
    def column(name: str) -> Tensor:
        return torch.stack([sample[name] for sample in samples])

    return Batch(
        tokens=column("tokens"),
        labels=column("labels"),
        position_ids=column("position_ids"),
        attention_mask=mask,
        loss_mask=column("loss_mask"),
    )
