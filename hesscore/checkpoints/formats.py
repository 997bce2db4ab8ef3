"""Formats told apart: by how a file begins, and by its name where that says what no content does."""

from __future__ import annotations

from fnmatch import fnmatchcase

from hesscore.checkpoints import safetensorfiles, torchfiles
from hesscore.errors import InputError
from hesscore.files import File

SAVE = "save the model with torch.save or safetensors"

SHARDS = {
    ("mp_rank_*_model_states.pt", "layer_*_states.pt", "*zero_pp_rank_*", "*_optim_states.pt", "global_step*"): (
        "a part of a DeepSpeed checkpoint: put it together with the zero_to_fp32.py beside it, and name the result"
    ),
    ("*.distcp", "pytorch_model_fsdp_*"): (
        "a part of a distributed checkpoint: put it together with "
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pt, and name the result"
    ),
}
"""Names of files and folders that hold parts of weights: of their content, torch can read some all the same."""

FOREIGN = {
    ("*.gguf",): "a GGUF file, in which weights are quantised: name the safetensors that it was made from",
    ("*.h5", "*.hdf5", "*.keras"): f"a file of Keras or TensorFlow: {SAVE}",
    ("*.pb", "*.index", "*.data-?????-of-?????", "*.ckpt.meta"): f"a file of TensorFlow: {SAVE}",
    ("*.msgpack",): f"a file of Flax: {SAVE}",
    ("*.onnx",): f"a file of ONNX: {SAVE}",
}
"""Names of files that other libraries write, and what they are."""

MAGIC = {b"GGUF": "*.gguf", b"\x89HDF\r\n\x1a\n": "*.h5"}


def shard(name: str) -> str | None:
    """What a file or folder of this name is, if that is a part of weights."""
    return next((what for patterns, what in SHARDS.items() if _matches(name, patterns)), None)


def foreign(name: str) -> str | None:
    """What a file of this name is, if another library writes such files."""
    return next((what for patterns, what in FOREIGN.items() if _matches(name, patterns)), None)


def is_checkpoint(head: bytes) -> bool:
    """Whether a file that begins so is read, if it is sound."""
    return torchfiles.begins(head) or safetensorfiles.begins(head)


def refused(file: File) -> InputError:
    """What to say of a file that is not."""
    head = file.head
    name = next((pattern for magic, pattern in MAGIC.items() if head.startswith(magic)), file.path.name)
    if what := foreign(name):
        return InputError(what)
    if head.startswith(b"\x80"):
        return InputError(f"a pickle, but not by torch.save; {torchfiles.RESAVE}")
    return InputError(f"not a checkpoint: no file of torch.save or safetensors begins with {head[:8]!r}")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
