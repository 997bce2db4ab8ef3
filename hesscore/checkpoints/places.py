"""Where the leaves of a model lie in the tensors of a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """A leaf in a file: in which tensor, of which shape, and how it is taken from there into our layout.

    ``part`` says which part of the tensor it is, if not the whole.
    """

    name: str
    shape: Shape
    take: Callable[[Tensor], Tensor]
    part: str = ""


def whole(name: str, leaf: Shape) -> Place:
    """As it is."""
    return Place(name, leaf, lambda tensor: tensor)


def turned(name: str, leaf: Shape) -> Place:
    """A linear weight that lies ``(out, in)``, as ``nn.Linear`` keeps it; ours are ``(in, out)``."""
    return Place(name, leaf[::-1], lambda tensor: tensor.T)


TABLES = ("embed.token", "embed.position", "embed.segment", "head")
"""Components whose weight lies in rows: of a token, a position, an output."""


def linear(name: str, component: str, leaf: Shape) -> Place:
    """A weight as ``nn.Linear`` and ``nn.Embedding`` keep it, or a bias or a gain."""
    return whole(name, leaf) if len(leaf) == 1 or component in TABLES else turned(name, leaf)


def reshaped(name: str, leaf: Shape, shape: Shape) -> Place:
    """With the same numbers in the same order, in another shape."""
    return Place(name, shape, lambda tensor: tensor.reshape(leaf))


def fused(name: str, leaf: Shape, index: int, count: int, transposed: bool = True) -> Place:
    """One of ``count`` parts of equal width, whose output features lie side by side.

    ``transposed`` as in ``turned``, if the leaf is a matrix.
    """
    start, stop, shape = index * leaf[-1], (index + 1) * leaf[-1], (*leaf[:-1], count * leaf[-1])
    if transposed and len(leaf) > 1:
        return Place(name, shape[::-1], lambda tensor: tensor.T[..., start:stop], f"[{start}:{stop}]")
    return Place(name, shape, lambda tensor: tensor[..., start:stop], f"[{start}:{stop}]")


def interleaved(name: str, leaf: Shape, index: int, count: int, heads: int) -> Place:
    """One of ``count`` parts of equal width, which lie side by side within each head; matrices as in ``turned``."""
    shape = (count * leaf[-1], *leaf[:-1])

    def take(tensor: Tensor) -> Tensor:
        part = tensor.unflatten(0, (heads, count, -1))[:, index].flatten(0, 1)
        return part.T if part.ndim == 2 else part

    return Place(name, shape, take, f"[{index} of {count} for each head]")


def patched(name: str, leaf: Shape, channels: int) -> Place:
    """A convolution ``(out, channels, size, size)`` of that stride: a linear map of the pixels of a patch."""
    size = isqrt(leaf[0] // channels)
    return Place(name, (leaf[1], channels, size, size), lambda tensor: tensor.flatten(1).T)
