"""What all parts of the engine use: answers with reasons, files, threads, dtypes.

`verdict` answers a question with yes, or with every reason against it. `atomic`, `lock`
and `regular_files` write and read files that other processes use too. `threads` runs
work beside a call. `promotion` fixes how JAX promotes dtypes inside the engine.
`sizes` puts bytes into words. `assumptions` names what a user may let the engine
assume.
"""
