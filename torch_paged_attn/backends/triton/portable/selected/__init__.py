"""Selected attention, its backward, and the selection of keys."""
