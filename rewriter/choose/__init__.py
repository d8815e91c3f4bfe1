"""How a kernel is chosen for a site: what can run, what it takes, what is fastest.

`planner` asks for each match. `choose` makes a `choice` among the kernels of an op that
are `usable`: `forced` by name, by `known_times`, else `estimated`, else `by_rule`.
`residual_add_cost` is for an op with a residual add, and `choose_ring` for split keys.
`cached_operand` and `rounded_results` leave to XLA what is faster in its place.
`special_form` prefers an op's special form. `composite` chooses between an op and its
parts, and `nested_sites` between a site and those inside of it. `number_sites` puts
decisions at their places in the program.
"""
