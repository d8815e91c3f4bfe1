"""Normal forms: two spellings of a value become the same expression.

`normal_form` is the algebra, `canonicalize` turns values of the graph into it,
`template` applies one analysis to equal code, `formula` shows a form as text, and
`emit` turns a form back into equations.
"""
