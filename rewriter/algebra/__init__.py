"""Normal forms: two spellings of a value become the same expression.

`normal_form` is the algebra, and `canonicalize` turns values of the graph into it.
`template` applies one analysis to equal code. `formula` applies a function to forms,
and `emit` turns a form back into equations. `custom_rules` proves a user's own rules of
derivatives.
"""
