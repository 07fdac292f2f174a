# SPDX-License-Identifier: Apache-2.0
"""Engines without vLLM: one model of an engine, driven by two clocks.

`cluster` plays the production scheduler side over modelled engines and links on a virtual clock (`python -m
benchmarks.cluster`). `live` puts the same engines behind the sockets of real ones, in real time, for tests and
benchmarks of the scheduler side. Both stand on `engine`, the model, and on `moves`, the migration protocol between
modelled engines. Nothing of this is installed with the product.

All times are whole picoseconds: sums of step times are exact, so that a hundred steps taken at once end exactly when
a hundred steps taken one by one end.
"""

PS = 1_000_000_000_000
"""Picoseconds in a second."""
