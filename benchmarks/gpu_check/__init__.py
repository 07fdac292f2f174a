# SPDX-License-Identifier: Apache-2.0
"""Does all of it work on this GPU, and how fast?

    python -m benchmarks.gpu_check --json gpu.json

First what needs no engine (`device`): the copy kernels tried as a worker tries them, then against the reference and
timed; the seal of what RDMA brings; KV memory of another process mapped, read, and its process killed meanwhile. Then
real engines, two for each cell (`cells`, `engines`): with CUDA graphs as by default, or eager; on vLLM's V2 runner or
its V1; a KV cache in bf16 or fp8; grouped-query or latent attention; blocks of 16 or 64 tokens. And one cell each for
prefix hits, LoRA, n-grams, JSON schema, both executors, tensor parallelism, two GPUs, `tcp`, and a source that is
killed while it is read. Of the matrix eight cells run by default, in which any two choices meet: with the others some
fifteen pairs of engines, a minute each. `--all` runs all 32 of it, `--cells` those that are named.

A cell is `right` if every move was live, the answer has the tokens of an unmoved run, and the engine has the model
runner that was asked for, by its own word; `wrong` if not. Where two unmoved runs differ nothing follows from a third:
then the cell is tried again with `VLLM_BATCH_INVARIANT=1`, then in float32, and is `undecided` if they differ there,
too (`verdicts`). What cannot run on this machine is `unrun`, with the reason. One JSON object; exit code 0 only if
something ran and nothing was wrong or undecided.

`--stand-in` runs all of this without a GPU: the kernels of processors, and V2-on-CPU engines
(`tests/support/v2_on_cpu`). The report says so; nothing in it speaks of GPUs.
"""
