import os

from hypothesis import settings

# Tests compile many small programs and run each once: compiling without optimisation takes half the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

settings.register_profile("mwjax", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("mwjax")
