#!/usr/bin/env bash
# Runs the tests with DeepSpeed, on a CPU, in .venv_deepspeed, which it makes. Arguments go to pytest.
# DeepSpeed compiles operations at its first start, so it needs a C++ compiler, the headers of libaio (apt-get
# install libaio-dev) and some minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. examples/setup.sh
VENV=.venv_deepspeed
setup_venv dev,transformers,accelerate deepspeed==0.19.8
export PATH=$PWD/$VENV/bin:$PATH DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$PWD/$VENV/extensions
# A build that was cut off leaves a lock, which the next one would wait for without end.
rm -f "$TORCH_EXTENSIONS_DIR"/*/lock
with_progress "compiling what DeepSpeed needs" python -c '
from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
build_shm_op()
for builder in (AsyncIOBuilder, CPUAdamBuilder):
    builder().load()
'
python -m pytest -n 0 tests/unit/integrations/on_deepspeed.py "$@"
