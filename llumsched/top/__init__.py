# SPDX-License-Identifier: Apache-2.0
"""`llumnix top`: the cluster, live, in a terminal. `source` reads it, `rows` makes cells, `app` draws."""
