"""Which tiles of queries and which of their keys a program has, and how parts are merged."""
