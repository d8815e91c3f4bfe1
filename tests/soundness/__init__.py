"""Random programs, and whether they compute the same when they are rewritten.

They are drawn from what people write and from what arithmetic does at its edges, and
know nothing of what the rewriter looks for.
"""
