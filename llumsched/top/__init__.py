# SPDX-License-Identifier: Apache-2.0
"""`llumnix top`: the cluster, live, in a terminal. `source` knows what is, `rows` says it in cells, `app` draws."""
