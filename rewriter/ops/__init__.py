"""What an op is, how a kernel of it is declared, and for which device.

`op` declares an op by its formula, `kernel` a way to compute it, and `registry` finds
both by name. `device` and `tpu` describe the target. `cost` counts work, `estimate`
turns work into time, and `splittable` finds the axes along which work may be split.
"""
