# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: everything that tells engines what to do. Imports neither vLLM nor torch."""
