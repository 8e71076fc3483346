"""The decoder and its files against transformers on torch. Collected where torch is installed (`pip install
".[parity]"` on Python 3.11), silently left out elsewhere."""
