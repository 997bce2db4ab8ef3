"""The tiers that need a block's data: two-sided enclosures, and singular values with their errors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from zlib import crc32

import torch

from hesscore.blocks import FLAT, PARTS, WHOLE, BlockRow, estimated
from hesscore.bounds.tiers import BoundRow
from hesscore.curvature import Curvature
from hesscore.explicit.block import block_hessian
from hesscore.explicit.enclosure import enclose_norm
from hesscore.explicit.kronecker import KroneckerSum
from hesscore.spec import Spec
from hesscore.spectrum.ends import NonFiniteError

TOLERANCE = 1e-3
"""Of an exact value that is not from a decomposition, over the value."""


class OnData:
    """The ``tiers`` enclosure and exact of one block, in float64."""

    def __init__(self, curvature: Curvature, spec: Spec, tiers: Collection[str], seed: int) -> None:
        self.curvature, self.spec, self.tiers, self.seed = curvature, spec, tiers, seed
        self.places, start = {}, 0
        for name in curvature.parameters:
            stop = start + curvature.leaves[name].numel()
            self.places[name.removeprefix("blocks.0.")], start = range(start, stop), stop
        self.places[WHOLE] = range(start)
        self.formed: tuple[str, KroneckerSum] | None = None
        """The Hessian of one part, whose rows come one after the other."""

    def measure(self, row: BoundRow) -> BoundRow:
        """``row`` with these tiers."""
        at, by = self.places[row.row], self.places[row.column]
        if "enclosure" in self.tiers:
            hessian = self._hessian(row.part)
            between = enclose_norm(hessian.block(at, by))
            row = replace(row, enclosure_lower=between.lower, enclosure_upper=between.upper)
        if "exact" in self.tiers:
            rows, columns = (
                self.curvature.parameters if name == WHOLE else f"blocks.0.{name}" for name in (row.row, row.column)
            )
            block = self.curvature.block(rows, columns, PARTS[row.part])
            like = BlockRow(row.layer, row.row, row.column, row.part, len(at), len(by))
            rng = torch.Generator().manual_seed(self.seed ^ crc32(f"{row.row} {row.column} {row.part}".encode()))
            try:
                found = estimated(like, block, TOLERANCE, rng)
            except NonFiniteError:
                return replace(row, converged=False, note="a product with the Hessian is not finite")
            error = found.spectral_norm_error
            if row.enclosure_upper is not None and row.enclosure_lower is not None and found.spectral_norm is not None:
                within = max(row.enclosure_upper - found.spectral_norm, found.spectral_norm - row.enclosure_lower)
                error = within if error is None else min(error, within)  # the norm is in both
            flat = found.note == FLAT
            note = FLAT if flat else "" if found.converged else "not converged"
            row = replace(row, exact=found.spectral_norm, exact_error=error, converged=found.converged, note=note)
        return row

    def _hessian(self, part: str) -> KroneckerSum:
        if self.formed is None or self.formed[0] != part:
            self.formed = None  # before the next takes its memory
            self.formed = part, block_hessian(self.curvature, self.spec, PARTS[part])
        return self.formed[1]
