"""A server that has given its memory back: it takes no request, for an answer would come from weights that are gone.

Hooks around SGLang's calls for it. What they are asked twice, as a client does that got no answer, they do once, and
answer when it is done.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


def is_asleep(manager: Any) -> bool:
    """Whether the memory of this tokenizer manager's scheduler is given back, or on its way."""
    return bool(getattr(manager, "sdpo_is_asleep", False))


async def fall_asleep(
    original: Callable[..., Awaitable[None]], manager: Any, obj: Any, *arguments: Any, **named: Any
) -> None:
    """Around the release of memory.

    Raises:
        ValueError: of a part of it.
    """
    if obj.tags:
        raise ValueError(f"release_memory_occupation: got tags {obj.tags}, expected none: memory goes as a whole.")
    async with _turn(manager):
        if not is_asleep(manager):
            manager.sdpo_is_asleep = True
            await original(manager, obj, *arguments, **named)


async def wake_up(original: Callable[..., Awaitable[None]], manager: Any, *arguments: Any, **named: Any) -> None:
    """Around its return."""
    async with _turn(manager):
        if is_asleep(manager):
            await original(manager, *arguments, **named)
            manager.sdpo_is_asleep = False


def _turn(manager: Any) -> asyncio.Lock:
    lock: asyncio.Lock = vars(manager).setdefault("sdpo_turn", asyncio.Lock())
    return lock
