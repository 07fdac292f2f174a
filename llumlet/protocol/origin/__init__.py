# SPDX-License-Identifier: Apache-2.0
"""An API server's decisions about the requests whose clients it holds."""
