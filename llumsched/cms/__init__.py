# SPDX-License-Identifier: Apache-2.0
"""The cluster metadata store (CMS): who is in the cluster, and how loaded.

`view` is what everybody reads. It is fed by one of the stores: `embedded`, which instances report to over gRPC,
`redis`, or `watch`, the embedded one of another process.
"""
