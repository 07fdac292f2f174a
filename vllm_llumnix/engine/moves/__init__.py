# SPDX-License-Identifier: Apache-2.0
"""Moves between engines: `source_*` is the side that a request leaves, `destination_*` the other one."""
