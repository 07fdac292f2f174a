# SPDX-License-Identifier: Apache-2.0
"""A cluster without engines: instances that speak the real protocols and only pretend to compute.

`SimulatedInstance` serves the gRPC service of a llumlet and an OpenAI API, and reports to a CMS with the real
`Reporter`. Behind that is an instance of `llumsched.simulator` on a real clock: vLLM's scheduler over a step model, and
the migration protocol's own machines. For tests and benchmarks of the scheduler side; nothing that is measured with it
says anything about a real engine, unless `model` is that of one (`llumsched.simulator.step_model.load_hardware`).
"""

from llumsched.testing.cluster import SimulatedCluster
from llumsched.testing.instance import SimulatedInstance
from llumsched.testing.model import engine_model
from llumsched.testing.requests import SimulatedRequest

__all__ = ["SimulatedCluster", "SimulatedInstance", "SimulatedRequest", "engine_model"]
