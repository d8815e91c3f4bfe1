"""How a kernel is chosen for a site: what can run, what it takes, what is fastest.

`planner` asks for each match. `choose` makes a `choice` among the kernels of an op that
are `usable`: `forced` by name, by `known_times`, else `estimated`, else `by_rule`.
`choose_sum` is for an op with a residual add, `choose_ring` for split keys.
`special_form` prefers an op's special form, and `composite` chooses between an op and
its parts. `placing` puts decisions at their places in the program.
"""
