"""How time is measured on a device, and how to compile for one that is not here.

`timing` measures, `profile` reads the device's own clock, and `conditions` records
under which conditions. `ahead_of_time` compiles for a device from its description.
"""
