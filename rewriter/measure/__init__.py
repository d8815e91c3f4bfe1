"""Measurements: what is known of a kernel's time, and how it is measured.

Known times: a `key` names what was measured, `measurement` and `tuned` hold it,
`serialized` and `schema` read and write it, `cache` keeps it on disk, and `sources`
looks it up. Measuring: `programs` and `inputs` make what is run, `candidate`, `times`
and `race` compare candidates in a process of their own (`isolate`), and `autotune` does
it for a program. `program_key` and `end_to_end_race` are for whole programs. `oracle`
computes in float64 what results are compared with.
"""
