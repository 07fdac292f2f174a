# SPDX-License-Identifier: Apache-2.0
"""Steps of vLLM's model as workers and engine note them down, in shared memory and in the V1 runner."""
