# SPDX-License-Identifier: Apache-2.0
"""A model of an engine's step times, learnt from measured steps."""
