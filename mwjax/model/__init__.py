"""The decoder: configuration, parameters, packed-row forward pass, incremental decoding, Hugging Face files."""

from mwjax.model.adapters import merge_adapters
from mwjax.model.attention import attend
from mwjax.model.cache import Cache, decode_step, init_cache
from mwjax.model.config import LORA_TARGETS, Experts, LoRA, ModelConfig, UnsupportedModelError, small_config
from mwjax.model.decoder import (
    abstract_params,
    active_parameters,
    adapter_names,
    declarations,
    forward,
    forward_routed,
    init,
    init_adapters,
    logical_axes,
    unembedding,
)
from mwjax.model.errors import ModelFilesError
from mwjax.model.experts import Routing
from mwjax.model.hub import local_folder
from mwjax.model.parameters import join_params, split_params
from mwjax.model.reading import load, read_config
from mwjax.model.writing import check_free, save

__all__ = [
    "LORA_TARGETS",
    "Cache",
    "Experts",
    "LoRA",
    "ModelConfig",
    "ModelFilesError",
    "Routing",
    "UnsupportedModelError",
    "abstract_params",
    "active_parameters",
    "adapter_names",
    "attend",
    "check_free",
    "declarations",
    "decode_step",
    "forward",
    "forward_routed",
    "init",
    "init_adapters",
    "init_cache",
    "join_params",
    "load",
    "local_folder",
    "logical_axes",
    "merge_adapters",
    "read_config",
    "save",
    "small_config",
    "split_params",
    "unembedding",
]
