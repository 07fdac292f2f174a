# SPDX-License-Identifier: Apache-2.0
"""The llumlet's service: what operators, peers and origins can ask of this engine."""
