"""The program: how it is traced, held as a graph, walked, folded and placed.

`trace` makes a jaxpr of a function. `graph` holds it as values and equations, bodies of
loops and calls included. `fold` shortens a program of many equal layers, which
`repeats` finds. `equal_constants` makes equal arrays one. `equations`, `bodies` and
`loops` read and change parts of a program. `strided_views` reads a value as a part of
an array. `propagation` and `placement` tell how
values are split over devices, and `collectives` counts what devices exchange.
"""
