# SPDX-License-Identifier: Apache-2.0
"""Arguments that name instances: by the address of a llumlet, or by the id that the CMS knows."""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from llumlet import kinds
from llumlet.client import LlumletClient
from llumlet.settings import Group, Reading
from llumlet.types import Address
from llumsched.cms.snapshot import CmsUnreachable, look
from llumsched.cms.store import LISTEN, name_of, store_faults
from llumsched.commands.arguments import address
from llumsched.fan_out import Answer, ask_all

CMS_VARIABLE: Final = "LLUMNIX_CMS"

T = TypeVar("T")
INSTANCE: Final = "INSTANCE"
"""In place of a flag, for the positional argument."""

Place = Address | str
"""A string is the id of an instance."""


@dataclass(frozen=True, slots=True)
class Cms:
    cms: str = Group("").setting(
        "",
        kinds.text("HOST:PORT|redis://…"),
        "the scheduler, or the Redis, that knows the instances by their ids",
        variable=CMS_VARIABLE,
    )


def cms_of(reading: Reading) -> str:
    """The URL, or an empty string."""
    url = reading.make(Cms).cms
    if url.startswith(LISTEN):
        reading.faults.append("--cms: a command does not listen; name the CMS as HOST:PORT or redis://HOST:PORT")
    elif url:
        reading.faults += [f"--cms {fault}" for fault in store_faults(url)]
    return url


def add_instances(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "instances",
        nargs="*",
        metavar="INSTANCE",
        help="instances to ask, by id (needs --cms; without any, all that it knows) or HOST:PORT",
    )
    parser.add_argument(
        "--llumlet",
        action="append",
        default=[],
        metavar="HOST:PORT[,HOST:PORT…]",
        help="the llumlets to ask (repeatable); an engine logs its own at start",
    )
    add_cms(parser)


def add_cms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cms",
        metavar="HOST:PORT|redis://…",
        help=f"the scheduler, or the Redis, that knows the instances by their ids (default: {CMS_VARIABLE})",
    )


def cms_faults(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Leaves the URL, or an empty string, in `args.cms`."""
    args.cms = args.cms or environ.get(CMS_VARIABLE, "")
    if args.cms.startswith(LISTEN):
        return ["--cms: a command does not listen; name the CMS as HOST:PORT or redis://HOST:PORT"]
    return [f"--cms {fault}" for fault in store_faults(args.cms)] if args.cms else []


def instances(args: argparse.Namespace) -> tuple[list[Place], list[str]]:
    """What `add_instances` was given, each once, and what is wrong with the rest. None are all that the CMS knows."""
    faults = cms_faults(args)
    texts = [(INSTANCE, text) for text in args.instances]
    texts += [("--llumlet", text) for argument in args.llumlet for text in argument.split(",")]
    if not (texts or args.cms or faults):
        return [], ["--llumlet HOST:PORT is missing"]
    places: dict[Place, None] = {}
    for flag, text in texts:
        found, more = place(flag, text, args)
        places.update(dict.fromkeys(found))
        faults += more
    return list(places), faults


def place(flag: str, text: str | None, args: argparse.Namespace) -> tuple[list[Place], list[str]]:
    """One place, or one fault. Without a CMS only addresses are places."""
    found, faults = address(flag, text)
    if faults and text and args.cms and ":" not in text:
        return [text], []
    if faults and flag == INSTANCE:
        faults = [f"{faults[0]}; an instance's id needs --cms"]
    return list(found), faults


async def ask(args: argparse.Namespace, question: Callable[[LlumletClient], Awaitable[T]]) -> list[Answer[T]]:
    """The answers of `args.places`; one without an address if the CMS does not say where they are."""
    try:
        addresses = await resolve(args.places, args)
    except CmsUnreachable as failure:
        return [Answer(None, None, failure)]
    return await ask_all(addresses, question, args.credentials)


async def resolve(places: Sequence[Place], args: argparse.Namespace) -> list[Address]:
    """Where the llumlets of `places` listen, in their order; of all instances if there are none. Raises
    CmsUnreachable if the CMS cannot be asked, or does not know an id."""
    if places and all(isinstance(each, Address) for each in places):
        return [each for each in places if isinstance(each, Address)]
    async with look(args.cms, args.credentials) as view:
        if not places:
            return [view[instance_id].llumlet for instance_id in sorted(view)]
        unknown = [each for each in places if isinstance(each, str) and each not in view]
        if unknown:
            known = ", ".join(sorted(view)) or "none"
            detail = f"it knows no instance {', '.join(unknown)} (but {known})"
            raise CmsUnreachable(name_of(args.cms), detail)
        return [view[each].llumlet if isinstance(each, str) else each for each in places]
