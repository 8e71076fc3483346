"""The decoder: configuration, parameters, packed-row forward pass, incremental decoding, Hugging Face files."""

from mwjax.model.attention import attend
from mwjax.model.cache import Cache, decode_step, init_cache
from mwjax.model.config import ModelConfig, UnsupportedModelError, small_config
from mwjax.model.decoder import abstract_params, declarations, forward, init, logical_axes, unembedding
from mwjax.model.errors import ModelFilesError
from mwjax.model.hub import local_folder
from mwjax.model.reading import load, read_config
from mwjax.model.writing import check_free, save

__all__ = [
    "Cache",
    "ModelConfig",
    "ModelFilesError",
    "UnsupportedModelError",
    "abstract_params",
    "attend",
    "check_free",
    "declarations",
    "decode_step",
    "forward",
    "init",
    "init_cache",
    "load",
    "local_folder",
    "logical_axes",
    "read_config",
    "save",
    "small_config",
    "unembedding",
]
