# SPDX-License-Identifier: Apache-2.0
"""The choice of an instance for a request: a policy run over the table of the cluster."""
