# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a GPU, for tests on machines without one: the engine that vLLM runs on a GPU, on a CPU.

On a GPU vLLM runs its V2 model runner with asynchronous scheduling. On a CPU it falls back to the V1 runner, for
want of a Triton that compiles for CPUs, and to synchronous scheduling, which it thinks enough there. This distribution,
on `PYTHONPATH` together with `TRITON_INTERPRET=1`, takes away both reasons:

- `driver`, `compiler`: a Triton backend named `cpu`. It is a name only, for vLLM to see that there is one: kernels are
  run by Triton's own interpreter, in numpy.
- `interpreter`: what that interpreter does otherwise than the compiler, mended, and needless work taken out of it.
- `plugin`: asynchronous scheduling is kept wherever vLLM has decided for it, as on a GPU; what DeepSeek V4 lacks on a
  CPU is there; new blocks are filled with zeros in less time.

vLLM itself, its runner, scheduler, kernels' sources and sampling, is as it is; what is left out is the GPU: no
compiled kernels, no graphs, no streams that run beside the host (vLLM's CPU worker makes them no-ops), no device
memory. A token takes about 60 ms. Nothing of this is installed with the project: it lies in its tests.

`PATH` is what goes onto `PYTHONPATH`; `ENVIRONMENT` is what else an engine needs.
"""

from pathlib import Path

PATH = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    # With a Triton backend the V2 runner is vLLM's default for most engines; an engine that it is not for must not
    # start, rather than fall back to V1.
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
