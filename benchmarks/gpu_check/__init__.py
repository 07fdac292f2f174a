# SPDX-License-Identifier: Apache-2.0
"""Does all of it work on this GPU, and how fast?

    python -m benchmarks.gpu_check --json gpu.jsonl
    python -m benchmarks.gpu_check --no-cells                             what needs no vLLM: two minutes
    python -m benchmarks.gpu_check --no-parts --seconds 400 --numerics 1 --cells 'defaults,source killed'

First the parts, which need no engine and nothing of vLLM: the copy kernels tried as a worker tries them, then against
the processor and timed, also on a real model's blocks and on parts of pages; KV memory of another process mapped and
read, and its process killed before, during and after a copy; blocks pulled from another process over `local` and `tcp`
beside a CUDA graph that is replayed; the seal of what RDMA brings. Then real engines, two for each cell: vLLM's
defaults first, then one cell each for JSON schema, prefix hits, a source that is killed while it is read, `tcp`, LoRA,
n-grams, both executors, tensor parallelism and two GPUs; and a matrix: CUDA graphs or eager, vLLM's V2 runner or its
V1, a KV cache in bf16 or fp8, grouped-query or latent attention, blocks of 16 or 64 tokens. Of the matrix eight cells
run by default, in which any two choices meet: some fifteen pairs of engines, a minute each. `--all` runs all 32 of it.

A cell is `right` if every move was live, the answer has the tokens of an unmoved run, and the engine has the model
runner that was asked for, by its own word; `wrong` if not. Where two unmoved runs differ nothing follows from a third:
then the cell is tried again with `VLLM_BATCH_INVARIANT=1`, then in float32, and is `undecided` if they differ there,
too (`verdicts`). What cannot run on this machine, or in the time that is left, is `unrun`, with the reason. `--json`
gets a line for each part and cell as soon as it is known; one JSON object is printed at the end. Exit code 0 only if
something ran and nothing was wrong or undecided.

`--stand-in` runs all of this without a GPU: the kernels of processors, and V2-on-CPU engines
(`tests/support/v2_on_cpu`). The report says so; nothing in it speaks of GPUs.
"""
