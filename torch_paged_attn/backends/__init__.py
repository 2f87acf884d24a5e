"""One folder per backend, with the op names inside; `ops/_library.py` binds them."""
