# SPDX-License-Identifier: Apache-2.0
"""A CUDA without a GPU: `runtime.cpp` says what there is of it, `environment` makes it."""
