"""Attention by a function of its scores, which the program wrote itself.

`softmax` finds the softmax of such a function, and `weights` finds weights that are the
function itself. Each hands its candidates to a region: `softmax_region` or
`weights_region`. A region reads the sum over keys, and lets `equations` read the
function. `positions` and `tables` read what the equations compute with.
"""
