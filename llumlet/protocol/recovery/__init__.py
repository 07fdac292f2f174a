# SPDX-License-Identifier: Apache-2.0
"""Going on after a loss: which requests are suspected and tried, when to retry, and an engine's half of a replay."""
