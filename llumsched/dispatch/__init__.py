# SPDX-License-Identifier: Apache-2.0
"""Which instance a request goes to: a policy run over the table of the cluster, and what came of it."""
