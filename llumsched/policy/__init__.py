# SPDX-License-Identifier: Apache-2.0
"""The language of policies: metrics, filters and selectors over the columns of the cluster, and the files that put them
together, for dispatch (which instance a request goes to) and for rescheduling (which requests change place) alike.

Nothing here does I/O or reads a clock, but for reading a policy's file: time and randomness are handed in.
"""
