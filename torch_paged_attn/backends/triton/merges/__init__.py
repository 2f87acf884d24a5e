"""Results of parts of the keys merged into one: on one GPU, and across GPUs."""
