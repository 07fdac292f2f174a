# SPDX-License-Identifier: Apache-2.0
"""A cluster without engines: instances that speak the real protocols and only pretend to compute.

`SimulatedInstance` serves the gRPC service of a llumlet, reports to a CMS with the real `Reporter`, and runs a model of
an engine (`engine.py`): steps that take time, a KV cache that fills, a queue, preemptions. For tests and benchmarks of
the scheduler side; nothing that is measured with it says anything about a real engine.
"""

from llumsched.testing.cluster import SimulatedCluster
from llumsched.testing.engine import EngineModel, SimulatedEngine, SimulatedRequest
from llumsched.testing.instance import SimulatedInstance

__all__ = ["EngineModel", "SimulatedCluster", "SimulatedEngine", "SimulatedInstance", "SimulatedRequest"]
