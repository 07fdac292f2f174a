# SPDX-License-Identifier: Apache-2.0
"""Experiments of Llumnix's paper (OSDI'24), and those that its reviewers missed, on simulated clusters.

What came out: benchmarks/experiments.md. A module for each experiment, with its question in the docstring; `lab` plays
the runs, `__main__` is the command.
"""
