# SPDX-License-Identifier: Apache-2.0
"""A cluster on a virtual clock: the scheduler side as it is in production, over modelled engines and links.

Times inside are whole picoseconds: sums of step times are exact, so that a hundred steps taken at once end when a
hundred steps taken one by one end.
"""

PS = 1_000_000_000_000
"""Picoseconds in a second."""
