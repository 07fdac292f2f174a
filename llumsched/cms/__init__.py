# SPDX-License-Identifier: Apache-2.0
"""The cluster metadata store (CMS): the instances of a cluster and their load.

All readers use a `view`. A store feeds it: `embedded`, to which instances report over gRPC, `redis`, or `watch`, the
embedded store of another process.
"""
