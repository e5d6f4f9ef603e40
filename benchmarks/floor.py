"""What moving a step's bytes costs the computation, whatever moves them: the least that offloading can take.

    python benchmarks/floor.py

The lanes train a GPT, a process each, single steps in turn: keep, offload with and without checksums, and
keep while another process writes as many bytes during forward and reads as many during backward as offload
does. That process has plain system calls of 4 MiB, O_DIRECT and large pages, spread over forward and
backward: no hooks, no books, no checksums, no interpreter that it shares with training. What it costs is
cores, caches and memory bandwidth, which no package can spare; offload beside it tells what this one adds.
Keep runs twice.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from gpt_runner import CONTROL, SHAPE, GptRunner, dtype_option, report, settings_of, settled_dtype, shown_race
from mover import CALL

from tba_lab.demo.race import Entrant
from tba_offload.device.malloc import FAST_ALLOCATOR

SPREAD = 0.8
"""Share of a forward or a backward over which its bytes are spread, so that they have gone when it ends."""


class Mover:
    """A process of ``mover.py``.

    Args:
        path: Its file.
        nbytes: Bytes of the file.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        program = [sys.executable, str(Path(__file__).with_name("mover.py")), path, str(nbytes)]
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.wait()

    def begin(self, what: str, seconds: float) -> None:
        """Begins to write or to read the file.

        Args:
            what: ``write`` or ``read``.
            seconds: Over which it is spread.
        """
        print(what, seconds, file=self._process.stdin, flush=True)

    def wait(self) -> None:
        """Wait until all has gone.

        Raises:
            OSError: The process has ended.
        """
        if not self._process.stdout.readline():
            raise OSError(f"the process that moves bytes ended with {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


class BesideMover(GptRunner):
    """Keeps everything while another process moves bytes.

    Args:
        nbytes: Bytes that are written during forward, and read during backward.
        settings: Of :class:`gpt_runner.GptRunner`.
    """

    def __init__(self, nbytes: int, **settings: Any) -> None:
        super().__init__("keep", **settings)
        path = str(Path(settings["directory"]) / "mover")
        self._mover = Mover(path, max(nbytes // CALL, 1) * CALL)
        self._seconds = [0.0, 0.0]  # of the last forward and backward

    def _forward_backward(self, batch: Any) -> dict[str, Any]:
        began = time.perf_counter()
        self._mover.begin("write", SPREAD * self._seconds[0])
        loss = self._loss(batch)
        self._mover.wait()
        between = time.perf_counter()
        self._mover.begin("read", SPREAD * self._seconds[1])
        loss.backward()
        self._mover.wait()
        self._seconds = [between - began, time.perf_counter() - between]
        return {"loss": float(loss.detach())}

    def close(self) -> None:
        """End the other process too."""
        self._mover.close()
        super().close()


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--layers", default=SHAPE["layers"], show_default=True)
@click.option("--hidden", default=768, show_default=True)
@click.option("--sequence", default=SHAPE["sequence"], show_default=True)
@click.option("--batch-size", default=2, show_default=True)
@click.option("--steps", type=click.IntRange(min=7), default=20, show_default=True, help="Of each lane.")
@click.option("--window", default="10MiB", show_default=True, help="Bytes in flight.")
@dtype_option
@click.option("--directory", default=None, help="Where files go.  [default: a temporary directory]")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=None, help="For figures.")
def main(
    *,
    batch_size: int,
    steps: int,
    window: str,
    dtype: str,
    directory: str | None,
    json_file: Path | None,
    **shape: int,
) -> None:
    """Print a line for each lane."""
    model = SHAPE | shape | {"dtype": settled_dtype(dtype)}
    with tempfile.TemporaryDirectory(dir=directory) as place:
        settings = settings_of(model, batch_size=batch_size, window=window, directory=place)
        first = shown_race({"offload": Entrant(GptRunner, {"way": "offload", **settings}, FAST_ALLOCATOR)}, 2)
        moved = first["offload"][-1]["offloaded"]
        click.echo(f"{moved / 2**20:.0f} MiB are written and read in a step")
        keep = Entrant(GptRunner, {"way": "keep", **settings}, FAST_ALLOCATOR)
        entrants = {
            "keep": keep,
            CONTROL: keep,
            "keep beside plain I/O": Entrant(BesideMover, {"nbytes": moved, **settings}, FAST_ALLOCATOR),
            "offload": Entrant(GptRunner, {"way": "offload", **settings}, FAST_ALLOCATOR),
            "offload, no checksums": Entrant(
                GptRunner, {"way": "offload", "checksum": False, **settings}, FAST_ALLOCATOR
            ),
        }
        results = shown_race(entrants, steps)
    rows = report(results, base=dict.fromkeys(entrants, "keep"))
    for row in rows:
        low, high = row["time_interval"]
        click.echo(
            f"{row['name']:24} {row['seconds_median']:.3f} s, x keep {row['time_ratio']}, 95 % interval "
            f"of the median {low:.3f} to {high:.3f}"
        )
    if json_file is not None:
        plain = [{**row, "time_ratio": dataclasses.asdict(row["time_ratio"])} for row in rows]
        json_file.write_text(json.dumps(plain, indent=2) + "\n")


if __name__ == "__main__":
    main()
