"""How ops are found: a pattern proposes a site, and the normal form proves it.

`sieve` rejects programs without a site. `match` asks each pattern at its anchors. A
pattern uses `finder` to search around an anchor and returns a `reading`. `check` proves
that the reading equals the op's `reference`. `region` says which equations belong to a
site. `recomputable` lists what a replacement may compute itself, and `sliced_operands`
finds operands cut out of larger arrays. `inlined_rules` knows calls by their equations.
`pattern`, `declared` and `bindings` are for patterns that a user writes as an ordinary
function.
"""
