"""Who decodes: the interface of engines, sampling with the project's own decoder, and GGUF checkpoints."""

from mwjax.engine.cache import cache_folder
from mwjax.engine.generate import DecoderEngine, generate
from mwjax.engine.gguf import CheckpointError, convert, load_smollm2
from mwjax.engine.interface import Completion, Engine, EngineError, SamplingParams

__all__ = [
    "CheckpointError",
    "Completion",
    "DecoderEngine",
    "Engine",
    "EngineError",
    "SamplingParams",
    "cache_folder",
    "convert",
    "generate",
    "load_smollm2",
]
