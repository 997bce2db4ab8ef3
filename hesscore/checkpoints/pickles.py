"""A look at a pickle before anything in it is built."""

from __future__ import annotations

import pickletools
from typing import IO, Any, NamedTuple

from hesscore.checkpoints.tensors import listed
from hesscore.errors import InputError

HEAVIEST = 10**7
"""Most objects in a pickle, each counted as often as it is referred to.  Checkpoints have 10^3 to 10^5."""


RESAVE = "torch.save only tensors and numbers: {'model': model.state_dict(), 'model_args': ...}"


class Item(NamedTuple):
    """What lies on the unpickler's stack: how many objects it is made of, and its value if that is text."""

    weight: int
    text: str = ""


MARK = Item(0, "a mark")


def globals_in(stream: IO[bytes]) -> list[str]:
    """Run a pickle on a stack of weights instead of objects, and return the globals that it names.

    A few bytes can hold a tuple of tuples of tuples ... that takes years to hash, or a call of it whose error
    message takes as long to write.  Both are an ``InputError``; a broken pickle may raise anything.
    """
    stack: list[Item] = []
    memo: dict[int, Item] = {}
    named: list[str] = []
    argument: Any
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "MARK":
            stack.append(MARK)
        elif opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif opcode.name in ("GLOBAL", "STACK_GLOBAL"):
            path = [item.text for item in _take(stack, opcode)] or argument.split(" ")
            named.append(".".join(path))
            stack.append(Item(0))
        else:
            taken = _take(stack, opcode)
            weight = 1 + sum(item.weight for item in taken)
            if opcode.name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX") and taken[0].weight:
                raise InputError(f"not sound: calls what is no function (it names {listed(named)}); nothing was run")
            if weight > HEAVIEST:
                raise InputError(f"not sound: it unfolds to more than {HEAVIEST} objects")
            text = argument if isinstance(argument, str) else ""
            stack += [Item(weight, text)] * len(opcode.stack_after)
    return named


def wants_code(named: list[str]) -> InputError:
    """What to raise for a pickle that would run the globals in ``named``."""
    return InputError(f"asks to run {listed(named)} on loading; nothing was run; {RESAVE}")


def _take(stack: list[Item], opcode: pickletools.OpcodeInfo) -> list[Item]:
    """Pop what an opcode takes, lowest first."""
    before = opcode.stack_before
    above: list[Item] = []
    if pickletools.markobject in before:
        mark = max(i for i, item in enumerate(stack) if item is MARK)
        above = stack[mark + 1 :]
        del stack[mark:]
        before = before[: before.index(pickletools.markobject)]
    below = [stack.pop() for _ in before][::-1]
    return below + above
