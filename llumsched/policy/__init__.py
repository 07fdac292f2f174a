# SPDX-License-Identifier: Apache-2.0
"""The language of policies: metrics, filters and selectors over the columns of the cluster, and the YAML files that
combine them, for dispatch and rescheduling.

Apart from reading a policy's file nothing here does I/O or reads a clock: time and randomness are parameters.
"""
