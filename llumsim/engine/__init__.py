# SPDX-License-Identifier: Apache-2.0
"""The model of an engine: vLLM's scheduler and block pool without a model behind them, and the time of a step."""
