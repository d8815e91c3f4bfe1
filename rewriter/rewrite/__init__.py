"""How a program is rewritten: a plan says what, a splice does it at one place.

`plan` is what is said of one site. `splice` is one replacement, and `fragments` traces
its code. `bodies` decides what becomes of loops and calls, `replace` puts all
replacements into the program, and `rewritten` is the outcome. `locate` adds how sites
are split over devices, and `unfold` applies one layer's rewrite to its identical
layers. `passes` change the program after
that. `replacements` and `differing_inputs` keep what is needed to compare before and
after.
"""
