"""Options that several commands share."""

from typing import Annotated

import typer

Tokens = Annotated[str | None, typer.Option(help="Token ids to score: .bin (uint16) or .npy.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Score the first N next tokens; by default 4096.")]
Layers = Annotated[str | None, typer.Option(help="Layers to report, as 0,3-5.")]
Components = Annotated[str | None, typer.Option(help="Components to report, as globs: 'attn.*,mlp.up'.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or float64; by default float64 up to 5 million parameters.")]
Seed = Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of everything that is drawn.")]
Csv = Annotated[str | None, typer.Option(help="Write the rows as CSV; - is stdout.")]
Json = Annotated[str | None, typer.Option(help="Write the rows and where they came from as JSON; - is stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")]
