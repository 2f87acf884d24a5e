"""Which kernel runs a call, with which form and tiles."""
