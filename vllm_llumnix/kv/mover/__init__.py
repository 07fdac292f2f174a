# SPDX-License-Identifier: Apache-2.0
"""The mover of one worker: the thread that pulls KV blocks, and the engine's end of its socket."""
