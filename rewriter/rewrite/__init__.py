"""How a program is rewritten: a plan says what, a splice does it at one place.

`plan` is what is said of one site. `splice` is one replacement. `fragments` traces its
code, `bodies` says what must become of the bodies around it, and `replace` writes the
program anew. `rewritten` holds the outcome. `locate` adds how sites are split over
devices, and `unfold` applies one layer's rewrite to its identical layers. `passes`
change the program after that. `replacements` and `differing_inputs` keep what is needed
to compare before and after.
"""
