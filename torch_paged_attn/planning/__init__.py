"""What several backends derive from the shapes of a call: how much work there is, and how to cut
it.
"""
