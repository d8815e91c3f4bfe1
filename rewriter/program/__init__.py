"""The program: how it is traced, held as a graph, walked, folded and placed.

`trace` makes a jaxpr of a function. The passes of `prepare` make programs that compute
the same alike, and `fold` shortens one of many equal layers, which `repeats` finds.
`graph` holds a program as values and equations, bodies of loops and calls included.
`equal_constants` merges equal arrays. `equations`, `bodies` and `loops` read and change
parts of a program. `strided_views` reads a value as a part of an array. `propagation`
and `placement` tell how values are split over devices, and `collectives` counts what
devices exchange.
"""
