"""Options that several commands share."""

from typing import Annotated

import typer

Data = Annotated[
    str | None, typer.Option(metavar="FILE", help="What is scored: .npz, .txt, or token ids as .npy or .bin (uint16).")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Score the first N tokens (default 4096; 256 for blocks on their own)."),
]
Loss = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="causal_lm, masked_lm, token, sequence, regression or hidden (default by the checkpoint's head).",
    ),
]
Spec = Annotated[
    str | None, typer.Option(metavar="FILE", help="What the tensors of a file of no known family are (.yaml).")
]
MemoryLimit = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory that hess may take, as 8GiB (default 90 % of what is free).")
]
Layers = Annotated[str | None, typer.Option(metavar="LIST", help="Layers to report, as 0,3-5.")]
Components = Annotated[str | None, typer.Option(metavar="GLOBS", help="Components to report: 'attn.*,mlp.up'.")]
Dtype = Annotated[str | None, typer.Option(metavar="TYPE", help="float32 or float64 (default up to 5M parameters).")]
Seed = Annotated[int, typer.Option(min=0, max=2**64 - 1, metavar="N", help="Seed of everything that is drawn.")]
Csv = Annotated[str | None, typer.Option(metavar="FILE", help="Write the rows as CSV; - is stdout.")]
Json = Annotated[str | None, typer.Option(metavar="FILE", help="Write rows and provenance as JSON; - is stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")]
