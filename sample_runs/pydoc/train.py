"""Train the sample: a character-level GPT on Python's own documentation, by hess's own gradients.

    python sample_runs/pydoc/train.py [--steps N] [--out FOLDER]

There is no autograd here: every gradient comes from the chain rule of ``hesscore``.  The files have the
layout of nanoGPT's ``prepare.py`` and ``train.py``.  The text is ``pydoc_data.topics``, which differs between
versions of Python; the files in this folder were made with Python 3.11.7 and torch 2.13.0.  The vocabulary is
printable ASCII, whatever the text, so that files made elsewhere fit these.
"""

import argparse
import math
import pickle
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hesscore.chain import Point
from hesscore.checkpoints.nanogpt import NanoGPT, spec_of
from hesscore.inputs.tokens import windows
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model

VOCABULARY = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
SCORED = 4096
"""Next tokens to predict in ``val.bin``, which is the start of the last tenth of the text."""

STEPS = 5000
SEED = 0
SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 128, "bias": True, "dropout": 0.0}
MODEL_ARGS = SIZES | {"vocab_size": len(VOCABULARY)}
FAMILY, SPEC = NanoGPT(), spec_of(MODEL_ARGS, tied=True)


class GPT:
    """The sample's weights by nanoGPT's names, with their gradients in ``.grad`` after ``differentiate``."""

    def __init__(self, rng: torch.Generator) -> None:
        self.graph = model(SPEC)
        shapes = {place.name: place.shape for place in FAMILY.places(SPEC).values()}
        self.state = {name: _initial(name, shape, rng) for name, shape in shapes.items()}
        gradients = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        for name, tensor in self.state.items():
            tensor.grad = gradients[name]
        self.leaves = FAMILY.views(self.state, SPEC)
        self.leaf_gradients = FAMILY.views(gradients, SPEC)

    def at(self, tokens: Tensor, targets: Tensor) -> Point:
        """The model at a batch of ``(B, L)`` token ids; its output is the mean cross entropy in nats."""
        return Point(self.graph, self.leaves | inputs(SPEC, tokens, targets))

    def differentiate(self, tokens: Tensor, targets: Tensor) -> float:
        """Fill in the gradient on a batch and return the loss."""
        point = self.at(tokens, targets)
        bundle = point.gradient(self.graph.parameter_positions)
        for leaf, gradient in self.leaf_gradients.items():
            gradient.copy_(bundle[self.graph.index[leaf]][0])
        return float(point.output)


def _initial(name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """GPT-2's: gains one, biases zero, matrices Gaussian, the ones that end a residual branch narrower."""
    if len(shape) == 1:
        return torch.full(shape, float(name.endswith("weight")))
    std = 0.02 / math.sqrt(2 * SPEC.layers) if name.endswith("c_proj.weight") else 0.02
    return std * torch.randn(shape, generator=rng)


def prepare(out: Path) -> tuple[Tensor, Tensor]:
    """Write ``train.bin``, ``val.bin`` and ``meta.pkl``, and return the ids of the first two."""
    index = {character: i for i, character in enumerate(VOCABULARY)}
    plain = "\n\n".join(topics.values()).translate(str.maketrans("‘’“”–—…", "''\"\"--."))
    ids = np.array([index[c] for c in plain if c in index], dtype="<u2")
    split = len(ids) * 9 // 10
    train, val = ids[:split], ids[split : split + SCORED + 1]
    train.tofile(out / "train.bin")
    val.tofile(out / "val.bin")
    meta = {"vocab_size": len(VOCABULARY), "itos": dict(enumerate(VOCABULARY)), "stoi": index}
    (out / "meta.pkl").write_bytes(pickle.dumps(meta))
    return torch.from_numpy(train.astype(np.int64)), torch.from_numpy(val.astype(np.int64))


def settings(steps: int) -> dict[str, Any]:
    """What nanoGPT keeps under ``config``."""
    return {
        "dataset": "pydoc",
        "init_from": "scratch",
        "gradient_accumulation_steps": 1,
        "batch_size": 16,
        **SIZES,
        "learning_rate": 3e-3,
        "max_iters": steps,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "grad_clip": 1.0,
        "decay_lr": True,
        "warmup_iters": steps // 50,
        "lr_decay_iters": steps,
        "min_lr": 3e-4,
        "device": "cpu",
        "dtype": "float32",
        "compile": False,
    }


def learning_rate(step: int, config: dict[str, Any]) -> float:
    """Linear warm-up, then a half cosine down to ``min_lr``."""
    warmup, low, high = config["warmup_iters"], config["min_lr"], config["learning_rate"]
    if step < warmup:
        return float(high * (step + 1) / (warmup + 1))
    done = (step - warmup) / (config["lr_decay_iters"] - warmup)
    return float(low + 0.5 * (1 + math.cos(math.pi * done)) * (high - low))


def adamw(gpt: GPT, config: dict[str, Any]) -> torch.optim.AdamW:
    """Weight decay on matrices only, in nanoGPT's order of groups."""
    groups = [
        {"params": [p for p in gpt.state.values() if p.ndim >= 2], "weight_decay": config["weight_decay"]},
        {"params": [p for p in gpt.state.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config["learning_rate"], betas=(config["beta1"], config["beta2"]))


def train(steps: int, out: Path) -> None:
    """Train for ``steps`` and write a checkpoint early, in the middle and at the end."""
    out.mkdir(parents=True, exist_ok=True)
    text, val = prepare(out)
    config = settings(steps)
    rng = torch.Generator().manual_seed(SEED)
    gpt = GPT(rng)
    optimizer = adamw(gpt, config)
    moments = {"early": max(1, steps // 50), "middle": max(1, steps // 5), "end": steps}
    held_out, best, start = windows(val, SPEC.seq_len), math.inf, time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        first = torch.randint(len(text) - SPEC.seq_len, (config["batch_size"], 1), generator=rng)
        batch = text[first + torch.arange(SPEC.seq_len + 1)]
        loss = gpt.differentiate(batch[:, :-1], batch[:, 1:])
        torch.nn.utils.clip_grad_norm_(gpt.state.values(), config["grad_clip"])
        optimizer.step()
        if step + 1 in moments.values() or step % 100 == 0:
            val_loss = float(gpt.at(*held_out).output)
            best = min(best, val_loss)
            seconds = time.perf_counter() - start
            print(f"step {step + 1}: train {loss:.4f}, val {val_loss:.4f}, {seconds:.0f} s", flush=True)
        for moment in (name for name, when in moments.items() if when == step + 1):
            checkpoint = {
                "model": gpt.state | {"lm_head.weight": gpt.state["transformer.wte.weight"]},
                "optimizer": optimizer.state_dict(),
                "model_args": MODEL_ARGS,
                "iter_num": step + 1,
                "best_val_loss": best,
                "config": config,
            }
            torch.save(checkpoint, out / f"ckpt-{moment}.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    train(arguments.steps, arguments.out)
