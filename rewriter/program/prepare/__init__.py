"""Passes before the search for sites: programs that compute the same become alike.

`platform_branches` takes the branch that targets run. `masks_in_loops` moves masks into
the loops that read them, and `masks_in_shards` moves them into the shard_maps. It uses
`parts_of_masks`. `slices_before_loops` takes slices of integers out of loops.
`joined_losses` adds up the terms of a loss row by row, and `sums_of_rows` splits sums
over all that there is into sums of rows. `differences_of_softmaxes` multiplies each
softmax of a sum by the values, and `parts_of_softmaxes` all parts of one at once.
`whole_products` multiplies by a matrix of few bits at once, and not by its parts.
"""
