"""Encoders of PyTorch, files of them, and what a ``--spec`` file says of these."""

from types import SimpleNamespace

import torch
from torch import nn

from tests.oracle import randomised


class Scored(nn.Module):
    """An encoder in a model of its own, as transformers has them."""

    def __init__(self, layers=2, d_model=6, nhead=3, d_ff=10, final=False, causal=False, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d_model, nhead, d_ff, batch_first=True, **options)
        eps, bias = options.get("layer_norm_eps", 1e-5), options.get("bias", True)
        norm = nn.LayerNorm(d_model, eps=eps, bias=bias) if final else None
        self.encoder = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.config, self.causal = options, causal

    def forward(self, inputs_embeds, attention_mask=None):
        later = nn.Transformer.generate_square_subsequent_mask(inputs_embeds.shape[1]).isinf() if self.causal else None
        unseen = None if attention_mask is None else attention_mask == 0
        return SimpleNamespace(last_hidden_state=self.encoder(inputs_embeds, later, unseen))


def made(*args, **options):
    return randomised(Scored(*args, **options))


def drawn(width=6, length=5):
    x, target = torch.randn(2, 2, length, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"inputs_embeds": x, "labels": target}


def written(folder, **fields):
    """A spec file; ``None`` leaves a field out."""
    family = {"family": "nn.TransformerEncoder", "prefix": "encoder."}
    fields = family | {"heads": 3, "placement": "post", "activation": "relu"} | fields
    path = folder / "spec.yaml"
    path.write_text("".join(f"{field}: {value}\n" for field, value in fields.items() if value is not None))
    return path


def saved(folder, state):
    path = folder / "model.pt"
    torch.save(state, path)
    return path
