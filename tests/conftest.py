import os
from importlib.util import find_spec

from hypothesis import settings

# Tests compile many small programs and run each once: compiling without optimisation takes half the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# Where libtpu is installed and no TPU is, jax would look for one in every process, and complain on stderr.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

settings.register_profile("mwjax", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("mwjax")

# The comparison with transformers needs torch, which is no dependency of the tests.
collect_ignore = [] if find_spec("torch") and find_spec("transformers") else ["parity"]
