# SPDX-License-Identifier: Apache-2.0
"""Is the cluster simulator true? `python -m benchmarks.calibrate`."""
