# SPDX-License-Identifier: Apache-2.0
"""Moves between modelled engines: the machines of the protocol, the links between nodes, and the llumlet."""
