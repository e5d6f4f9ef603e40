"""The command ``python -m tba_offload``, which is the same as ``tba-offload``."""

from tba_offload.cli import main

if __name__ == "__main__":
    main(prog_name="tba-offload")
