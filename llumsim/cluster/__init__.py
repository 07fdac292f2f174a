# SPDX-License-Identifier: Apache-2.0
"""A cluster on a virtual clock: the load, the production control plane, the instances, and what is measured."""
