"""Thin layers between the ops and the call shapes of other projects. Nothing here is imported by
`torch_paged_attn` itself."""
