"""How a kernel is chosen for a site: what can run, what it takes, what is fastest.

`planner` asks for each match. `choose` compares the kernels of one op, `choose_sum`
those of an op with a residual add, and `choose_ring` those for split keys.
`special_form` prefers an op's special form, and `composite` chooses between an op and
its parts. `placing` puts decisions at their places in the program.
"""
