"""What torch.save and pickle.dump write, told from everything else before anything in it is built.

An unpickler that calls nothing but functions of a list can still be made to take years, or all memory, by a few bytes:
tuples of tuples of tuples, dictionaries whose keys all collide, calls on views of 10^12 numbers.  So a pickle is first
run on the kinds of its objects alone, in time and memory linear in its bytes; what passes takes as little to load.
"""

from __future__ import annotations

import pickletools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO, Any

from hesscore.errors import InputError
from hesscore.files import short

RESAVE = "torch.save only dense tensors and numbers, such as a state dict"

MOST_STEPS = 2_000_000
"""Opcodes in one pickle.  A weight takes about fifty, and each of its two moments as many."""

_CONTAINERS = frozenset(
    "PROTO STOP MARK BINGET LONG_BINGET BINPUT LONG_BINPUT APPEND APPENDS SETITEM SETITEMS "  # noqa: SIM905
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST EMPTY_DICT "
    "NONE NEWFALSE NEWTRUE BININT BININT1 BININT2 BINFLOAT BINUNICODE LONG1".split()
)


@dataclass(frozen=True)
class Dialect:
    """What a pickle may say."""

    opcodes: frozenset[str]
    calls: bool
    """Whether it may call what ``CALLS`` lists; else it may name nothing at all."""
    advice: str
    """How to write a file that is read."""
    foreign: str
    """What is said of other opcodes."""


TORCH = Dialect(
    _CONTAINERS | {"GLOBAL", "REDUCE", "BUILD", "BINPERSID"},
    calls=True,
    advice=RESAVE,
    foreign="its pickle protocol is not torch.save's own; torch.save it without pickle_protocol",
)
"""What torch.save writes of protocol 2, and torch loads."""

PLAIN = Dialect(
    _CONTAINERS | {"FRAME", "MEMOIZE", "SHORT_BINUNICODE", "GLOBAL", "STACK_GLOBAL"},
    calls=False,
    advice="pickle.dump only dictionaries of texts and numbers",
    foreign="it holds more than containers, texts and numbers",
)
"""What pickle.dump writes of containers, texts and numbers; globals only for the message that names them."""

_TENSOR = "storage, int, ints, ints, bool, OrderedDict"
_NUMPY = ("f2", "f4", "f8", "i4", "i8", "b1")
CALLS = {
    "collections.OrderedDict()": "OrderedDict",
    "collections.Counter(dict)": "Counter",
    "__builtin__.set(keys)": "set",
    f"torch._utils._rebuild_tensor_v2({_TENSOR})": "tensor",
    f"torch._utils._rebuild_tensor_v2({_TENSOR}, dict)": "tensor",
    f"torch._utils._rebuild_tensor_v3({_TENSOR}, torch dtype)": "tensor",
    f"torch._utils._rebuild_tensor_v3({_TENSOR}, torch dtype, dict)": "tensor",
    "torch._utils._rebuild_parameter(tensor, bool, OrderedDict)": "tensor",
    "torch.Size(ints)": "size",
    "torch.device(str)": "device",
    "torch.device(str, int)": "device",
    "_codecs.encode(str, 'latin1')": "bytes",
    **{f"numpy.dtype('{name}', bool, bool)": "numpy dtype" for name in _NUMPY},
    "numpy.core.multiarray.scalar(numpy dtype, bytes)": "scalar",
    "numpy._core.multiarray.scalar(numpy dtype, bytes)": "scalar",
    "persistent_load(str, storage type, str, str, int)": "storage",
    "persistent_load(str, storage type, str, str, int, NoneType)": "storage",
    "build(OrderedDict, dict)": "OrderedDict",
    "build(large OrderedDict, dict)": "OrderedDict",
    "build(numpy dtype, numpy state)": "numpy dtype",
}
"""What a pickle may have called, on what, and the kind of the result.  None of them walks through its arguments."""

FUNCTIONS = {call.partition("(")[0] for call in CALLS}
WORDS = ("latin1", *_NUMPY)
KEYS = ("str", "int", "float", "bool", "NoneType")
"""What may be the key of a dictionary: few of these have one hash, which is not so for tuples and large numbers."""
STORAGES = re.compile(
    r"torch\.(storage\.Untyped|Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool|ComplexDouble|ComplexFloat)"
    r"Storage"
)
DTYPES = re.compile(r"torch\.(bool|bfloat16|(u?int|float|complex)\d+(_e\w+)?)")
NUMPY_STATES = [(3, order, None, None, None, -1, -1, 0) for order in "<>|"]


@dataclass
class Made:
    """Any object but a tuple, text, a number and ``None``.  The kind of a function is its name."""

    kind: str
    contents: Counter[str] = field(default_factory=Counter)
    """How many of each kind a list holds, or a dictionary has for keys."""


def scan(stream: IO[bytes], dialect: Dialect = TORCH) -> Any:
    """Run a pickle up to its end and return what it makes: tuples of ``Made``, texts, numbers and ``None``.

    ``InputError`` for what is not of its dialect; a broken pickle may raise anything.
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # what lies under each open mark
    memo: dict[int, Any] = {}
    argument: Any
    for step, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if step == MOST_STEPS:
            raise InputError(f"not sound: its pickle has more than {MOST_STEPS} steps; {dialect.advice}")
        if opcode.name not in dialect.opcodes:
            raise ValueError(dialect.foreign)
        if opcode.name == "MARK":
            below.append(stack)
            stack = []
        elif opcode.name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = len(memo) if argument is None else argument
            if place > step:  # pickle would make room for all places before it
                raise ValueError(f"it puts its object {step} at place {place}")
            memo[place] = stack[-1]
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif opcode.name not in ("PROTO", "FRAME"):
            above: list[Any] = []
            before = opcode.stack_before
            if pickletools.markobject in before:
                above, stack = stack, below.pop()
                before = before[: before.index(pickletools.markobject)]
            taken = [stack.pop() for _ in before][::-1] + above
            stack.append(_made(opcode.name, argument, taken, dialect))
    return stack[-1]


def kind(value: Any) -> str:
    """What an object is, as far as ``CALLS`` tells objects apart: by type, and large ones from others."""
    if isinstance(value, Made):
        if value.contents.total() > 100:
            return f"large {value.kind}"
        return "keys" if value.kind == "list" and value.contents.keys() <= set(KEYS) else value.kind
    if isinstance(value, tuple):
        if value in NUMPY_STATES:
            return "numpy state"
        return "ints" if len(value) <= 64 and all(type(item) is int for item in value) else "tuple"
    if isinstance(value, str) and len(value) > 1000:
        return "long str"
    if isinstance(value, int) and abs(value) >= 2**60:  # whose hashes may all be the same
        return "large int"
    return type(value).__name__


def _made(opcode: str, argument: Any, taken: list[Any], dialect: Dialect) -> Any:
    """What an opcode puts in the place of what it takes."""
    match opcode:
        case "NEWTRUE" | "NEWFALSE":
            return opcode == "NEWTRUE"
        case "EMPTY_TUPLE" | "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
            return tuple(taken)
        case "EMPTY_LIST" | "EMPTY_DICT":
            return Made(opcode.removeprefix("EMPTY_").lower())
        case "APPEND" | "APPENDS":
            return _filled(taken[0], map(kind, taken[1:]))
        case "SETITEM" | "SETITEMS":
            keys = list(map(kind, taken[1::2]))
            wrong = next((key for key in keys if key not in KEYS), None)
            if wrong:
                raise InputError(
                    f"a dictionary in it has a {wrong} for a key, not a name or a number; {dialect.advice}"
                )
            return _filled(taken[0], keys)
        case "GLOBAL":
            return Made(_named(argument.replace(" ", ".", 1), dialect))
        case "STACK_GLOBAL":
            return Made(_named(".".join(taken), dialect))
        case "REDUCE":
            return Made(_called(kind(taken[0]), taken[1]))
        case "BINPERSID":
            return Made(_called("persistent_load", taken[0]))
        case "BUILD":
            _called("build", tuple(taken))
            return taken[0]
        case "STOP":
            return taken[0]
    return argument


def _filled(container: Any, kinds: Iterable[str]) -> Made:
    if not isinstance(container, Made):
        raise ValueError(f"it puts something into a {kind(container)}")
    container.contents.update(kinds)
    return container


def _named(name: str, dialect: Dialect) -> str:
    """The kind of what a pickle names; ``InputError`` if that might be code."""
    if dialect.calls:
        if STORAGES.fullmatch(name):
            return "storage type"
        if DTYPES.fullmatch(name):
            return "torch dtype"
        if name in FUNCTIONS:
            return name
    raise InputError(f"asks to run {short(name)} on loading; nothing was run; {dialect.advice}")


def _called(function: str, arguments: Any) -> str:
    """The kind of what a call returns; ``InputError`` unless it is one of ``CALLS``."""
    kinds = ["..."]
    if isinstance(arguments, tuple) and len(arguments) <= 8:
        kinds = [repr(value) if value in WORDS else kind(value) for value in arguments]
    call = f"{function}({', '.join(kinds)})"
    if call not in CALLS:
        raise InputError(f"not sound: calls {call}, which torch.save never does; nothing was run")
    return CALLS[call]
