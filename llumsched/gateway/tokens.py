# SPDX-License-Identifier: Apache-2.0
"""Reading requests and counting their tokens without blocking the event loop.

Work of more than a few milliseconds (large bodies, rendering, encoding) is done by processes with limits of time and
memory (`reading`). If counting takes too long or its process dies, the count is estimated from the length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llumsched.gateway import errors, prompts
from llumsched.gateway.body import Body, Prompt
from llumsched.gateway.chats.form import Form
from llumsched.gateway.continuable import CannotContinue, Outline, outline
from llumsched.gateway.errors import InvalidRequest
from llumsched.gateway.frames import Job, Task
from llumsched.gateway.reading import Readers, Unavailable

_READ_HERE_BYTES: Final = 1 << 20
"""Longest body that is read in this process, in at most 5 ms."""
_COUNTED_HERE_BYTES: Final = 1 << 16
"""Longest body that is counted by its length in this process, in at most 4 ms."""
_MEMORY_BYTES: Final = 1 << 30
_READ_BYTES_PER_S: Final = 16 << 20
_WAIT_S: Final = 0.1
"""Longest wait for a free process, for a request that can be estimated."""
_LONG_WAIT_S: Final = 5.0
"""Longest wait for a free process, for a request that cannot be estimated."""


class TokenCounter:
    """Reads and counts requests. `cpu_s`: limit of processor time for one count."""

    def __init__(
        self,
        tokenizers: Mapping[str, str],
        chat_template: str = "",
        *,
        cpu_s: float = 0.5,
        num_processes: int = 2,
    ) -> None:
        self._models = frozenset(tokenizers)
        self._cpu_s = cpu_s
        self._readers = Readers(dict(tokenizers), chat_template, num_processes, _MEMORY_BYTES)

    async def start(self) -> None:
        """Starts the processes. Raises ValueError for a missing tokenizer."""
        if self._models:
            await self._readers.start()

    async def close(self) -> None:
        await self._readers.close()

    async def read(self, content: bytes | bytearray) -> Body:
        """Reads a body. Raises InvalidRequest if no engine could take it, Overloaded if it cannot be read now."""
        if len(content) <= _READ_HERE_BYTES:
            return Body.read(content)
        try:
            cpu_s = self._cpu_s + len(content) / _READ_BYTES_PER_S
            answer = await self._readers.run(Job(Task.READ, cpu_s), content, _LONG_WAIT_S)
        except Unavailable:
            raise errors.Overloaded("Too many large requests are being read.", retry_after_s=1) from None
        if answer.head is None:
            raise InvalidRequest(answer.fault or "The body takes too long to read.")
        return Body(content, answer.head)

    async def outline(self, body: Body) -> Outline:
        """The outline of a body. Raises CannotContinue."""
        if len(body.content) <= _COUNTED_HERE_BYTES:
            try:
                return outline(body.document())
            except InvalidRequest as error:
                raise CannotContinue(str(error)) from None
        try:
            cpu_s = self._cpu_s + len(body.content) / _READ_BYTES_PER_S
            answer = await self._readers.run(Job(Task.OUTLINE, cpu_s), body.content, _LONG_WAIT_S)
        except Unavailable:
            raise CannotContinue("too many large requests are being read") from None
        if answer.outline is None:
            raise CannotContinue(answer.fault or "its body takes too long to read")
        return answer.outline

    def knows(self, model: str) -> bool:
        """True if the model has a tokenizer."""
        return model in self._models or "" in self._models

    async def count(self, body: Body, block_size: int = 0, form: Form = Form.OPENAI) -> Prompt:
        """The length of a prompt and, with a `block_size`, the known names of its blocks."""
        is_small = len(body.content) <= _COUNTED_HERE_BYTES
        if form is Form.OTHER and not is_small:
            return Prompt(prompts.of_bytes(len(body.content)))
        if is_small and (form in (Form.OTHER, Form.TOKENS) or not self.knows(body.model)):
            return _counted_here(body, form, block_size)
        job = Job(Task.COUNT, self._cpu_s, body.model, block_size, form)
        try:
            answer = await self._readers.run(job, body.content, _WAIT_S if is_small else _LONG_WAIT_S)
        except Unavailable:
            return _counted_here(body, form, block_size) if is_small else Prompt(prompts.of_bytes(len(body.content)))
        if answer.num_tokens is None:
            return Prompt(prompts.of_bytes(len(body.content)))
        return Prompt(answer.num_tokens, answer.blocks, block_size if answer.blocks else 0)


def _counted_here(body: Body, form: Form, block_size: int) -> Prompt:
    """Estimates without a tokenizer. Token ids are exact, and their blocks have names."""
    try:
        document = body.document()
        counted = prompts.count(None, document, form)
        names = prompts.blocks(document, counted.token_ids, block_size)
        return Prompt(counted.num_tokens, names, block_size if names else 0)
    except InvalidRequest:  # the engine says what is wrong
        return Prompt(prompts.of_bytes(len(body.content)))
