# SPDX-License-Identifier: Apache-2.0
"""Load of the engine and progress of its steps, followed through vLLM's scheduler."""
