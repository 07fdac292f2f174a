# SPDX-License-Identifier: Apache-2.0
"""How long steps of an engine take, learnt from steps that were measured."""
