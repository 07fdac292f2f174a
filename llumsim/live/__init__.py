# SPDX-License-Identifier: Apache-2.0
"""Engines without vLLM in real time, behind real sockets.

A `SimulatedInstance` serves the gRPC service of a llumlet and an OpenAI API, and reports to a CMS with the production
`Reporter`. Behind them runs the modelled engine of `llumsim.engine`, which moves requests with the protocol's own
machines. Times measured with it describe a real engine only as far as its `model` does
(`llumsim.engine.step_model.load_hardware`).
"""

from llumsim.engine.step_model import engine_model
from llumsim.live.fleet import SimulatedCluster
from llumsim.live.simulated import SimulatedInstance
from llumsim.live.world import SimulatedRequest

__all__ = ["SimulatedCluster", "SimulatedInstance", "SimulatedRequest", "engine_model"]
