# SPDX-License-Identifier: Apache-2.0
"""`llumnix profile`: measures the step times of an engine."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import aiohttp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llumlet.contract.client import LlumletClient
from llumlet.contract.errors import LlumletError, LlumletUnreachable
from llumlet.process import kinds
from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials
from llumlet.process.kinds import Kind
from llumlet.process.setting_sources import Reading
from llumsched.commands.arguments import OPTIONS, Output
from llumsched.console import output
from llumsched.console.exit_codes import ExitCode
from llumsched.latency.online import learn
from llumsched.latency.profile import Profile, profile_of
from llumsched.profiler import Cell, ProfileFailed, Target, cells, measure
from llumsched.scheduler.static_engines import API_KEY_VARIABLE

DESCRIPTION = f"""Measure how long the steps of an engine take, and write it to a file.

  llumnix profile --llumlet 127.0.0.1:7000 --output qwen.json     an instance, whose engine reports its own steps
  llumnix profile --endpoint http://127.0.0.1:8000                any vLLM, timed by single requests

Sends prompts of all lengths and decoding batches to the engine for some minutes; the engine should be idle otherwise.
`llumnix scheduler --step-profiles FILE` then predicts latencies from its first request on, which it otherwise learns
within seconds. The engine's --api-key is read from the variable {API_KEY_VARIABLE}."""

_ANSWER_S: Final = 10.0
_WITHOUT_LLUMLET: Final = 16_384
"""Assumed tokens of the KV cache of an engine without a llumlet."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    llumlet: Address | None = OPTIONS.setting(
        None, Kind(Address.parse, "HOST:PORT"), "instance to measure, by its llumlet's address"
    )
    endpoint: str = OPTIONS.setting(
        "", kinds.text("URL"), "API server of an engine without a llumlet, to be measured as a client sees it"
    )
    model: str = OPTIONS.setting(
        "", kinds.text("NAME"), "name of the model at the API server; empty takes the first that is served"
    )
    output: str = OPTIONS.setting("profile.json", kinds.text("FILE"), "file to write the profile to")
    most_prompt_tokens: int = OPTIONS.setting(8192, kinds.integer(at_least=16), "longest prompt to send, in tokens")
    most_requests: int = OPTIONS.setting(32, kinds.integer(at_least=1), "largest batch to send, in requests")


SETTINGS: Final = (ProfileOptions, Output)


def prepare(reading: Reading) -> tuple[ProfileOptions, bool]:
    options = reading.make(ProfileOptions)
    if (options.llumlet is None) == (not options.endpoint):
        reading.faults.append("exactly one of --llumlet and --endpoint is needed")
    return options, reading.make(Output).json


def run(prepared: tuple[ProfileOptions, bool], credentials: Credentials) -> int:
    options, as_json = prepared
    try:
        profile = asyncio.run(_profile(options, credentials))
        Path(options.output).write_text(profile.written(f"by llumnix profile of {profile.source}"))
    except (LlumletUnreachable, aiohttp.ClientError, TimeoutError) as error:
        print(f"llumnix profile: {error or 'no answer'}", file=sys.stderr)
        return ExitCode.UNREACHABLE
    except (ProfileFailed, LlumletError, OSError, ValueError) as error:
        print(f"llumnix profile: {error}", file=sys.stderr)
        return ExitCode.REFUSED
    if as_json:
        output.print_json({"file": options.output, "model": profile.model, "step_s": profile.coefficients._asdict(),
                           "steps": profile.num_steps, "error": profile.error})  # fmt: skip
    else:
        _show(profile, options.output)
    return ExitCode.OK


async def _profile(options: ProfileOptions, credentials: Credentials) -> Profile:
    async with AsyncExitStack() as stack:
        llumlet = None
        if options.llumlet is not None:
            llumlet = await stack.enter_async_context(LlumletClient(options.llumlet, credentials=credentials))
        target = await _target(options, llumlet)
        plan = cells(target, options.most_requests)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        bar = stack.enter_context(Progress(*columns, console=output.console(stderr=True)))
        task = bar.add_task(f"steps of {output.clean(target.model)}", total=len(plan))
        steps = await measure(target, _in_order(plan), llumlet, lambda: bar.advance(task))
    return profile_of(learn(steps), target.model, str(options.llumlet or options.endpoint))


def _in_order(plan: list[Cell]) -> list[Cell]:
    """Orders short cells first, so that faults show early."""
    return sorted(plan, key=lambda cell: cell.number * (cell.prompt + 8 * cell.output))


async def _target(options: ProfileOptions, llumlet: LlumletClient | None) -> Target:
    """Raises ProfileFailed if the API server's address is unknown, and the errors of its calls."""
    key = os.environ.get(API_KEY_VARIABLE, "")
    if llumlet is None:
        url = options.endpoint.rstrip("/")
        model, longest = await _served(url, key, options.model)
        most = min(longest or options.most_prompt_tokens, options.most_prompt_tokens)
        return Target(url, model, key, most, _WITHOUT_LLUMLET)
    metadata, status = await asyncio.gather(llumlet.get_instance_metadata(), llumlet.get_instance_status())
    if not metadata.api_server_port:
        raise ProfileFailed("the instance does not say where its API server is: give --endpoint")
    url = f"http://{Address(metadata.ip, metadata.api_server_port)}"
    model = options.model or next(iter(metadata.served_models), "")
    target = Target(url, model, key, metadata.max_model_len, status.num_total_gpu_tokens)
    return replace(target, most_tokens=min(target.most_tokens, options.most_prompt_tokens))


async def _served(url: str, key: str, wanted: str) -> tuple[str, int]:
    """Name and greatest length of a model of the API server."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
        session.get(f"{url}/v1/models") as answer,
    ):
        if answer.status != 200:
            raise ProfileFailed(f"{url} answers {answer.status} to /v1/models")
        served = (await answer.json())["data"]
    for one in served:
        if not wanted or one["id"] == wanted:
            return str(one["id"]), int(one.get("max_model_len") or 0)
    raise ProfileFailed(f"{url} does not serve {wanted!r}, but {', '.join(one['id'] for one in served) or 'nothing'}")


def _show(profile: Profile, path: str) -> None:
    rows = output.table(("A STEP TAKES", ">"))
    a, b, c, d, e = profile.coefficients
    for text, value in (
        ("for itself", f"{1e3 * a:.3f} ms"),
        ("and for each token of a prefill", f"{1e6 * b:.2f} µs"),
        ("each thousand pairs of a query and a key there", f"{1e9 * c:.4f} µs"),
        ("each request that decodes", f"{1e6 * d:.2f} µs"),
        ("each thousand tokens of its KV cache", f"{1e9 * e:.2f} µs"),
    ):
        rows.add_row(text, value)
    output.console().print(rows)
    print(f"{profile.num_steps} steps, of which half are within {100 * profile.error:.1f} % of that; written to {path}")
