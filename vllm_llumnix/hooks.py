# SPDX-License-Identifier: Apache-2.0
"""Everything the patches call.

A patch holds no logic: it calls one of these functions, and with the llumlet off each of them does what stock vLLM did.
This module imports the standard library and `switch`; the rest when `--enable-llumlet` is known to be given.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from vllm_llumnix.switch import CONFIG_VARIABLE, enabled

if TYPE_CHECKING:
    import argparse

    from vllm_llumnix.engine.loop import EngineLoop

MIDDLEWARE = (
    "vllm_llumnix.frontend.server_drain.RefuseNew",
    "vllm_llumnix.frontend.asgi.ReadAttempt",
    "vllm_llumnix.frontend.asgi.AnswerLive",
)


# Command line (API server process)


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    from vllm_llumnix import config

    config.add_cli_args(parser)


def resolve_args(args: argparse.Namespace) -> None:
    """Validate the llumlet's flags and hand them to the processes that this one will start.

    Called once or more for the same namespace. Exits with one message that names every fault.
    """
    import logging

    from vllm_llumnix import config
    from vllm_llumnix.errors import ConfigError
    from vllm_llumnix.patching import state

    if getattr(args, "llumlet_resolved", False):
        return
    try:
        resolved = config.config_from_args(args)
        if resolved is not None:
            patched = state.current()
            if patched.problem:
                raise ConfigError([f"--enable-llumlet: {patched.problem}"])
            for remark in patched.remarks:
                logging.getLogger("vllm.llumnix").warning("llumlet: %s", remark)
    except ConfigError as error:
        print("vllm: error:", "\n  ".join(error.faults), file=sys.stderr)
        raise SystemExit(2) from None
    args.llumlet_resolved = True
    if resolved is None:
        os.environ.pop(CONFIG_VARIABLE, None)
    else:
        os.environ[CONFIG_VARIABLE] = resolved.to_json()
        if hasattr(args, "middleware"):
            args.middleware = [*args.middleware, *MIDDLEWARE]


# Front-end (API server process)


def client_class(cls: type) -> type:
    """The engine client class to use in place of `cls`."""
    if not enabled():
        return cls
    from vllm_llumnix.frontend.client import llumnix_client_class

    return llumnix_client_class(cls)


def check_ready(response: Any) -> None:
    """Refuse an engine process whose vLLM carries another patch series than this process."""
    if not enabled():
        return
    from vllm_llumnix.errors import PatchError

    theirs, ours = getattr(response, "patch_digest", None), ready_digest()
    if theirs != ours:
        raise PatchError(
            f"the engine process runs patch series {theirs}, this process {ours}: "
            "install one version of vllm-llumnix for all processes and restart"
        )


def ends_with_engine(engine_manager: Any) -> bool:
    """True if the parent of several API servers should end them now: an engine process has died.

    With the llumlet on they stay up, and end after their last stream.
    """
    return engine_manager.failed_proc_name is not None and not enabled()


# Engine process


def ready_digest() -> str | None:
    if not enabled():
        return None
    from vllm_llumnix.patching import state

    return state.current().digest


def attach_engine(engine: Any) -> EngineLoop | None:
    """Give the engine its migration connector, or None when the llumlet is off."""
    if not enabled():
        return None
    from vllm_llumnix.engine.attach import attach

    return attach(engine)


# Worker process


def output_history(new_request: Any) -> list[int]:
    """Output tokens with which a request enters the V1 runner: none, unless it arrives from another engine."""
    tokens = new_request.prefill_token_ids
    return [] if tokens is None else tokens[new_request.prompt_len :]


def restore_generator(generator: Any, new_request: Any) -> None:
    """Advance a freshly seeded generator past the draws of the output tokens the request arrives with."""
    num_draws = len(output_history(new_request))
    if num_draws:
        _draw(generator, num_draws)


def undo_draw(runner: Any, index: int, generator: Any) -> None:
    """Take back the draw of a sample that is discarded (a prefill chunk that is not the last).

    On a CUDA device this is stock vLLM's step back of the Philox offset. The CPU generator has no offset, and stock
    vLLM ends the engine there: seed it again and repeat the draws of the tokens that were kept.
    """
    if generator.device.type != "cpu":
        generator.set_offset(generator.get_offset() - 4)
        return
    request = runner.requests[runner.input_batch.req_ids[index]]
    generator.manual_seed(request.sampling_params.seed)
    num_draws = len(request.output_token_ids)
    if num_draws:
        _draw(generator, num_draws)


def _draw(generator: Any, num_draws: int) -> None:
    """Repeat what vLLM's CPU sampler draws from a request's generator: one 31-bit integer for each token."""
    import torch

    if generator.device.type != "cpu":
        raise RuntimeError("a seeded request cannot be rebuilt from its tokens on this device")
    torch.randint(0, 2**31, (num_draws,), generator=generator)
