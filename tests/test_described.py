"""Files whose tensors a ``--spec`` file names mean what the code of their authors computes."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from hesscore.checkpoints import load
from hesscore.checkpoints.family import Family
from hesscore.checkpoints.patterns import LEAVES
from hesscore.checkpoints.specfiles import read_spec_file
from hesscore.problem import open_problem
from tests.oracle import assert_same, made

CONFIGS = Path(__file__).parent.parent / "configs/checkpoints"
PAGE = (Path(__file__).parent.parent / "docs/checkpoints.md").read_text()
IDS = torch.tensor([[1, 4, 4, 0, 9, 10], [7, 2, 3, 12, 12, 12]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
TEXT = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}


def assert_described(folder, model, config, batch, stored):
    """``stored`` makes the parameters of the model, by name, into the tensors of a file that the config is of."""

    def save(model, folder):
        state = stored({name: parameter.detach() for name, parameter in model.named_parameters()})
        torch.save({name: tensor.clone() for name, tensor in state.items()}, folder / "model.pt")
        return folder / "model.pt"

    path = save(model, folder)
    assert_same(model, path, batch, save=save, described=CONFIGS / config)
    found = load(path, spec=CONFIGS / config)
    assert found.family == config
    return found


# --- the files in configs ---


def test_gpt2_by_its_names(tmp_path):
    fields = {"vocab_size": 13, "n_positions": 6, "n_embd": 24, "n_layer": 2, "n_head": 12, "n_inner": 8}
    model = made(GPT2LMHeadModel, GPT2Config(**fields))
    spec = assert_described(tmp_path, model, "gpt2.yaml", TEXT, lambda named: named).spec
    assert (spec.vocab, spec.seq_len, spec.d_model, spec.d_ff, spec.layers, spec.tied) == (13, 6, 24, 8, 2, True)


def test_pythia_by_its_names(tmp_path):
    config = GPTNeoXConfig(
        vocab_size=13,
        hidden_size=160,
        num_hidden_layers=2,
        num_attention_heads=8,
        intermediate_size=12,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.8},
    )

    def stored(named):
        buffers = ("bias", "masked_bias", "rotary_emb.inv_freq")
        state = {f"gpt_neox.layers.{i}.attention.{name}": torch.ones(1) for i in range(2) for name in buffers}
        return state | {name.replace("lm_head", "embed_out"): tensor for name, tensor in named.items()}

    found = assert_described(tmp_path, made(GPTNeoXForCausalLM, config), "pythia-70m.yaml", TEXT, stored)
    assert found.left_out["gpt_neox.layers.1.attention.bias"] == "ignored by pythia-70m.yaml"
    where = "gpt_neox.layers.1.attention.query_key_value.weight[20:40 of every 60]"
    assert found.tensors["blocks.1.attn.k.weight"] == where


META = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.layers": "layers",
}


def test_llama_as_meta_stores_it(tmp_path):
    """transformers has the features of q and k in another order, which its conversion script brings about."""
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=12,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )

    def stored(named):
        state = {}
        for name, tensor in named.items():
            if (
                "q_proj" in name or "k_proj" in name
            ):  # (heads, halves, pairs, in) here, (heads, pairs, halves, in) there
                tensor = tensor.view(-1, 2, 2, 128).transpose(1, 2).reshape(tensor.shape)
            for theirs, metas in META.items():
                name = name.replace(theirs, metas)
            state[name] = tensor
        return state

    model = made(LlamaForCausalLM, config)
    spec = assert_described(tmp_path, model, "llama3-8b-meta.yaml", TEXT, stored).spec
    assert (spec.gated, spec.bias, spec.mlp_bias, spec.tied, spec.final_norm) == (True, False, False, False, True)


TIMM = {
    "vit.embeddings.cls_token": "cls_token",
    "vit.embeddings.position_embeddings": "pos_embed",
    "vit.embeddings.patch_embeddings.projection": "patch_embed.proj",
    "vit.layers": "blocks",
    "attention.o_proj": "attn.proj",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "vit.layernorm": "norm",
    "classifier": "head",
}


def test_a_vit_as_timm_stores_it(tmp_path):
    config = ViTConfig(
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=8,
        layer_norm_eps=1e-6,
        num_labels=3,
    )

    def stored(named):
        state = {}
        for name, tensor in named.items():
            if "q_proj" in name:
                tensor = torch.cat([tensor, *(named[name.replace("q_proj", f"{part}_proj")] for part in "kv")])
                name = name.replace("attention.q_proj", "attn.qkv")
            if "k_proj" not in name and "v_proj" not in name:
                for theirs, timms in TIMM.items():
                    name = name.replace(theirs, timms)
                state[name] = tensor
        return state

    pixels = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = {"pixel_values": pixels, "labels": torch.tensor([2, 0])}
    spec = assert_described(
        tmp_path, made(ViTForImageClassification, config), "vit-small-timm.yaml", batch, stored
    ).spec
    assert (spec.class_token, spec.channels, spec.labels, spec.positions) == (True, 3, 3, "learned")


def test_every_file_is_of_a_test():
    tested = {"gpt2", "pythia-70m", "llama3-8b-meta", "vit-small-timm"} | {"sceptr-tiny"}  # in test_torch_encoder.py
    assert {path.stem for path in CONFIGS.iterdir()} == tested


# --- the page about them ---


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_the_files_on_the_page_can_be_read(tmp_path, text):
    (tmp_path / "spec.yaml").write_text(text)
    said = read_spec_file(tmp_path / "spec.yaml")
    assert len({leaf for pattern in said.patterns for leaf in pattern.leaves}) >= 15


def test_the_encoder_on_the_page_is_read_with_what_is_around_it(tmp_path):
    class Tagger(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.pos = torch.nn.Embedding(11, 16), torch.nn.Parameter(torch.randn(1, 64, 16))
            layer = torch.nn.TransformerEncoderLayer(16, 8, 20, 0.0, batch_first=True)
            self.encoder, self.out = torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(16, 5)

    (text,) = (text for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "emb," in text)
    (tmp_path / "spec.yaml").write_text(text)
    model = Tagger().double().eval()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    ids = torch.arange(20).view(2, 10) % 11
    labels = ids % 5
    np.savez(tmp_path / "data.npz", input_ids=ids, labels=labels)
    problem = open_problem(tmp_path / "model.pt", tmp_path / "data.npz", spec=tmp_path / "spec.yaml")
    logits = model.out(model.encoder(model.emb(ids) + model.pos[:, :10]))
    right = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert float(problem.curvature().loss) == pytest.approx(right.item(), rel=1e-10)


def test_the_page_has_every_family_and_every_part():
    rows = {line.split(" | ")[0].removeprefix("| ") for line in PAGE.splitlines() if line.startswith("| ")}
    assert {*Family.registry, "nn.TransformerEncoder"} <= rows
    for leaf in LEAVES:
        module, _, ending = leaf.removeprefix("blocks.{i}").rpartition(".")
        component = module.rpartition(".")[2]
        assert re.search(rf"`[a-z.{{}}]*\b{component}(\.{ending})?`", PAGE), leaf
