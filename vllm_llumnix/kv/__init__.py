# SPDX-License-Identifier: Apache-2.0
"""The data plane in vLLM's workers: it moves KV blocks between engines.

`worker` starts it in a worker, `data_plane` builds it.

    memory      where the bytes of KV blocks lie
    mover       the thread that pulls blocks from peers, and what the engine says to it
    serving     blocks that peers may read
    transport   the ways from a peer's memory to ours
    networks    NIXL and Mooncake, which read staging buffers of other machines
    kernels     blocks of all layers into one buffer and back
"""
