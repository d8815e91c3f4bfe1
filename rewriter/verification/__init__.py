"""How a rewritten program is compared with the original.

`probes` makes arguments that show differences, and `decision_inputs` finds which inputs
a comparison reads. `rounding` tells the precision in which a result is computed,
`judge` says what differs by more, `compare` runs two functions, and `check_sites` finds
the site that differs.
"""
