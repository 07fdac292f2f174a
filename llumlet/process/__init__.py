# SPDX-License-Identifier: Apache-2.0
"""The kit of every process: settings, addresses, credentials, Redis, tasks, standard streams."""
