# SPDX-License-Identifier: Apache-2.0
"""How commands name instances: by the address of a llumlet, or by the id that the CMS knows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from llumlet import kinds
from llumlet.client import LlumletClient
from llumlet.credentials import Credentials
from llumlet.kinds import Kind
from llumlet.setting_sources import Reading
from llumlet.types import Address
from llumsched.cms.snapshot import CmsUnreachable, look
from llumsched.cms.store import LISTEN, name_of, store_faults
from llumsched.commands.arguments import OPTIONS
from llumsched.fan_out import Answer, ask_all

CMS_VARIABLE: Final = "LLUMNIX_CMS"

T = TypeVar("T")
INSTANCE: Final = "INSTANCE"
"""Word in place of a flag, for the positional argument."""

Place = Address | str
"""An instance's address, or its id."""


@dataclass(frozen=True, slots=True)
class Cms:
    cms: str = OPTIONS.setting(
        "",
        kinds.text("HOST:PORT|redis://…"),
        "the scheduler, or the Redis, that knows the instances by their ids",
        variable=CMS_VARIABLE,
    )


@dataclass(frozen=True, slots=True)
class Named:
    instances: tuple[str, ...] = OPTIONS.setting(
        (),
        Kind(tuple, INSTANCE, {"nargs": "*"}, repeated=True),
        "instances to ask, by id (needs --cms; without any, all that it knows) or HOST:PORT",
        flag="instances",
    )
    llumlet: tuple[str, ...] = OPTIONS.setting(
        (),
        Kind(tuple, "HOST:PORT[,HOST:PORT…]", repeated=True),
        "the llumlets to ask (repeatable); an engine logs its own at start",
    )


def cms_of(reading: Reading) -> str:
    """The URL of `--cms`, or an empty string."""
    url = reading.make(Cms).cms
    if url.startswith(LISTEN):
        reading.faults.append("--cms: a command does not listen; name the CMS as HOST:PORT or redis://HOST:PORT")
    elif url:
        reading.faults += [f"--cms {fault}" for fault in store_faults(url)]
    return url


@dataclass(frozen=True, slots=True)
class Places:
    """Instances, each once; without any, all that the CMS knows. `cms`: its URL, or empty."""

    places: Sequence[Place]
    cms: str

    async def ask(self, question: Callable[[LlumletClient], Awaitable[T]], credentials: Credentials) -> list[Answer[T]]:
        """The answers of all instances; one without an address if the CMS does not say where they are."""
        try:
            addresses = await self.resolve(credentials)
        except CmsUnreachable as failure:
            return [Answer(None, None, failure)]
        return await ask_all(addresses, question, credentials)

    async def resolve(self, credentials: Credentials) -> list[Address]:
        """Addresses of their llumlets, in their order. Raises CmsUnreachable if the CMS cannot be asked, or does not
        know an id."""
        if self.places and all(isinstance(each, Address) for each in self.places):
            return [each for each in self.places if isinstance(each, Address)]
        async with look(self.cms, credentials) as view:
            if not self.places:
                return [view[instance_id].llumlet for instance_id in sorted(view)]
            unknown = [each for each in self.places if isinstance(each, str) and each not in view]
            if unknown:
                known = ", ".join(sorted(view)) or "none"
                detail = f"it knows no instance {', '.join(unknown)} (but {known})"
                raise CmsUnreachable(name_of(self.cms), detail)
            return [view[each].llumlet if isinstance(each, str) else each for each in self.places]


def named(reading: Reading) -> Places:
    """Places that `Named` was given."""
    given, cms = reading.make(Named), cms_of(reading)
    texts = [(INSTANCE, text) for text in given.instances]
    texts += [("--llumlet", text) for text in words(given.llumlet)]
    if not (texts or "--cms" in reading.given):
        reading.faults.append("--llumlet HOST:PORT is missing")
    return places(reading, texts, cms)


def places(reading: Reading, texts: Iterable[tuple[str, str]], cms: str) -> Places:
    """The places that texts name. `texts`: flag, and address or id. Without a CMS only addresses are places."""
    found: dict[Place, None] = {}
    for flag, text in texts:
        try:
            found[Address.parse(text)] = None
        except ValueError as error:
            if cms and text and ":" not in text:
                found[text] = None
            else:
                hint = "; an instance's id needs --cms" if flag == INSTANCE else ""
                reading.faults.append(f"{flag} {error}{hint}")
    return Places(tuple(found), cms)


def words(arguments: Iterable[str]) -> list[str]:
    """The values of a repeatable argument with commas."""
    return [text for argument in arguments for text in argument.split(",")]
