"""Operators for those who bring their own solvers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse.linalg import LinearOperator

Product = Callable[[Tensor], Tensor]
"""With ``(n,)`` or, many at once, ``(n, k)``."""


def linear_operator(
    shape: tuple[int, int], dtype: torch.dtype, product: Product, transposed: Product
) -> LinearOperator:
    """SciPy's operator of these products; vectors go to torch and back."""
    from scipy.sparse.linalg import LinearOperator

    def wrapped(product: Product) -> Callable[[NDArray[Any]], NDArray[Any]]:
        return lambda vectors: product(torch.as_tensor(vectors, dtype=dtype)).numpy()

    there, back = wrapped(product), wrapped(transposed)
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    return LinearOperator(shape, matvec=there, matmat=there, rmatvec=back, rmatmat=back, dtype=kind)
