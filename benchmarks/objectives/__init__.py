# SPDX-License-Identifier: Apache-2.0
"""What moves and dispatch do for objectives: `python -m benchmarks.objectives`."""
