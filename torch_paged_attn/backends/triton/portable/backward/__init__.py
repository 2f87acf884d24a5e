"""The backward of attention."""
